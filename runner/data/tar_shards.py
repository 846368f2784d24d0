"""Tar shards: samples in tar files, the format of the library ``webdataset``.

The files of one sample lie one after the other in a tar file, and have its name with different
endings: ``0001.jpg`` and ``0001.cls`` are an image and its class.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from PIL.Image import Image
from torch.utils.data import IterableDataset
from torchvision.transforms import v2

from runner.data.dataset import Data, DataUnavailable, data_folder
from runner.data.image_folder import centre_crop, random_crop

WAY_FORWARD = "Set data.root (or $DATA) to a folder of tar files, and data.train to their pattern"


class TarShards(IterableDataset[tuple[Any, ...]]):
    """Samples of tar files, in another order in each epoch."""

    def __init__(
        self,
        files: list[str],
        entries: tuple[str, ...],
        change: v2.Transform,
        buffer: int,
        seed: int,
    ) -> None:
        self.files = files
        self.entries = entries
        self.change = change
        self.buffer = buffer
        self.seed = seed
        self.epoch = 0
        self._part = (1, 0)

    @property
    def num_shards(self) -> int:
        """Number of parts that :meth:`shard` makes at most."""
        return len(self.files)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order depends on."""
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> TarShards:
        """Return the samples of every ``num_shards``-th file of an epoch, from ``index`` on."""
        part = copy.copy(self)
        part._part = (num_shards, index)
        return part

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        library = _library()
        draw = random.Random(f"{self.seed},{self.epoch}")
        files = draw.sample(self.files, len(self.files)) if self.buffer else self.files
        entries = library.tariterators.tar_file_expander(
            _opened(files[self._part[1] :: self._part[0]])
        )
        samples = library.tariterators.group_by_keys(entries)
        if self.buffer:
            drawn = random.Random(f"{self.seed},{self.epoch},{self._part}")
            samples = library.shuffle(self.buffer, initial=self.buffer, rng=drawn)(samples)
        samples = library.to_tuple(*self.entries)(library.decode("pil")(samples))
        for sample in samples:
            yield tuple(self.change(one) if isinstance(one, Image) else one for one in sample)


def webdataset(
    root: str | None,
    train: str,
    eval: str,
    inputs: str,
    targets: str,
    size: int,
    augment: bool,
    buffer: int,
    seed: int,
) -> Data:
    """Read samples (inputs, targets) from tar files."""
    if size < 1:
        raise ValueError(f"size {size} must be at least 1")
    if buffer < 0:
        raise ValueError(f"buffer {buffer} must be at least 0")
    folder = data_folder(root, f". {WAY_FORWARD}")
    _library()

    def shards(pattern: str, change: v2.Transform, buffer: int) -> TarShards | None:
        files = sorted(map(str, folder.glob(pattern)))
        entries = (inputs, targets)
        return TarShards(files, entries, change, buffer, seed) if files else None

    found = shards(train, random_crop(size) if augment else centre_crop(size), buffer)
    if found is None:
        raise DataUnavailable(f"data.root={folder} has no file {train}. {WAY_FORWARD}")
    return Data(found, shards(eval, centre_crop(size), 0), "samples")


def _opened(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield open files, each closed after it (those that webdataset opens stay open)."""
    for file in files:
        with open(file, "rb") as stream:
            yield {"url": file, "stream": stream}


def _library() -> Any:
    try:
        return import_module("webdataset")
    except ImportError:
        message = 'data=webdataset needs a package: pip install "clip-runner[data]"'
        raise DataUnavailable(message) from None
