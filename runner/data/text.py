"""The bytes of any file or folder for language modelling, with a vocabulary of 256.

The default is the source code of the running Python's standard library: a few megabytes of real
text on every machine, which differ between versions of Python.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.dataset import IGNORED, Data, DataUnavailable

PACKAGED_APART = frozenset({"site-packages", "dist-packages", "test", "tests"})
"""Folders that are not part of the standard library, or that some systems package separately."""

WAYS_FORWARD = (
    "Set data.path to a file or folder that can be read, or data.path=null for the source files "
    "of the Python standard library"
)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of L bytes, each with the next byte at every position."""

    def __init__(self, text: bytes, length: int) -> None:
        if len(text) < 2 or length < 1:
            raise ValueError(f"no window of {length} bytes and their next in {len(text)} bytes")
        count = -(-(len(text) - 1) // length)
        # int16 holds -100 and 0 to 255; a batch is converted to int64 when it is read.
        tokens = torch.full((count * length + 1,), IGNORED, dtype=torch.int16)
        tokens[: len(text)] = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int16))
        # In this view, neighbouring windows share one byte.
        self._windows = tokens.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pair(self._windows[index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of these windows: inputs and targets, int64 [B, L]."""
        return self._pair(self._windows[torch.as_tensor(indices, dtype=torch.int64)])

    def _pair(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        wide = windows.long()
        return wide[..., :-1].clamp(min=0), wide[..., 1:]


def text(path: str | None, sequence_length: int, test_fraction: float, max_bytes: int) -> Data:
    """Load bytes for next-byte prediction; the end of the text is held out."""
    if sequence_length < 1 or max_bytes < 1 or not 0 < test_fraction < 1:
        raise ValueError(
            f"sequence_length {sequence_length} and max_bytes {max_bytes} must be at least 1, "
            f"test_fraction {test_fraction} between 0 and 1"
        )
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    read = _read(root, standard_library=path is None, limit=max_bytes)
    held_out = round(len(read) * test_fraction)
    if min(held_out, len(read) - held_out) < 2:
        raise DataUnavailable(
            f"data.path: {root} gives {len(read)} bytes to read, too few to learn from with "
            f"data.test_fraction={test_fraction} and data.max_bytes={max_bytes}. {WAYS_FORWARD}."
        )
    cut = len(read) - held_out
    return Data(
        train=ByteWindows(read[:cut], sequence_length),
        test=ByteWindows(read[cut:], sequence_length),
        items="tokens",
        tokens_per_sample=sequence_length,
    )


def _read(root: Path, standard_library: bool, limit: int) -> bytes:
    """Read the first `limit` bytes of the concatenated files at `root`."""
    if not root.exists():
        raise DataUnavailable(f"data.path: {root} does not exist. {WAYS_FORWARD}.")
    collected = bytearray()
    try:
        files = [root] if root.is_file() else _files(root, standard_library)
        for file in files:
            with file.open("rb") as stream:
                collected += stream.read(limit - len(collected))
            if len(collected) >= limit:
                break
    except OSError as error:
        where = error.filename or root
        raise DataUnavailable(
            f"data.path: {where} cannot be read ({error.strerror}). {WAYS_FORWARD}."
        ) from error
    return bytes(collected)


def _files(folder: Path, standard_library: bool) -> Iterator[Path]:
    """Yield the regular files below a folder in the same order on every file system."""

    def fail(error: OSError) -> None:
        raise error

    def wanted(name: str) -> bool:
        return not (name.startswith(".") or (standard_library and name in PACKAGED_APART))

    for place, folders, names in os.walk(folder, onerror=fail):
        # `os.walk` visits the folders that this list then holds, in its order.
        folders[:] = sorted(filter(wanted, folders))
        for file in (Path(place, name) for name in sorted(filter(wanted, names))):
            if file.is_file() and (file.suffix == ".py" or not standard_library):
                yield file
