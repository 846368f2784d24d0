"""Which kinds of values the measured batches held, as other kinds may show more of a loss.

Weights may be equal in all batches that were measured, so may the lengths of samples, and no label
may be left out. A loss that takes them relative to their batch looks like a mean until they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runner.booster.batch import targets_of
from runner.booster.divisor import LARGEST_INPUT, Name, tensor_of, tensors_of

_Array = NDArray[Any]


def _has_several_values(values: _Array) -> bool:
    return bool((values != values.flat[0]).any())


def _has_several_lengths(values: _Array) -> bool:
    lengths = np.count_nonzero(values.reshape(len(values), -1) > 0, axis=1)
    return bool((lengths != lengths[0]).any())


def _has_negative_values(values: _Array) -> bool:
    return bool(values.min() < 0)


def _has_nan(values: _Array) -> bool:
    return bool(np.isnan(values).any())


_KINDS: Mapping[str, Callable[[_Array], bool]] = {
    "several values": _has_several_values,
    "several lengths": _has_several_lengths,
    "negative values": _has_negative_values,
    "NaN": _has_nan,
}


class Variety:
    """The kinds of values that no measured batch had, for each tensor of a batch.

    Args:
        missing: names of tensors, and the kinds of values that they may still have.
    """

    def __init__(self, missing: Mapping[Name, Iterable[str]]) -> None:
        self._missing = {name: tuple(kinds) for name, kinds in missing.items() if kinds}

    @classmethod
    def of(cls, batch: Any) -> Variety:
        """Return what the first batch that is measured leaves open."""
        targets = targets_of(batch)
        possible = {}
        for name, values in tensors_of(batch):
            if values.numel() <= LARGEST_INPUT or values is targets:
                possible[name] = _possible_kinds(values, is_target=not name)
        return cls(possible).without(batch)

    @property
    def is_complete(self) -> bool:
        """Whether no batch can show another kind of value."""
        return not self._missing

    def is_new(self, batch: Any) -> bool:
        """Return whether a batch has a kind of value that no measured batch had."""
        return any(_shown(batch, name, kinds) for name, kinds in self._missing.items())

    def without(self, batch: Any) -> Variety:
        """Return what is missing after a batch was measured too."""
        missing = {}
        for name, kinds in self._missing.items():
            shown = _shown(batch, name, kinds)
            missing[name] = [kind for kind in kinds if kind not in shown]
        return Variety(missing)

    def common(self, other: Variety) -> Variety:
        """Return what is missing on this rank and on another one."""
        missing = {}
        for name, kinds in self._missing.items():
            theirs = other._missing.get(name, ())
            missing[name] = [kind for kind in kinds if kind in theirs]
        return Variety(missing)

    def state_dict(self) -> list[list[Any]]:
        """Return everything, as lists."""
        return [[list(name), list(kinds)] for name, kinds in self._missing.items()]

    @classmethod
    def from_state_dict(cls, state: Iterable[list[Any]]) -> Variety:
        """Return what :meth:`state_dict` described."""
        return cls({tuple(name): kinds for name, kinds in state})


def _possible_kinds(values: Tensor, is_target: bool) -> list[str]:
    is_number = values.is_floating_point()
    kinds = ["several values"]
    if values.ndim == 2 or (values.ndim > 2 and not is_number):
        kinds.append("several lengths")
    if is_target:
        kinds.append("NaN" if is_number else "negative values")
    return kinds


def _shown(batch: Any, name: Name, kinds: Iterable[str]) -> list[str]:
    """Return which of the kinds a tensor of a batch has."""
    values = tensor_of(batch, name)
    if values is None or not values.numel():
        return []
    values = values.detach().cpu()
    array = values.float().numpy() if values.is_floating_point() else values.numpy()
    return [kind for kind in kinds if _KINDS[kind](array)]
