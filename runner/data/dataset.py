"""What a data factory returns, and a data set of tensors in memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from runner.data.random_state import RandomState, generators

IGNORED = -100
"""Targets with this value add nothing to the loss and are not counted as items: the default
`ignore_index` of `torch.nn.functional.cross_entropy`."""


class DataUnavailable(Exception):
    """Data is missing or cannot be read."""


@dataclass(frozen=True)
class Data:
    """The training and test data of one run."""

    train: Dataset[Any]
    test: Dataset[Any] | None
    """Held-out samples: none of them is in `train`. None: the run does not evaluate."""
    items: Literal["samples", "tokens"]
    """What the loss of a step is averaged over; tokens whose target is `IGNORED` do not count."""
    tokens_per_sample: int | None = None
    """Number of tokens in one sample, for durations in tokens; None for data without tokens."""


def length_of(dataset: Dataset[Any]) -> int | None:
    """Return the number of samples of a data set; None for a stream, whose end alone tells it."""
    if isinstance(dataset, IterableDataset):
        return None
    return len(dataset)  # type: ignore[arg-type]


def first_sample(dataset: Dataset[Any]) -> Any:
    """Return the first sample of a data set that is not empty; a stream is begun for it."""
    if not isinstance(dataset, IterableDataset):
        return dataset[0]
    drawn = RandomState.now(generators(dataset, "dataset."))
    try:
        return next(iter(dataset))
    except StopIteration:
        raise DataUnavailable(f"{type(dataset).__name__} yields no sample") from None
    finally:
        drawn.restore(generators(dataset, "dataset."))


def data_folder(root: str | None, message: str) -> Path:
    """Return the folder `root`, or the one that `$DATA` names."""
    folder = root or os.environ.get("DATA")
    if not folder:
        raise DataUnavailable(f"data.root is not set, and neither is $DATA{message}")
    return Path(folder).expanduser()


class TensorPairs(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory; a batch takes one index operation for each."""

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
        """Return the batch of these samples: inputs [B, ...] and targets [B, ...]."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)


def collate_pairs(batch: Any) -> Any:
    """Collate a list of samples; return a batch that `__getitems__` has collated unchanged."""
    if not isinstance(batch, list):
        return batch
    first = batch[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        return type(first)(**{n: default_collate([getattr(s, n) for s in batch]) for n in names})
    return default_collate(batch)
