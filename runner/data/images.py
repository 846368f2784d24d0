"""CIFAR-10 as torchvision reads it, and images in one folder per class, the layout of ImageNet.

Sources: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009, cropped and
flipped as in K. He et al., Deep Residual Learning for Image Recognition, 2016, section 4.2; folders
of images as in C. Szegedy et al., Going Deeper with Convolutions, 2015, 1409.4842, section 6 (crops
of 8 to 100 % of the area with aspect ratios of 3/4 to 4/3), and a flip of half of the samples.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2

from runner.data.dataset import Data, DataUnavailable, data_folder
from runner.data.random_state import generator_for

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel of the training images, in [0, 1]: ImageNet's."""

PADDING = 4
LARGER = 256 / 224
"""Ratio of the shorter side of a held-out image to the side of its centre crop."""

CIFAR_ADVICE = (
    f"Either set data.root (or $DATA) to a folder that holds {CIFAR10.base_folder}, "
    "or set data.download=true on a machine with a network."
)
FOLDER_ADVICE = (
    "Set data.root (or $DATA) to a folder that holds train/<class>/<image> and val/<class>/<image>."
)


class NormalisedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory as bytes, cropped, flipped and normalised by batch."""

    def __init__(self, images: Tensor, targets: Tensor, augment: bool, seed: int) -> None:
        self.images, self.targets = images, targets
        self.augment, self.seed = augment, seed
        self._choices: Tensor | None = None
        self._mean = torch.tensor(CIFAR_MEAN).view(3, 1, 1)
        self._std = torch.tensor(CIFAR_STD).view(3, 1, 1)

    def set_epoch(self, epoch: int) -> None:
        """Draw the crop and the flip of every sample for this epoch."""
        if self.augment:
            # Every rank draws the whole table, so that any rank may read a sample.
            generator = generator_for("crops and flips", self.seed, epoch)
            self._choices = _choices(len(self), generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of these samples: float32 [B, 3, H, W] and int64 [B]."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, chosen)
        if self.augment:
            table = self._choices
            choices = _choices(len(chosen), None) if table is None else table[chosen]
            images = crop_and_flip(images, choices)
        scaled = images.to(torch.float32).div_(255)
        return scaled.sub_(self._mean).div_(self._std), self.targets.index_select(0, chosen)


def _choices(count: int, generator: torch.Generator | None) -> Tensor:
    """Draw the `choices` of `crop_and_flip`, int64 [count, 3]."""
    crops = torch.randint(0, 2 * PADDING + 1, (count, 2), generator=generator)
    flips = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([crops, flips], dim=1)


def crop_and_flip(images: Tensor, choices: Tensor) -> Tensor:
    """Crop each image from itself padded with black, and flip some of them."""
    height, width = images.shape[-2:]
    padded = torch.nn.functional.pad(images, (PADDING,) * 4)
    top, left, flipped = choices.unbind(1)
    rows = top[:, None] + torch.arange(height)
    across = torch.arange(width)
    columns = left[:, None] + torch.where(flipped[:, None] == 1, across.flip(0), across)
    which = torch.arange(len(images))[:, None, None]
    # Indexing puts the channels last.
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def cifar10(root: str | None, download: bool, augment: bool, seed: int) -> Data:
    """Load CIFAR-10: normalised float32 images [N, 3, 32, 32] and int64 targets [N], 10 classes."""
    place = data_folder(root, f": CIFAR-10 has no folder to be in. {CIFAR_ADVICE}")
    try:
        if download:
            place.mkdir(parents=True, exist_ok=True)
            # The first rank of a machine downloads; the others wait and find complete files.
            with FileLock(place / f".{CIFAR10.base_folder}.lock"):
                CIFAR10(place, download=True)
        train, test = _read(place, augment, seed), _read(place, None, seed)
    except (OSError, RuntimeError) as error:  # torchvision's RuntimeError: files are not complete
        raise DataUnavailable(
            f"data.root={place}: no complete {CIFAR10.base_folder} is in this folder ({error}). "
            + CIFAR_ADVICE
        ) from error
    return Data(train, test, "samples")


def _read(place: Path, augment: bool | None, seed: int) -> NormalisedImages:
    """Read the training images, or for None the test images."""
    part = CIFAR10(place, train=augment is not None)
    images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return NormalisedImages(images, torch.tensor(part.targets), bool(augment), seed)


class SeededImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with random augmentation that depends on seed, epoch and sample alone."""

    def __init__(self, images: ImageFolder, change: v2.Transform, seed: int) -> None:
        self.images, self.change = images, change
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the augmentation of the next samples depends on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = self.images[index]
        drawn = generator_for(f"change of image {index}", self.seed, self.epoch)
        # The transforms draw from the global generator, whose state the model must find unchanged.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(drawn.get_state())
            return self.change(image), torch.tensor(target)


def image_folder(root: str | None, size: int, augment: bool, seed: int) -> Data:
    """Load `root/train` and `root/val`: normalised float32 images [3, size, size] and classes."""
    if size < 1:
        raise ValueError(f"size {size} must be at least 1")
    place = data_folder(root, f". {FOLDER_ADVICE}")
    try:
        train, test = ImageFolder(place / "train"), ImageFolder(place / "val")
    except OSError as error:
        raise DataUnavailable(f"data.root={place}: {error}. {FOLDER_ADVICE}") from error
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataUnavailable(
            f"data.root={place}: train and val hold different classes ({', '.join(odd[:5])}). "
            + FOLDER_ADVICE
        )
    tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    centre = v2.Compose([v2.Resize(round(size * LARGER)), v2.CenterCrop(size), *tensor])
    cropped = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *tensor])
    return Data(
        SeededImages(train, cropped if augment else centre, seed),
        SeededImages(test, centre, seed),
        "samples",
    )
