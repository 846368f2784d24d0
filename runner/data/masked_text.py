"""The bytes of any file or folder with some of them hidden, to be filled in from both sides.

Source: J. Devlin et al., BERT, 2019, 1810.04805, section 3.1: of the tokens chosen to be predicted
four in five are shown as the mask, one in ten as a random token, and one in ten as they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.dataset import IGNORED, Data
from runner.data.seeding import generator_for
from runner.data.text import ByteWindows, text

BYTES = 256
MASK = BYTES
"""The mask is a token of its own, the first after the bytes."""

SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1


class MaskedWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of L bytes, some of them hidden.

    Inputs are int64 [L] up to `MASK`; targets hold the byte where one was chosen, and `IGNORED`
    elsewhere. What is chosen depends on seed, epoch and sample alone, so it does not change with
    the number of ranks and comes back after a restart; without `set_epoch` every pass is alike.

    Args:
        windows: the text.
        masked_fraction: chance of a byte to be chosen.
        seed: of the choice.
    """

    def __init__(self, windows: ByteWindows, masked_fraction: float, seed: int) -> None:
        self.windows = windows
        self.masked_fraction = masked_fraction
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose other bytes from the next sample on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch of these windows: inputs and targets, int64 [B, L]."""
        inputs, following = self.windows.__getitems__(indices)
        draws, tokens = self._draws(indices, inputs.shape[1])
        choice, shown = draws.unbind(1)
        # Where no byte follows, the window is padding (or the very last byte of the text).
        chosen = (choice < self.masked_fraction) & (following != IGNORED)
        targets = inputs.masked_fill(~chosen, IGNORED)
        inputs = inputs.masked_fill(chosen & (shown < SHOWN_AS_MASK), MASK)
        at_random = (shown >= SHOWN_AS_MASK) & (shown < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
        return torch.where(chosen & at_random, tokens, inputs), targets

    def _draws(self, indices: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """For each window two uniform numbers a byte, [B, 2, L], and a random byte, [B, L]."""
        uniform, tokens = [], []
        for index in indices:
            generator = generator_for(f"masks of window {index}", self.seed, self.epoch)
            uniform.append(torch.rand(2, length, generator=generator))
            tokens.append(torch.randint(BYTES, (length,), generator=generator))
        return torch.stack(uniform), torch.stack(tokens)


def masked_text(
    path: str | None,
    sequence_length: int,
    test_fraction: float,
    max_bytes: int,
    masked_fraction: float,
    seed: int,
) -> Data:
    """Bytes to fill in; the end of the text is held out, and masked alike in every evaluation.

    Args:
        path: a file or a folder; None for the Python standard library's `*.py`.
        sequence_length: bytes in a sample.
        test_fraction: share of the bytes held out, at the end, between 0 and 1.
        max_bytes: stop reading after this many bytes.
        masked_fraction: chance of a byte to be chosen, above 0 and at most 1.
        seed: of the choice.

    Raises:
        DataUnavailable: when the path is missing, cannot be read, or holds too few bytes.
        ValueError: when a number is out of its range.
    """
    if not 0 < masked_fraction <= 1:
        raise ValueError(f"masked_fraction {masked_fraction} must be above 0 and at most 1")
    plain = text(path, sequence_length, test_fraction, max_bytes)
    assert isinstance(plain.train, ByteWindows)
    assert isinstance(plain.test, ByteWindows)
    return Data(
        train=MaskedWindows(plain.train, masked_fraction, seed),
        test=MaskedWindows(plain.test, masked_fraction, seed),
        items="tokens",
        # Only chosen bytes count as tokens, and how many a sample holds is left to chance.
        tokens_per_sample=None,
    )
