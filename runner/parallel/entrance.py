"""Layers that get the same input share the collective by which it enters them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Entrance:
    """Lets several layers share the collective by which the same input enters them.

    Query, key and value projections: the sum of their gradients is reduced once, and a sharded
    sequence is gathered once.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._served = 0
        self._given: tuple[Any, ...] = ()
        self._entered: Tensor | None = None

    def __call__(self, hidden: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``enter(hidden)``, or what it returned for the layer before."""
        given = (hidden, hidden._version, torch.is_grad_enabled())
        same = len(self._given) and self._given[0] is hidden and self._given[1:] == given[1:]
        entered = self._entered if same else None
        if entered is None:
            entered = enter(hidden)
            self._given, self._entered, self._served = given, entered, 0
        self._served += 1
        if self._served == self._layers:  # Activations are not kept longer than they are used.
            self._given, self._entered = (), None
        return entered


def entrances(styles: Mapping[str, str]) -> dict[str, Entrance]:
    """Return the entrance of each column-wise layer that has a sibling, by its name."""
    siblings: dict[str, list[str]] = {}
    for name, style in styles.items():
        if style == "colwise":
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: entrance
        for names in siblings.values()
        if len(names) > 1
        for entrance in [Entrance(len(names))]
        for name in names
    }
