"""The bytes of any file or folder for language modelling, with a vocabulary of 256, also masked.

The default is the source code of the running Python's standard library: a few megabytes of real
text on every machine, which differ between versions of Python. Source of the masks: J. Devlin et
al., BERT, 2019, 1810.04805, section 3.1: of the tokens to predict, 80 % are replaced by the mask,
10 % by a random token, and 10 % are unchanged.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.problem import ArgumentError
from runner.data.dataset import IGNORED, Data, DataUnavailable
from runner.data.order import generator_for

BYTES = 256
MASK = BYTES
"""Token of the mask, the first after the bytes."""

SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1

PACKAGED_APART = frozenset({"site-packages", "dist-packages", "test", "tests"})
"""Folders that are not part of the standard library, or that some systems package separately."""

ADVICE = "Set data.path to a file or folder that can be read, or data.path=null for Python's source"


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of L bytes, each with the next byte at every position."""

    draws_nothing = True

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
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        windows = self._windows[torch.as_tensor(indices, dtype=torch.int64)].long()
        return windows[:, :-1].clamp(min=0), windows[:, 1:]


class MaskedWindows(ByteWindows):
    """Windows of L bytes of which a random part is to be predicted."""

    epoch = 0

    def __init__(self, text: bytes, length: int, masked_fraction: float, seed: int) -> None:
        super().__init__(text, length)
        self.masked_fraction = masked_fraction
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, by which the masks are drawn."""
        self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, following = super().__getitems__(indices)
        choices = []
        replacements = []
        random_bytes = []
        for index in indices:
            generator = generator_for(f"masks of window {index}", self.seed, self.epoch)
            choice_of_window, replacement = torch.rand(2, inputs.shape[1], generator=generator)
            choices.append(choice_of_window)
            replacements.append(replacement)
            random_bytes.append(torch.randint(BYTES, inputs.shape[1:], generator=generator))
        choice = torch.stack(choices)
        shown = torch.stack(replacements)
        tokens = torch.stack(random_bytes)
        # A position without a next byte is padding or the last byte of the text.
        chosen = (choice < self.masked_fraction) & (following != IGNORED)
        targets = inputs.masked_fill(~chosen, IGNORED)
        inputs = inputs.masked_fill(chosen & (shown < SHOWN_AS_MASK), MASK)
        at_random = (shown >= SHOWN_AS_MASK) & (shown < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
        return torch.where(chosen & at_random, tokens, inputs), targets


def text(path: str | None, sequence_length: int, test_fraction: float, max_bytes: int) -> Data:
    """Load bytes for next-byte prediction; the end of the text is held out."""
    parts = _parts(path, sequence_length, test_fraction, max_bytes)
    train, test = (ByteWindows(part, sequence_length) for part in parts)
    return Data(train, test, "tokens", sequence_length)


def masked_text(
    path: str | None,
    sequence_length: int,
    test_fraction: float,
    max_bytes: int,
    masked_fraction: float,
    seed: int,
) -> Data:
    """Load bytes for masked language modelling; every evaluation has the same masks."""
    if not 0 < masked_fraction <= 1:
        raise ArgumentError("masked_fraction", f"{masked_fraction} must be above 0 and at most 1")
    parts = _parts(path, sequence_length, test_fraction, max_bytes)
    train, test = (MaskedWindows(p, sequence_length, masked_fraction, seed) for p in parts)
    # Only bytes to predict count as tokens, and their number in a sample is random.
    return Data(train, test, "tokens")


def _parts(path: str | None, length: int, test_fraction: float, limit: int) -> tuple[bytes, bytes]:
    """Return the bytes to train on, and the end of the text, which is held out."""
    if length < 1 or limit < 1 or not 0 < test_fraction < 1:
        raise ArgumentError(
            "sequence_length",
            f"{length} and max_bytes {limit} must be at least 1, "
            f"test_fraction {test_fraction} between 0 and 1",
        )
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    read = _read(root, standard_library=path is None, limit=limit)
    held_out = round(len(read) * test_fraction)
    if min(held_out, len(read) - held_out) < 2:
        few = f"{root} gives {len(read)} bytes, too few for data.test_fraction={test_fraction}"
        raise DataUnavailable(f"{few}. {ADVICE}", argument="path")
    return read[:-held_out], read[-held_out:]


def _read(root: Path, standard_library: bool, limit: int) -> bytes:
    """Read the first `limit` bytes of the concatenated files at `root`."""
    if not os.path.exists(root):
        raise DataUnavailable(f"{root} does not exist. {ADVICE}", argument="path")
    collected = bytearray()
    try:
        for file in [root] if root.is_file() else _files(root, standard_library):
            with file.open("rb") as stream:
                collected += stream.read(limit - len(collected))
            if len(collected) >= limit:
                break
    except OSError as error:
        where = f"{error.filename or root} cannot be read ({error.strerror})"
        raise DataUnavailable(f"{where}. {ADVICE}", argument="path") from error
    return bytes(collected)


def _files(folder: Path, standard_library: bool) -> Iterator[Path]:
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
