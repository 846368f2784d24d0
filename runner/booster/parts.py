"""Parts of a batch, and batches joined to one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.booster.batch import batch_size, mapped
from runner.parallel.hooks import held_tensors


def in_two(samples: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the samples of two parts of a batch, the first of which is smaller.

    Samples may be pairs, such as an answer that is chosen and one that is rejected: several pairs
    are not separated.
    """
    cut = 1 if samples < 4 else samples // 3
    if samples >= 4 and samples % 2 == 0:
        cut += cut % 2
    return list(range(cut)), list(range(cut, samples))


def has_samples(value: Any, samples: int) -> bool:
    """Return whether all tensors hold one entry for each sample."""
    lengths = [len(tensor) for tensor in held_tensors(value) if tensor.ndim]
    return bool(lengths) and all(length == samples for length in lengths)


def samples_at(value: Any, numbers: Sequence[int], samples: int) -> Any:
    """Return some samples of a batch or of outputs."""
    listed = list(numbers)

    def chosen(tensor: Tensor) -> Tensor:
        return tensor[listed] if tensor.ndim and len(tensor) == samples else tensor

    return mapped(value, chosen)


def joined(batches: Iterable[Any], enough: int = 2) -> Any:
    """Return the first batch, joined with the next ones while it has fewer samples than enough."""
    read = iter(batches)
    batch = next(read)
    while batch_size(batch) < enough:
        following = next(read, None)
        if following is None:
            break
        try:
            batch = _concatenated(batch, following)
        except (RuntimeError, TypeError, ValueError, KeyError):
            break  # sequences of another length
    return batch


def _concatenated(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second]) if first.ndim else first
    if isinstance(first, tuple | list):
        return [_concatenated(a, b) for a, b in zip(first, second, strict=True)]
    if isinstance(first, Mapping):
        changed: Any = copy.copy(first)
        for name in first:
            changed[name] = _concatenated(first[name], second[name])
        return changed
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        parts = {n: _concatenated(getattr(first, n), getattr(second, n)) for n in names}
        return replace(first, **parts)
    return first
