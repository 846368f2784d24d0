"""Images in one folder per class, the layout of ImageNet.

Source of the augmentation: C. Szegedy et al., Going Deeper with Convolutions, 2015, 1409.4842,
section 6 (crops of 8 to 100 % of the area with aspect ratios of 3/4 to 4/3), and a horizontal flip
of half of the samples.
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from runner.data.dataset import Data, DataUnavailable, data_folder
from runner.data.seeding import generator_for

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel of ImageNet's training images, in [0, 1]."""

LARGER = 256 / 224
"""Ratio of the shorter side of a held-out image to the side of its centre crop."""

WAY_FORWARD = (
    "Set data.root (or $DATA) to a folder that holds train/<class>/<image> and val/<class>/<image>."
)


class SeededImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with random augmentation that depends on seed, epoch and sample alone."""

    def __init__(self, images: ImageFolder, change: v2.Transform, seed: int) -> None:
        self.images = images
        self.change = change
        self.seed = seed
        self.epoch = 0

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
    place = data_folder(root, f". {WAY_FORWARD}")
    try:
        train, test = ImageFolder(place / "train"), ImageFolder(place / "val")
    except OSError as error:
        raise DataUnavailable(f"data.root={place}: {error}. {WAY_FORWARD}") from error
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataUnavailable(
            f"data.root={place}: train and val hold different classes ({', '.join(odd[:5])}). "
            + WAY_FORWARD
        )
    return Data(
        train=SeededImages(train, random_crop(size) if augment else centre_crop(size), seed),
        test=SeededImages(test, centre_crop(size), seed),
        items="samples",
    )


def random_crop(size: int) -> v2.Transform:
    """Return a random crop and flip of an image to normalised float32 [3, size, size]."""
    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *_to_tensor()])


def centre_crop(size: int) -> v2.Transform:
    """Return the crop of an image's centre to normalised float32 [3, size, size]."""
    return v2.Compose([v2.Resize(round(size * LARGER)), v2.CenterCrop(size), *_to_tensor()])


def _to_tensor() -> list[v2.Transform]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
