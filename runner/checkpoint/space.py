"""Why a checkpoint cannot be written: the disk and the space that it needs."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from runner.config import disk
from runner.parallel.collectives import on_first


def require_space(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to begin a checkpoint that does not fit on the disk."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    free = disk.free(folder)
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"no checkpoint can be written to {folder}: it needs {disk.size(needed)}, but the disk "
            f"{disk.mount_of(folder)} has {disk.size(free)} left; free some space or lower "
            "checkpoint.keep",
        )


@contextmanager
def explained(part: Path) -> Iterator[None]:
    """Remove an unfinished checkpoint after an error, and name the disk if that is full."""
    try:
        yield
    except OSError as error:
        written = on_first(lambda: _remove(part))
        if not disk.is_full(error):
            raise
        place, free = disk.mount_of(part), disk.free(part.parent)
        raise OSError(
            errno.ENOSPC,
            f"no checkpoint can be written to {part.parent}: the disk {place} is full after "
            f"{disk.size(written)}, and has {disk.size(free)} left without it; free some "
            "space or lower checkpoint.keep",
        ) from error


def _remove(part: Path) -> int:
    """Remove a folder, and return the size of its files in bytes."""
    size = sum(file.stat().st_size for file in part.iterdir()) if part.is_dir() else 0
    shutil.rmtree(part, ignore_errors=True)
    return size
