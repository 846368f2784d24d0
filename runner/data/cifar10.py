"""CIFAR-10 in torchvision's folder layout, augmented one batch at a time.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Crop and flip
follow K. He et al., Deep Residual Learning for Image Recognition, 2016, section 4.2.
"""

import http.client
import socket
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10

from runner.data.dataset import Data, DataUnavailable, data_folder
from runner.data.seeding import generator_for

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of each channel of the training images, in [0, 1]."""

PADDING = 4
SILENCE = 20.0
"""Seconds without an answer after which a download fails."""

WAYS_FORWARD = (
    f"Either set data.root (or $DATA) to a folder that holds {CIFAR10.base_folder}, "
    "or set data.download=true on a machine with a network."
)


class NormalisedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory as bytes, cropped, flipped and normalised by batch."""

    def __init__(self, images: Tensor, targets: Tensor, augment: bool, seed: int) -> None:
        self.images = images
        self.targets = targets
        self.augment = augment
        self.seed = seed
        self._choices: Tensor | None = None
        self._mean = torch.tensor(MEAN).view(3, 1, 1)
        self._std = torch.tensor(STD).view(3, 1, 1)

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
    """Load CIFAR-10: normalised float32 images [N, 3, 32, 32] and int64 targets [N] of 10
    classes.
    """
    place = data_folder(root, f": CIFAR-10 has no folder to be in. {WAYS_FORWARD}")
    train, test = _load(place, download)
    return Data(
        train=NormalisedImages(*train, augment=augment, seed=seed),
        test=NormalisedImages(*test, augment=False, seed=seed),
        items="samples",
    )


def _load(place: Path, download: bool) -> list[tuple[Tensor, Tensor]]:
    """Return training and test images, uint8 [N, 3, 32, 32], with their targets."""
    missing = f"data.root={place}: no complete {CIFAR10.base_folder} is in this folder"
    try:
        return _open(place)
    except (OSError, RuntimeError) as error:
        if not download:
            raise DataUnavailable(f"{missing}. {WAYS_FORWARD}") from error
    try:
        _fetch(place)
        return _open(place)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError) as error:
        cause = f"and the download failed ({type(error).__name__}: {error})"
        raise DataUnavailable(f"{missing}, {cause}. {WAYS_FORWARD}") from error


def _open(place: Path) -> list[tuple[Tensor, Tensor]]:
    """Read the files; torchvision raises RuntimeError if they are not complete."""
    parts = (CIFAR10(place, train=train) for train in (True, False))
    return [
        (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    ]


def _fetch(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    # The first rank of a machine downloads; the others wait and find complete files.
    with FileLock(place / f".{CIFAR10.base_folder}.lock"), _network_timeout(SILENCE):
        CIFAR10(place, download=True)


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    """Set a timeout for new sockets of this process, because torchvision sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _choices(count: int, generator: torch.Generator | None) -> Tensor:
    """Draw the `choices` of `crop_and_flip`, int64 [count, 3]."""
    crops = torch.randint(0, 2 * PADDING + 1, (count, 2), generator=generator)
    flips = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([crops, flips], dim=1)
