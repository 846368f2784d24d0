"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

It works element by element, so that ranks exchange nothing but counts. Unlike scaling, it changes
the direction of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, Parts, norms, transfer
from runner.clip.norms import combine, powers_of
from runner.config.modes import Value


@dataclass(slots=True)
class Elements:
    """All elements of this rank's gradients, compared with λ by one read on a CPU."""

    power: float = 0.0  # each share is divided by the ranks that hold it
    clamped: float = 0.0  # the power after clamping
    above: float = 0.0
    largest: float = 0.0
    exceeding: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout, limit: float) -> Elements:
        elements = cls()
        buffers = dict[torch.dtype, Tensor]()
        for flat, replicas, gradients in _blocks(layout):
            wide = flat if flat.itemsize > 3 else flat.float()
            if len(wide) > len(buffers.get(wide.dtype, ())):  # new memory costs as much as a read
                buffers[wide.dtype] = wide.new_empty(max(norms.BLOCK, len(wide)))
            block = Block.of(flat, wide, buffers[wide.dtype][: len(wide)], limit)
            exceeding = elements.exceeding
            if block.above and not (exceeding and exceeding[-1] is gradients[-1]):
                exceeding += gradients
            elements.power += block.power / replicas
            elements.clamped += block.clamped / replicas
            elements.above += block.above / replicas
            # The result of max() with NaN depends on the order; the power tells of it.
            elements.largest = max(elements.largest, block.largest)
        return elements


class Block(NamedTuple):
    """Some elements, compared with λ."""

    power: float  # Σg²
    clamped: float  # Σg² after clamping
    above: int  # elements above λ
    largest: float  # largest |g|

    @classmethod
    def of(cls, flat: Tensor, wide: Tensor, buffer: Tensor, limit: float) -> Block:
        """Read elements once, by their squares, which are written to ``buffer``."""
        squares = torch.mul(wide, wide, out=buffer)
        bound = torch.tensor(limit, dtype=flat.dtype).to(squares)
        square_of_bound = (bound * bound).item()
        power = squares.sum().item()
        in_range = norms.VANISHES < power < norms.OVERFLOWS and square_of_bound > norms.VANISHES
        if not in_range:
            largest = flat.abs().amax()
            above = int((flat.abs() > bound).sum())
            power = norms.power_sum([flat])
            clamped = norms.power_sum([flat.clamp(-bound, bound)]) if above else power
            return cls(power, clamped, above, largest.item())
        largest = squares.amax().sqrt()
        if largest <= bound:
            return cls(power, power, 0, largest.item())
        # Two different numbers have different squares, so squares can be counted exactly. Squares
        # above the bound's square become the next number after it.
        after = torch.nextafter(bound * bound, bound.new_tensor(math.inf)).item()
        clamped = squares.clamp_(max=after).sum().item()
        above = round(squares.gt_(square_of_bound).sum().item())
        clamped -= above * (after - square_of_bound)
        return cls(power, clamped, above, largest.item())


@dataclass(eq=False)
class ValueClip(Value, ClipMode):
    """Clamp elements."""

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        if self.norm_type != 2.0 or not transfer.can_read(layout.device):
            return super().measure(layout, each)
        elements = Elements.of(layout, self.limit)
        norm = combine(layout.gather([elements.power])[0], 2.0)
        named = each or not transfer.is_finite(norm)
        powers = powers_of(layout, *layout.gradients(), 2.0, each=True)[1] if named else None
        return GradStats.measured(norm, powers, elements)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements above λ on this rank."""
        limit = self.limit
        pairs = list(zip(*layout.gradients(), strict=True))
        total = sum(gradient.numel() / shard.num_replicas for shard, gradient in pairs)
        if self.tally is not None:
            for shard, gradient in pairs:
                self.tally.add(gradient.abs(), 1 / shard.num_replicas)
        if transfer.can_read(layout.device):
            elements: Elements = stats.work or Elements.of(layout, limit)
            power = elements.clamped if self.norm_type == 2.0 else None
            parts = Parts(elements.above, total, elements.exceeding, power)
            return Decision.change_parts(stats.norm, limit, elements.largest, parts)
        largest, _ = powers_of(layout, *layout.gradients(), math.inf)
        above = [transfer.count(g.abs() > limit) / shard.num_replicas for shard, g in pairs]
        parts = Parts(sum(above, 0.0), total, [gradient for _, gradient in pairs])
        return Decision.change_parts(stats.norm, limit, largest, parts)

    def apply_parts(self, decision: Decision) -> None:
        assert decision.parts is not None
        limit = float(decision.threshold)
        small = []
        for gradient in decision.parts.work:
            if gradient.numel() > norms.SMALL:
                gradient.clamp_(-limit, limit)
            else:
                small.append(gradient)
        if small:
            torch._foreach_clamp_min_(small, -limit)
            torch._foreach_clamp_max_(small, limit)


def _blocks(layout: Layout) -> Iterator[tuple[Tensor, int, list[Tensor]]]:
    """Yield blocks of elements with their number of replicas and the gradients they belong to.

    A block is a view of a large gradient, or a copy of small ones of one type.
    """
    small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for shard, gradient in zip(*layout.gradients(), strict=True):
        if gradient.numel() > norms.SMALL:
            for part in torch.split(norms.flatten(gradient), norms.BLOCK):
                yield part, shard.num_replicas, [gradient]
        else:
            small.setdefault((shard.num_replicas, gradient.dtype), []).append(gradient)
    for (replicas, _), gradients in small.items():
        longest = max(gradient.numel() for gradient in gradients)
        number = max(1, norms.BLOCK // max(1, longest))
        for first in range(0, len(gradients), number):
            copied = gradients[first : first + number]
            yield norms.gathered(copied), replicas, copied
