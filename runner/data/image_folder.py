"""Images in one folder a class, as ImageNet is unpacked.

Source of the augmentation: C. Szegedy et al., Going Deeper with Convolutions, 2015, 1409.4842,
section 6 (a crop of 8 to 100 % of the area, 3/4 to 4/3 as wide as high), and a mirror image of half
of the samples.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from runner.data.dataset import Data, DataUnavailable
from runner.data.seeding import generator_for

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's training images, in [0, 1], over all pixels of a channel."""

LARGER = 256 / 224
"""The shorter side of a held-out image is this much longer than the square cut from its centre."""


class SeededImages(Dataset[tuple[Tensor, Tensor]]):
    """Images read one at a time, changed at random by seed, epoch and sample alone.

    Args:
        images: pairs of an image and its class.
        change: an image to float32 [3, size, size]; it draws from torch's global generator.
        seed: of what is drawn.
    """

    def __init__(self, images: ImageFolder, change: v2.Transform, seed: int) -> None:
        self.images = images
        self.change = change
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw anew from the next sample on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = self.images[index]
        drawn = generator_for(f"change of image {index}", self.seed, self.epoch)
        # The transforms know no generator of their own; what the model draws must not notice.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(drawn.get_state())
            return self.change(image), torch.tensor(target)


def image_folder(root: str | None, size: int, augment: bool, seed: int) -> Data:
    """Images of `root/train` and `root/val`, float32 [3, size, size], normalised, and their class.

    Classes are the names of the subfolders of `root/train`, in order; `root/val` has the same.

    Args:
        root: the folder that holds both; None for the one `$DATA` names.
        size: pixels of a side.
        augment: crop and mirror the training images at random; otherwise all are cut from the
            centre.
        seed: of crops and mirror images.

    Raises:
        DataUnavailable: when no folder is named, one is missing or holds no images, or the classes
            differ.
        ValueError: when the size is below one.
    """
    if size < 1:
        raise ValueError(f"size {size} must be at least 1")
    folder = root or os.environ.get("DATA")
    if not folder:
        raise DataUnavailable(f"data.root is not set, and neither is $DATA. {_way_forward()}")
    place = Path(folder).expanduser()
    try:
        train, test = ImageFolder(place / "train"), ImageFolder(place / "val")
    except OSError as error:
        raise DataUnavailable(f"data.root={place}: {error}. {_way_forward()}") from error
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataUnavailable(
            f"data.root={place}: train and val hold different classes ({', '.join(odd[:5])}). "
            + _way_forward()
        )
    centre = v2.Compose([v2.Resize(round(size * LARGER)), v2.CenterCrop(size), *_to_tensor()])
    at_random = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *_to_tensor()])
    return Data(
        train=SeededImages(train, at_random if augment else centre, seed),
        test=SeededImages(test, centre, seed),
        items="samples",
    )


def _to_tensor() -> list[v2.Transform]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


def _way_forward() -> str:
    return (
        "Set data.root (or $DATA) to a folder that holds train/<class>/<image> and "
        "val/<class>/<image>."
    )
