"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

It works element by element, so that ranks exchange nothing but counts. Unlike scaling, it changes
the direction of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runner.clip import ClipMode, Decision, GradStats, Parts
from runner.config.modes import Value
from runner.gradients import Layout, host, transfer
from runner.gradients.norms import combine, powers_of


@dataclass(eq=False)
class ValueClip(Value, ClipMode):
    """Clamp elements."""

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        if self.norm_type != 2.0 or not transfer.can_read(layout.device):
            return super().measure(layout, each)
        elements = host.compare_elements(layout, self.limit)
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
            elements: host.Elements = stats.work or host.compare_elements(layout, limit)
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
            if gradient.numel() > host.SMALL:
                gradient.clamp_(-limit, limit)
            else:
                small.append(gradient)
        if small:
            torch._foreach_clamp_min_(small, -limit)
            torch._foreach_clamp_max_(small, limit)
