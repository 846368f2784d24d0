"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

It works element by element, so that ranks exchange nothing but counts. Unlike scaling, it changes
the direction of the gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.blocks import Elements, clamp
from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.norms import combine, local_powers
from runner.clip.transfer import Number
from runner.config.simple_modes import Value


@dataclass(eq=False)
class ValueClip(Value, ClipMode):
    """Clamp elements."""

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure ‖G‖ and count the elements above λ, by one read of the gradients on a CPU."""
        if self.norm_type != 2.0 or not transfer.can_read(layout.device):
            return super().measure(layout, each)
        elements = Elements.of(layout, self.limit)
        power = elements.power
        norm = combine([power] if layout.group is None else layout.gather([power])[0], 2.0)
        finite = math.isfinite(norm)
        powers = local_powers(layout, 2.0, each=True)[1] if each or not finite else None
        return GradStats(norm, finite, powers, elements)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements above λ on this rank."""
        limit = self.limit
        shards, gradients = layout.gradients()
        held = [shard.num_replicas for shard in shards]
        total = sum(g.numel() / n for g, n in zip(gradients, held, strict=True))
        if self.tally is not None:
            for gradient, replicas in zip(gradients, held, strict=True):
                self.tally.add(gradient.abs(), 1 / replicas)
        if not transfer.can_read(layout.device):
            top, changed = _count(gradients, held, limit)
            parts = Parts(changed, total, gradients)
            return Decision.change_parts(stats.norm, limit, top, parts)
        found = Elements.of(layout, limit) if stats.work is None else stats.work
        power = found.clamped_power if self.norm_type == 2.0 else None
        parts = Parts(found.above, total, found.exceeding, power)
        return Decision.change_parts(stats.norm, limit, found.largest, parts)

    def apply_parts(self, decision: Decision) -> None:
        """Clamp the gradients that have elements above λ."""
        assert decision.parts is not None
        clamp(decision.parts.work, float(decision.threshold))


def _count(gradients: list[Tensor], held: Sequence[int], limit: float) -> tuple[Number, Number]:
    """Return the largest |g|, and the number of elements above ``limit``, on an accelerator."""
    if not gradients:
        return 0.0, 0.0
    wide = transfer.widest(gradients[0].device)
    largest = torch.stack(torch._foreach_norm(gradients, math.inf, dtype=wide)).amax()
    counts = [transfer.count(gradient.abs() > limit) for gradient in gradients]
    return largest, sum(count / n for count, n in zip(counts, held, strict=True))


MODE = ValueClip
