"""Data sets of one's own: any class or function that makes one, for training and evaluation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from runner.data.dataset import Data
from runner.data.seeding import generator_for


def own(
    train: Dataset[Any],
    eval: Dataset[Any] | None = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
    items: Literal["samples", "tokens"] = "samples",
    tokens_per_sample: int | None = None,
) -> Data:
    """Train on one data set and evaluate on another."""
    if not 0 <= eval_fraction < 1:
        raise ValueError(f"eval_fraction {eval_fraction} must be at least 0 and below 1")
    if eval is None and eval_fraction > 0 and not isinstance(train, IterableDataset):
        train, eval = _split(train, eval_fraction, seed)
    return Data(train, eval, items, tokens_per_sample)


class _Part(Subset[Any]):
    def set_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)


def _split(dataset: Dataset[Any], share: float, seed: int) -> tuple[_Part, _Part]:
    """Return the samples to train on and those that are held out, each in their own order."""
    samples = len(dataset)  # type: ignore[arg-type]
    held_out = max(1, round(share * samples))
    if held_out >= samples:
        raise ValueError(f"eval_fraction {share} leaves none of {samples} samples to train on")
    chosen = torch.randperm(samples, generator=generator_for("held out", seed, 0))
    rest, first = chosen[held_out:].sort().values, chosen[:held_out].sort().values
    return _Part(dataset, rest.tolist()), _Part(dataset, first.tolist())
