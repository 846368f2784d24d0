"""Mode ``spike``: elements that are large beside their own second moment are clamped.

The clipping of SPAM (Huang et al. 2025, arXiv 2501.06842, section 3): where ``g² > θ·v``,
``g ← sign(g)·sqrt(θ·v)``, with v the second moment that the optimizer has before the step, without
bias correction, and θ = ``clip.threshold``. SPAM also resets the optimizer's moments every 500
steps and lowers the learning rate after that, which is no part of this mode.

As in the authors' code an element is compared once its second moment has averaged ``min_steps``
steps, 20 by default: after one step v is 0.001·g² with β2 = 0.999, and an element that has grown by
2.3 would be clamped. Where v is 0, because the element never had a gradient, nothing is clamped:
the published code clamps such an element to 0, and v then stays 0 forever.

With ZeRO stage 1 a rank has the second moments of the parameters that it steps, and clips the
gradients of these alone; the copies on other ranks, which nobody reads, stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import Decision, GradStats, Layout, Number, ParamShard, Parts, transfer
from runner.clip.norms import combine, powers_of
from runner.clip.second_moment import OptimizerMode, Stepped, pieces
from runner.config.simple_modes import Spike


class Compared(NamedTuple):
    """A gradient that is compared with its second moment."""

    gradient: Tensor
    value: Tensor
    ready: bool | Tensor  # whether v has averaged enough steps


@dataclass(eq=False)
class SpikeClip(Spike, OptimizerMode):
    """Clamp elements by the optimizer's second moment. It has to be bound to the optimizers."""

    name = "spike"

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements of this rank that are above θ·v.

        The norm after clipping counts each element where it is stepped.
        """
        stepped, p, work = self.stepped(), self.norm_type, list[Compared]()
        changed: Number = 0.0
        total, maxima, after = 0.0, list[Number](), list[Number]()
        for shard, gradient in zip(*layout.gradients(), strict=True):
            weight = stepped.weight(shard)
            if stepped.copies[shard.name]:
                total += gradient.numel() * weight
            one = self._compared(stepped, shard, gradient)
            if one is None:
                power = powers_of([shard], [gradient], p, True)[0]
                power = power if math.isinf(p) else power * shard.num_replicas
            else:
                power, above, largest = self._read(one, weight)
                changed = changed + above * weight
                maxima.append(largest)
                if isinstance(above, Tensor) or above:
                    work.append(one)
            if weight:
                after.append(power if math.isinf(p) else power * weight)
        whole = combine(after or [0.0], p) if math.isinf(p) else sum(after, 0.0)
        largest = combine(maxima or [0.0], math.inf)
        parts = Parts(changed, total, work, whole)
        return Decision.change_parts(stats.norm, self.limit, largest, parts)

    def apply_parts(self, decision: Decision) -> None:
        assert decision.parts is not None
        for one in decision.parts.work:
            for gradient, v in pieces(one.gradient, one.value):
                gradient.copy_(self._clamped(one, gradient, v)[1])

    def _compared(self, stepped: Stepped, shard: ParamShard, gradient: Tensor) -> Compared | None:
        """Return what is compared; None where another rank steps it, or it has no state yet."""
        moment = stepped.moment(shard)
        if moment is None or moment.value is None:
            return None
        ready = moment.steps >= self.min_steps
        return None if ready is False else Compared(gradient, moment.value, ready)

    def _clamped(self, one: Compared, gradient: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return g²/v of some elements and these elements clamped, in the widest type."""
        g, v = (each.to(transfer.widest(each.device)) for each in (gradient, value))
        ratio = (g * g / v).where((v > 0) & one.ready, 0.0)
        return ratio, torch.where(ratio > self.limit, (v * self.limit).sqrt().copysign(g), g)

    def _read(self, one: Compared, weight: float) -> tuple[Number, Number, Number]:
        """Return Σ|g|^p after clamping (max|g| for p = inf), the spikes, and the largest g²/v."""
        p, found = self.norm_type, []
        for gradient, value in pieces(one.gradient, one.value):
            ratio, clamped = self._clamped(one, gradient, value)
            size = clamped.abs().amax() if math.isinf(p) else (clamped.abs() ** p).sum()
            found.append(torch.stack([size, (ratio > self.limit).sum(), ratio.amax()]))
            if self.tally is not None:
                self.tally.add(ratio, weight)
        sizes, above, largest = torch.stack(found).T
        size = sizes.amax() if math.isinf(p) else sizes.sum()
        return transfer.read(size), transfer.read(above.sum()), transfer.read(largest.amax())


MODE = SpikeClip
