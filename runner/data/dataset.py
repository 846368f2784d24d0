"""What a data factory returns, and tensors kept in memory as a data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

IGNORED = -100
"""A target with this value adds nothing to the loss and is no item of the window: the
`ignore_index` that `torch.nn.functional.cross_entropy` has by default."""


class DataUnavailable(Exception):
    """The data is not where it was looked for.

    The message names the folder, the key to change and the ways forward. It is the only
    argument, so the exception travels between processes by pickle.
    """


@dataclass(frozen=True)
class Data:
    """What one training job reads.

    `train` and `test` are map-style data sets of known length whose samples are pairs
    (inputs, targets). A data set may define `__getitems__(indices)` that returns a whole batch as
    a tuple of two tensors (see `collate_pairs`), and `set_epoch(epoch)`, to be called before each
    pass, when what it returns depends on the epoch (random augmentation).
    """

    train: Dataset[Any]
    test: Dataset[Any]
    """Held out: no sample of it is in `train`."""
    items: Literal["samples", "tokens"]
    """What the loss of a window is averaged over; tokens with target `IGNORED` do not count."""
    tokens_per_sample: int | None = None
    """Tokens that one sample holds, for durations in tokens; None where there are no tokens."""


class TensorPairs(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets kept in memory; a batch is one index operation for each.

    Args:
        inputs: [N, ...], any dtype.
        targets: [N, ...], any dtype.

    Raises:
        ValueError: when the two do not hold the same number of samples.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs do not pair with {len(targets)} targets")
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch of these samples: inputs [B, ...] and targets [B, ...]."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)


def collate_pairs(batch: Any) -> Any:
    """Pass on a batch that `__getitems__` already collated; collate a list of samples.

    A `DataLoader` hands `collate_fn` whatever `__getitems__` returned: a tuple is a finished batch
    here, while a list, torch's own convention, is one entry a sample.
    """
    return batch if isinstance(batch, tuple) else default_collate(batch)
