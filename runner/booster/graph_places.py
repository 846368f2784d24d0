"""Places on the way from a loss down the graph that autograd has recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.booster.terms import Term, TorchLoss

_MOST_SHAPES = 5_000


class GraphError(ValueError):
    """The graph does not show what a loss divides by."""


class NotLinear(GraphError):
    """The loss is a function of means that is no mean, such as the square root of one."""


class Path(NamedTuple):
    """What was read on the way down from the loss."""

    divisor: float = 1.0
    outer: float = 1.0
    factor: float = 1.0
    outer_factor: float = 1.0
    divides: bool = False
    inside: bool = False  # of a sum of parts
    is_scaled: bool = False
    averages: bool = False
    summed: int = 0
    dtype: torch.dtype | None = None
    value: float | None = None
    is_empty: bool = False
    selected: tuple[Tensor, ...] = ()

    def divided(self, by: float) -> Path:
        outer = self.outer if self.inside else self.outer * by
        return self._replace(divisor=self.divisor * by, outer=outer, divides=True)

    def multiplied(self, by: float) -> Path:
        outer_factor = self.outer_factor if self.inside else self.outer_factor * by
        return self._replace(factor=self.factor * by, outer_factor=outer_factor, is_scaled=True)

    def rounded(self, dtype: torch.dtype) -> Path:
        """Return the path of what divides by a tensor of ``dtype`` too."""
        if not dtype.is_floating_point:
            return self
        dtypes = [dtype] if self.dtype is None else [dtype, self.dtype]
        return self._replace(dtype=max(dtypes, key=lambda floating: torch.finfo(floating).eps))

    def term(
        self,
        call: TorchLoss | None = None,
        weights: tuple[Tensor, ...] = (),
        is_penalty: bool = False,
    ) -> Term:
        return Term(
            divisor=self.divisor,
            outer=self.outer,
            factor=self.factor,
            outer_factor=self.outer_factor,
            divides=self.divides,
            call=call,
            is_scaled=self.is_scaled,
            averages=self.averages,
            weights=weights,
            is_penalty=is_penalty,
            summed=self.summed,
            dtype=self.dtype,
            value=self.value,
            is_empty=self.is_empty,
            selected=self.selected,
        )


class Recorded(NamedTuple):
    """What was recorded beside the graph of a loss.

    Attributes:
        numbers: numbers that were computed on the way, by the node and its output.
        outputs: nodes of the outputs of the model, below which nothing is read.
    """

    numbers: Mapping[tuple[Any, int], Tensor] = {}
    outputs: frozenset[Any] = frozenset()


class Place(NamedTuple):
    """A node on the way down from the loss."""

    node: Any
    output: int  # number of the output of the node
    path: Path
    recorded: Recorded = Recorded()

    def scaled(self) -> Path:
        """Return the path with the number that this product or quotient has."""
        number = number_of(self.node)
        if number is None:
            raise NotLinear("it divides by something that depends on the outputs")
        if self.name == "Div":
            factor = factor_of(self.node)
            assert factor is not None
            return self.path.divided(number)._replace(is_scaled=True).rounded(factor.dtype)
        return self.path.multiplied(number)

    def averaged(self) -> Path:
        elements = self._elements()
        path = self.path.divided(elements / max(self.size, 1))
        return path._replace(averages=True, is_empty=not elements)

    @property
    def averages_samples(self) -> bool:
        """Whether a mean inside of another one is over each sample, whatever their number is."""
        dimensions = getattr(self.node, "_saved_dim", None)
        if not dimensions:
            return False
        count = len(self.node._saved_self_sym_sizes)
        return all(signed(number) % count for number in dimensions)

    def added_up(self) -> Path:
        elements = self._elements()
        return self.path._replace(summed=self.path.summed or elements, is_empty=not elements)

    def _elements(self) -> int:
        """Return how many elements a sum or a mean takes."""
        return math.prod(int(length) for length in self.node._saved_self_sym_sizes)

    def before(self, path: Path | None = None) -> list[Place]:
        """Return the nodes that this one takes tensors with gradients from."""
        path = path or self.path
        taken = [pair for pair in self.node.next_functions if pair[0]]
        return [Place(node, output, path, self.recorded) for node, output in taken]

    def parts(self) -> list[Place]:
        """Return the nodes that this one adds up."""
        return [self._with_part(part) for part in self.before()]

    def _with_part(self, part: Place) -> Place:
        """Return the place of a part, whose value is known if it is a number that was recorded."""
        path = self.path._replace(inside=True, value=None)
        if self.name not in ("Stack", "Cat"):
            # A number that is added to elements is added once for each.
            path = path._replace(divisor=path.divisor / max(self.size // max(part.size, 1), 1))
        number = self.recorded.numbers.get((part.node, part.output))
        if number is not None and path.divisor:
            path = path._replace(value=float(number) * path.factor / path.divisor)
        return part._replace(path=path)

    @property
    def name(self) -> str:
        return _operation(self.node.name())

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number; one element is a number before a sum or a mean of elements."""
        shape = shape_of(self.node, self.output)
        is_inside = self.path.averages or self.path.summed > 0
        return not shape or (self.size == 1 and not is_inside)

    @property
    def size(self) -> int:
        """How many elements the tensor has."""
        return math.prod(shape_of(self.node, self.output))


@cache
def _operation(name: str) -> str:
    """Return the operation whose backward pass a node computes."""
    return name.rpartition("::")[2].partition("Backward")[0]


def signed(number: int) -> int:
    """Return a number of 64 bits, which autograd may keep without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def factor_of(node: Any) -> Tensor | None:
    """Return what a product multiplies with, or a quotient divides by."""
    for name in ("_saved_other", "_saved_self"):
        value = getattr(node, name, None)
        if value is not None:
            return torch.as_tensor(value).detach()
    return None


def number_of(node: Any) -> float | None:
    factor = factor_of(node)
    return None if factor is None or factor.numel() != 1 else float(factor)


def shapes_in(loss: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a loss was computed of, in a fixed order."""
    shapes: list[tuple[int, ...]] = []
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    visited = set(nodes)
    while nodes and len(shapes) < _MOST_SHAPES:
        node = nodes.pop()
        takes_diagonal = _operation(node.name()).startswith("Diagonal")
        for previous, output in node.next_functions:
            if previous is None or takes_diagonal or previous in visited:
                continue
            visited.add(previous)
            nodes.append(previous)
            shapes.append(shape_of(previous, output))
    return shapes


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape)
