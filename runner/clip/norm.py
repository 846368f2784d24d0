"""Modes that multiply the whole gradient by one coefficient: ``norm``, ``percentile``, ``zscore``.

``G ← G · min(1, λ/‖G‖)``, with one ‖G‖ over the whole model (Pascanu, Mikolov and Bengio 2013,
arXiv 1211.5063, algorithm 1). λ may follow from the norms so far; ``none`` has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from runner.clip.decision import Decision, limit_in_force
from runner.clip.mode import FactorMode
from runner.config.modes import Norm, Percentile, Unclipped, ZScore
from runner.gradients import transfer
from runner.gradients.layout import Layout
from runner.gradients.norms import Norms


def limit_norm(
    norm: Tensor,
    limit: Tensor | float,
    *,
    max_stat: Tensor | None = None,
    threshold: Tensor | float | None = None,
    to: Tensor | None = None,
) -> Decision:
    """Decide to scale the whole gradient so that its norm is at most ``limit``.

    No epsilon is added to ‖G‖: the clipped norm is ``limit`` (or ``to``), and a gradient whose norm
    is exactly ``limit`` is not touched.
    """
    bound = limit_in_force(norm, limit)
    if to is None:
        factor = (bound / norm).clamp_(max=1.0)  # 1 for a norm of 0
    else:
        factor = torch.where(norm > bound, to / norm, 1.0)
    in_force = bound if threshold is None else limit_in_force(norm, threshold)
    return Decision(norm, in_force, factor=factor, largest=max_stat)


@dataclass(eq=False)
class NormClip(Norm, FactorMode):
    """Scale the whole gradient so that its norm is at most λ."""

    by_norm_alone = True

    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        # No collective: every rank has the same ‖G‖.
        return limit_norm(norms.total, self.limit_on(norms.total))


@dataclass(eq=False)
class NoClip(Unclipped, FactorMode):
    """Leave the gradients alone; everything is still measured."""

    by_norm_alone = True

    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        return Decision.untouched(norms.total, None)


@dataclass(eq=False)
class PercentileClip(Percentile, FactorMode):
    """Scale the whole gradient so that its norm is at most a percentile of the norms so far.

    ``λ_t = factor · percentile_p(‖G‖_1, ..., ‖G‖_t)``, linearly interpolated. AutoClip (Seetharaman
    et al. 2020, arXiv 2007.14469) takes unclipped norms of all steps, this one included, and clips
    from the first one on. A percentile of 0, which would stop the training, clips nothing. The
    memory holds ``norms``, in the order of the steps, with inf where there is none; each step sorts
    them.
    """

    by_norm_alone = True

    def _begin_memory(self, device: torch.device) -> dict[str, Any]:
        """Make room for one more norm."""
        earlier = self.memory.get("norms", torch.empty(0))
        earlier = earlier.to(device, transfer.widest(device))
        # Only the device may know whether the step is finite: an inf that stays is no norm.
        room = 1 if self.window is None else self.window - len(earlier)
        self.memory["norms"] = torch.cat([earlier.new_full((room,), math.inf), earlier])
        return super()._begin_memory(device)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        norm = norms.total.view(1)
        before = self.memory["norms"][1:]
        rising = torch.cat([before, norm]).sort().values
        count = (rising < math.inf).sum(dtype=norm.dtype).view(1)
        limit = self.factor * _percentile(rising, count, self.limit)
        clips = (count >= self.min_steps) & (limit > 0)
        limit = torch.where(clips, limit, math.inf)
        kept = torch.minimum(norm, limit) if self.history == "clipped" else norm
        self.memory["norms"] = torch.cat([before, kept])
        in_force = torch.where(clips, limit, math.nan)[0]
        return limit_norm(norms.total, limit[0], threshold=in_force)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if "norms" in self.memory:
            norms = self.memory["norms"]
            state["memory"] = {"norms": norms[norms < math.inf]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; of more norms than the window has, the latest."""
        super().load_state_dict(state)
        if self.window is not None and "norms" in self.memory:
            self.memory["norms"] = self.memory["norms"][-self.window :]


def _percentile(rising: Tensor, count: Tensor, percent: float) -> Tensor:
    """Return a percentile of the first ``count`` of rising values, interpolated as NumPy does."""
    position = (count - 1.0) * (percent / 100.0)
    low = position.floor()
    high = torch.minimum(low + 1.0, count - 1.0)
    return torch.lerp(rising[low.long()], rising[high.long()], position - low)


@dataclass(eq=False)
class ZScoreClip(ZScore, FactorMode):
    """Scale down a gradient whose norm lies far above a running mean.

    ZClip (Kumar, Owen, Chowdhury and Güra 2025, arXiv 2504.02507). With μ and σ of the steps
    before, a norm is clipped if ``z = (‖G‖ - μ)/(σ + ε)`` is above the threshold ``z*``. It becomes

    * rule ``adaptive_scaling``: ``μ + z*·σ / (z/z*)``, nearer to μ the larger the norm is;
    * rule ``mean``: ``μ``;
    * rule ``percentile``: ``μ + z*·σ``, which is the limit too, without ε.

    μ and σ² are mean and population variance of the first finite steps (``warmup_steps``), which
    are not clipped. Then they move by ``μ ← α·μ + (1-α)·n`` and ``σ² ← α·σ² + (1-α)·(n-μ)²``, where
    n is the norm after clipping (``history=clipped``, as published) or before (``raw``). Where
    σ ≤ ε·μ the norms are on a plateau, so that any change would have a huge z: nothing is clipped.
    """

    by_norm_alone = True
    initial_memory: ClassVar = {"count": 0.0, "mean": 0.0, "variance": 0.0}

    @torch.no_grad()
    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        norm = norms.total
        mean = self.memory["mean"]
        deviation = self.memory["variance"].sqrt()
        begins = self.memory["count"] < self.warmup_steps
        unlimited = begins | (deviation <= self.eps * mean)
        eps = 0.0 if self.rule == "percentile" else self.eps
        limit = mean + self.limit * (deviation + eps)
        bound = limit.masked_fill(unlimited, math.inf)
        target = self._target(norm, bound, deviation)
        entering = norm
        if self.history == "clipped":
            entering = torch.where(norm > bound, target, norm)
        self._remember(entering, begins)
        in_force = limit.masked_fill(unlimited, math.nan)
        return limit_norm(norm, bound, threshold=in_force, to=target)

    def _target(self, norm: Tensor, bound: Tensor, deviation: Tensor) -> Tensor:
        """Return what a norm above ``bound`` is scaled down to."""
        if self.rule == "percentile":
            return bound
        mean: Tensor = self.memory["mean"]
        if self.rule == "mean":
            return mean
        z = self.limit
        return mean + z * z * deviation * (deviation + self.eps) / (norm - mean)

    def _remember(self, norm: Tensor, begins: Tensor) -> None:
        """Let a norm enter mean and variance, with equal weights while the memory ``begins``."""
        count = self.memory["count"]
        change = norm - self.memory["mean"]
        # One form of both: a running variance weighs the last square by one (1 - weight) more.
        weight = torch.where(begins, 1.0 / (count + 1.0), 1.0 - self.decay)
        square = torch.where(begins, 1.0, 1.0 - weight) * change * change
        self.memory["count"] = count + 1.0
        self.memory["mean"] = self.memory["mean"] + weight * change
        self.memory["variance"] = (1.0 - weight) * (self.memory["variance"] + weight * square)
