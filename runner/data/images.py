"""CIFAR-10 as torchvision reads it, and images in one folder per class, the layout of ImageNet.

CIFAR-10 is cropped and flipped as in K. He et al., Deep Residual Learning for Image Recognition,
2016, section 4.2. Folders are cropped as in C. Szegedy et al., Going Deeper with Convolutions,
2015, 1409.4842, section 6 (8 to 100 % of the area, aspect ratios of 3/4 to 4/3), and half are
flipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2

from runner.config.problem import ArgumentError
from runner.data.dataset import Data, DataUnavailable, data_folder
from runner.data.order import generator_for

CIFAR_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel of the training images, in [0, 1]: of ImageNet."""

LARGER = 256 / 224
"""Ratio of the shorter side of a held-out image to the side of its centre crop."""

ADVICE = "Set data.root (or $DATA) to a folder that holds"
CIFAR_ADVICE = f"{ADVICE} {CIFAR10.base_folder}, or set data.download=true"
FOLDER_ADVICE = f"{ADVICE} train/<class>/<image> and val/<class>/<image>"


@dataclass(eq=False, repr=False)
class SeededImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with random augmentation that depends on seed, epoch and sample alone."""

    draws_nothing: ClassVar[bool] = True  # of the generators that it finds
    images: CIFAR10 | ImageFolder
    change: v2.Transform
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
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


def cifar10(root: str | None, download: bool, augment: bool, seed: int) -> Data:
    """Load CIFAR-10: normalised float32 images [3, 32, 32] of 10 classes."""
    place = data_folder(root, CIFAR_ADVICE)
    try:
        if download:
            place.mkdir(parents=True, exist_ok=True)
            # The first rank of a machine downloads; the others wait and find complete files.
            with FileLock(place / f".{CIFAR10.base_folder}.lock"):
                CIFAR10(place, download=True)
        train = CIFAR10(place, train=True)
        test = CIFAR10(place, train=False)
    except (OSError, RuntimeError) as error:  # torchvision's RuntimeError: files are not complete
        raise DataUnavailable(f"data.root={place}: {error}. {CIFAR_ADVICE}") from error
    plain = _tensor(CIFAR_STATISTICS)
    changed = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), plain])
    seen = SeededImages(train, changed if augment else plain, seed)
    return Data(seen, SeededImages(test, plain, seed), "samples")


def _tensor(statistics: tuple[Sequence[float], Sequence[float]]) -> v2.Transform:
    """Return what makes a normalised float32 image [3, H, W], given means and deviations."""
    means, deviations = statistics
    scaled = v2.ToDtype(torch.float32, scale=True)
    return v2.Compose([v2.ToImage(), scaled, v2.Normalize(list(means), list(deviations))])


def image_folder(root: str | None, size: int, augment: bool, seed: int) -> Data:
    """Load `root/train` and `root/val`: normalised float32 images [3, size, size] and classes."""
    if size < 1:
        raise ArgumentError("size", f"{size} must be at least 1")
    place = data_folder(root, FOLDER_ADVICE)
    try:
        train = ImageFolder(place / "train")
        test = ImageFolder(place / "val")
    except OSError as error:
        raise DataUnavailable(f"data.root={place}: {error}. {FOLDER_ADVICE}") from error
    if train.classes != test.classes:
        odd = ", ".join(sorted({*train.classes} ^ {*test.classes})[:5])
        raise DataUnavailable(f"data.root={place}: train and val have different classes ({odd})")
    tensor = _tensor(STATISTICS)
    centre = v2.Compose([v2.Resize(round(size * LARGER)), v2.CenterCrop(size), tensor])
    cropped = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), tensor])
    seen = SeededImages(train, cropped if augment else centre, seed)
    return Data(seen, SeededImages(test, centre, seed), "samples")
