"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

It works element by element, so that ranks exchange nothing but counts. Unlike scaling, it changes
the direction of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

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
        found, room = cls(), dict[torch.dtype, Tensor]()
        for flat, replicas, gradients in _blocks(layout):
            wide = flat if flat.itemsize > 3 else flat.float()
            if len(wide) > len(room.get(wide.dtype, ())):  # new memory costs as much as a look
                room[wide.dtype] = wide.new_empty(max(norms.BLOCK, len(wide)))
            squares = torch.mul(wide, wide, out=room[wide.dtype][: len(wide)])
            bound = torch.tensor(limit, dtype=flat.dtype).to(squares)
            most, square = squares.amax().sqrt(), (bound * bound).item()
            above, power = 0, squares.sum().item()
            clamped = power
            if not (norms.VANISHES < power < norms.OVERFLOWS and square > norms.VANISHES):
                above, most = int((flat.abs() > bound).sum()), flat.abs().amax()
                power = norms.power_sum([flat])
                clamped = norms.power_sum([flat.clamp(-bound, bound)]) if above else power
            elif most > bound:
                # Numbers that differ have squares that differ, so counting these is exact: those
                # above that of the bound become the number after it.
                after = torch.nextafter(bound * bound, bound.new_tensor(math.inf)).item()
                clamped = squares.clamp_(max=after).sum().item()
                above = round(squares.gt_(square).sum().item())
                clamped -= above * (after - square)
            if above and not (found.exceeding and found.exceeding[-1] is gradients[-1]):
                found.exceeding += gradients
            found.power += power / replicas
            found.clamped += clamped / replicas
            found.above += above / replicas
            # The result of max() with NaN depends on the order; the power tells of it.
            found.largest = max(found.largest, most.item())
        return found


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
        powers = powers_of(*layout.gradients(), 2.0, each=True)[1] if named else None
        return GradStats.measured(norm, powers, elements)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements above λ on this rank."""
        limit, pairs = self.limit, list(zip(*layout.gradients(), strict=True))
        total = sum(gradient.numel() / shard.num_replicas for shard, gradient in pairs)
        if self.tally is not None:
            for shard, gradient in pairs:
                self.tally.add(gradient.abs(), 1 / shard.num_replicas)
        if transfer.can_read(layout.device):
            found: Elements = stats.work or Elements.of(layout, limit)
            power = found.clamped if self.norm_type == 2.0 else None
            parts = Parts(found.above, total, found.exceeding, power)
            return Decision.change_parts(stats.norm, limit, found.largest, parts)
        top = powers_of(*layout.gradients(), math.inf)[0]
        above = [transfer.count(g.abs() > limit) / s.num_replicas for s, g in pairs]
        parts = Parts(sum(above, 0.0), total, [gradient for _, gradient in pairs])
        return Decision.change_parts(stats.norm, limit, top, parts)

    def apply_parts(self, decision: Decision) -> None:
        assert decision.parts is not None
        limit, small = float(decision.threshold), list[Tensor]()
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
        number = max(1, norms.BLOCK // max(1, *map(Tensor.numel, gradients)))
        for first in range(0, len(gradients), number):
            some = gradients[first : first + number]
            yield norms.gathered(some), replicas, some
