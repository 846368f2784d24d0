"""Why a checkpoint cannot be written: the disk and the space that it needs."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from runner.config.notation import storage
from runner.parallel.first_rank import on_first

_FULL = (errno.ENOSPC, errno.EDQUOT)


def require_space(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse to begin a checkpoint that does not fit on the disk.

    Args:
        folder: folder of checkpoints, which exists.
        tensors: tensors of this rank. Whole ones are counted, wherever their shards are written;
            those of other pipeline stages are not known here.

    Raises:
        OSError: the disk has less space; the message names it.
    """
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"no checkpoint can be written to {folder}: it needs {storage(needed)}, but the disk "
            f"{disk_of(folder)} has {storage(free)} left; free some space or lower checkpoint.keep",
        )


@contextmanager
def explained(part: Path) -> Iterator[None]:
    """Remove an unfinished checkpoint after an error, and name the disk if that is full.

    The block raises its OSError on every rank.
    """
    try:
        yield
    except OSError as error:
        written = on_first(lambda: _remove(part))
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(part.parent).free
        raise OSError(
            error.errno,
            f"no checkpoint can be written to {part.parent}: the disk {disk_of(part.parent)} is "
            f"full after {storage(written)}, and has {storage(free)} left without it; free some "
            "space or lower checkpoint.keep",
        ) from error


def disk_of(path: Path) -> Path:
    """Return where the file system of ``path`` is mounted."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if one.is_mount()), path)


def _remove(part: Path) -> int:
    """Remove a folder, and return the size of its files in bytes."""
    size = sum(file.stat().st_size for file in part.iterdir()) if part.is_dir() else 0
    shutil.rmtree(part, ignore_errors=True)
    return size
