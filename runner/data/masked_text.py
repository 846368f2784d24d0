"""Masked language modelling of the bytes of any file or folder.

Source: J. Devlin et al., BERT, 2019, 1810.04805, section 3.1: of the tokens to predict, 80 % are
replaced by the mask, 10 % by a random token, and 10 % are unchanged.
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
"""Token of the mask, the first after the bytes."""

SHOWN_AS_MASK = 0.8
SHOWN_AS_RANDOM = 0.1


class MaskedWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of L bytes of which a random part is to be predicted."""

    def __init__(self, windows: ByteWindows, masked_fraction: float, seed: int) -> None:
        self.windows = windows
        self.masked_fraction = masked_fraction
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the masks of the next samples depend on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of these windows: inputs and targets, int64 [B, L]."""
        inputs, following = self.windows.__getitems__(indices)
        draws, tokens = self._draws(indices, inputs.shape[1])
        choice, shown = draws.unbind(1)
        # A position without a next byte is padding or the last byte of the text.
        chosen = (choice < self.masked_fraction) & (following != IGNORED)
        targets = inputs.masked_fill(~chosen, IGNORED)
        inputs = inputs.masked_fill(chosen & (shown < SHOWN_AS_MASK), MASK)
        at_random = (shown >= SHOWN_AS_MASK) & (shown < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
        return torch.where(chosen & at_random, tokens, inputs), targets

    def _draws(self, indices: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Draw two uniform numbers, [B, 2, L], and a random byte, [B, L], for each byte."""
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
    """Load bytes for masked language modelling; every evaluation has the same masks."""
    if not 0 < masked_fraction <= 1:
        raise ValueError(f"masked_fraction {masked_fraction} must be above 0 and at most 1")
    plain = text(path, sequence_length, test_fraction, max_bytes)
    assert isinstance(plain.train, ByteWindows)
    assert isinstance(plain.test, ByteWindows)
    return Data(
        train=MaskedWindows(plain.train, masked_fraction, seed),
        test=MaskedWindows(plain.test, masked_fraction, seed),
        items="tokens",
        # Only bytes to predict count as tokens, and their number in a sample is random.
        tokens_per_sample=None,
    )
