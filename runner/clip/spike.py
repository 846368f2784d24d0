"""Mode ``spike``: elements that are large beside their own second moment are clamped.

The clipping of SPAM (Huang et al. 2025, arXiv 2501.06842, section 3): where ``g² > θ·v``,
``g ← sign(g)·sqrt(θ·v)``, with v the second moment that the optimizer has before the step, without
bias correction, and θ = ``clip.threshold``. SPAM also resets the optimizer's moments every 500
steps and lowers the learning rate after that, which is the optimizer's business and no part of this
mode.

As in the authors' code an element is compared once its second moment has averaged ``min_steps``
steps, 20 by default: after one step v is 0.001·g² with β2 = 0.999, and an element that has grown by
2.3 would be clamped. Where v is 0, because the element never had a gradient, nothing is clamped:
the published code (pytorch_optimizer 4.1.0 too) clamps such an element to 0, and v then stays 0
forever.

With ZeRO stage 1 a rank has the second moments of the parameters that it steps, and clips the
gradients of these alone; the copies on other ranks, which nobody reads, stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.optim import Optimizer

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.norms import Powers, combine, local_powers
from runner.clip.second_moment import (
    WITHOUT_OPTIMIZER,
    OptimizerMisfit,
    SecondMoments,
    require_second_moments,
)
from runner.clip.spikes import Spikes, clamp, ratios
from runner.config.simple_modes import Spike

NAME = "spike"


@dataclass(eq=False)
class SpikeClip(Spike, ClipMode):
    """Clamp elements by the optimizer's second moment. It has to be bound to the optimizers."""

    _moments: SecondMoments | None = field(default=None, init=False, repr=False)

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that each optimizer keeps a second moment of each element."""
        require_second_moments(optimizers, NAME, predicts=False)

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Find out which optimizer steps which shard, once; a collective of all ranks."""
        if self._moments is None or not self._moments.are_of(optimizers, layout):
            self._moments = SecondMoments(optimizers, layout, NAME, predicts=False)

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure ‖G‖ and find the spikes, by one read of the gradients on a CPU."""
        if self.norm_type != 2.0 or not transfer.can_read(layout.device):
            return super().measure(layout, each)
        found = self._find(layout)
        shares = [p / s.num_replicas for p, s in zip(found.powers, found.shards, strict=True)]
        power = float(sum(shares))
        norm = combine([power] if layout.group is None else layout.gather([power])[0], 2.0)
        return GradStats(norm, math.isfinite(norm), Powers(found.shards, shares, 2.0), found)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements of this rank that are above θ·v."""
        found: Spikes = stats.work or self._find(layout)
        if self.tally is not None:
            self._count_all(found)
        parts = Parts(found.changed, found.total, [found], found.clamped_power)
        if self.norm_type != 2.0:
            parts = replace(parts, power=None)
        return Decision.change_parts(stats.norm, self.limit, found.largest, parts)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        """Clamp the spikes; the norm after clipping counts each element where it is stepped."""
        if decision.finite is False:
            return decision
        assert decision.parts is not None
        [found] = decision.parts.work
        clamp(found, self.limit)
        if decision.parts.power is None:
            _, powers = local_powers(layout, self.norm_type, each=True)
            assert powers is not None
            power = found.weighted(powers)
            decision = replace(decision, parts=replace(decision.parts, power=power))
        return decision.complete(layout, self.norm_type)

    def _find(self, layout: Layout) -> Spikes:
        if self._moments is None:
            raise OptimizerMisfit(WITHOUT_OPTIMIZER.format(NAME))
        return Spikes.of(layout, self._moments, self.limit, self.min_steps)

    def _count_all(self, found: Spikes) -> None:
        assert self.tally is not None
        for one in found.compared:
            self.tally.add(ratios(one), 1 / one.copies)


MODE = SpikeClip
