"""What clipping by value has to know of the elements of gradients on a CPU, from one read of them.

A pass over memory costs more than an operation on a block that the cache holds. So the sum of
squares before and after clipping, the largest element and the number of elements above λ are taken
of one block after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, not_

import torch
from torch import Tensor

from runner.clip.layout import Layout
from runner.clip.norms import (
    FULL,
    OVERFLOWS,
    SMALL,
    VANISHES,
    flatten,
    gathered,
    largest,
    power_sum,
)

ELEMENTS = 2**20
"""Elements of a block for each thread: a block and its squares stay in the last cache."""

COUNTABLE = 2**22
"""Most elements of a block: their number is exact in float32."""

_REPLICAS, _DTYPE = attrgetter("num_replicas"), attrgetter("dtype")


@dataclass(slots=True)
class Elements:
    """All elements of this rank's gradients, compared with λ.

    Sums are divided by the number of ranks of the layout's group that hold the elements.

    Attributes:
        power: Σg².
        clamped_power: Σmin(|g|, λ)².
        above: number of elements above λ.
        largest: largest |g|.
        exceeding: gradients that may have elements above λ.
    """

    power: float = 0.0
    clamped_power: float = 0.0
    above: float = 0.0
    largest: float = 0.0
    exceeding: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout, limit: float) -> Elements:
        """Read the gradients of ``layout``, and compare them with the threshold ``limit``."""
        found = cls()
        blocks = list(_blocks(layout))
        room: dict[torch.dtype, Tensor] = {}
        longest = max((len(flat) for flat, *_ in blocks), default=0)
        exceeding: dict[int, Tensor] = {}
        for flat, num_replicas, gradients in blocks:
            wide = flat if flat.dtype in FULL else flat.float()
            if wide.dtype not in room:
                room[wide.dtype] = torch.empty(longest, dtype=wide.dtype)
            bound = torch.tensor(limit, dtype=flat.dtype).to(wide.dtype)
            power, clamped, above, most = _compare(wide, bound, room[wide.dtype][: len(wide)])
            found.power += power / num_replicas
            found.clamped_power += clamped / num_replicas
            found.above += above / num_replicas
            # The result of max() with NaN depends on the order; the power tells of it.
            found.largest = max(found.largest, most)
            if above:
                exceeding.update(zip(map(id, gradients), gradients, strict=True))
        found.exceeding = list(exceeding.values())
        return found


def clamp(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamp all elements to ±``limit`` in place."""
    small = []
    for gradient in gradients:
        if gradient.numel() > SMALL:
            gradient.clamp_(-limit, limit)
        else:
            small.append(gradient)
    if small:
        torch._foreach_clamp_min_(small, -limit)
        torch._foreach_clamp_max_(small, limit)


def _compare(flat: Tensor, bound: Tensor, squares: Tensor) -> tuple[float, float, int, float]:
    """Return Σg², Σmin(|g|, bound)², the number of elements above ``bound``, and the largest |g|.

    The square of a float32 number near 1 is another one for each number, so comparing squares
    counts exactly, and the root of the largest square is exact.
    """
    torch.mul(flat, flat, out=squares)
    power = squares.sum().item()
    if not VANISHES < power < OVERFLOWS:
        return _compare_far(flat, bound)
    most = squares.amax().sqrt_().item()
    if not most > bound.item():
        return power, power, 0, most
    square = (bound * bound).item()
    if not square > VANISHES:
        return _compare_far(flat, bound)
    # Squares above that of λ become the next number after it, which tells them from equal ones.
    next_one = torch.nextafter(bound * bound, bound.new_tensor(math.inf)).item()
    clamped = squares.clamp_(max=next_one).sum().item()
    above = round(squares.gt_(square).sum().item())
    return power, clamped - above * (next_one - square), above, most


def _compare_far(flat: Tensor, bound: Tensor) -> tuple[float, float, int, float]:
    """Do the same as :func:`_compare` where squares may leave the range of float32."""
    above = round(torch.gt(flat.abs(), bound).sum().item())
    clamped = flat.clamp(-bound, bound) if above else flat
    return power_sum([flat]), power_sum([clamped]), above, largest(flat)


def _blocks(layout: Layout) -> Iterator[tuple[Tensor, int, Sequence[Tensor]]]:
    """Yield blocks of elements with their number of replicas and the gradients they belong to.

    A block is a view of a large gradient, or a copy of several small ones.
    """
    shards, gradients = layout.gradients()
    most = min(ELEMENTS * torch.get_num_threads(), COUNTABLE)
    kinds = list(zip(map(_REPLICAS, shards), map(_DTYPE, gradients), strict=True))
    for kind in dict.fromkeys(kinds):
        alike = gradients
        if len({*kinds}) > 1:
            alike = list(compress(gradients, map(kind.__eq__, kinds)))
        small = list(map(SMALL.__ge__, map(Tensor.numel, alike)))
        for gradient in alike if not any(small) else compress(alike, map(not_, small)):
            for part in torch.split(flatten(gradient), most):
                yield part, kind[0], (gradient,)
        for together in _at_most(most, compress(alike, small)):
            yield gathered(together), kind[0], together


def _at_most(elements: int, gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in lists of at most so many elements."""
    together: list[Tensor] = []
    total = 0
    for gradient in gradients:
        total += gradient.numel()
        if total > elements:
            yield together
            together, total = [], gradient.numel()
        together.append(gradient)
    if together:
        yield together
