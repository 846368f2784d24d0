"""Mode ``zscore`` (ZClip): λ lies z standard deviations above a running mean of the norms.

Kumar, Owen, Chowdhury and Güra 2025 (arXiv 2504.02507). With μ and σ of the steps before, a norm is
clipped if ``z = (‖G‖ - μ)/(σ + ε)`` is above the threshold ``z*``. It then becomes

* rule ``adaptive_scaling``: ``μ + z*·σ / (z/z*)``, which is nearer to μ the larger the norm is;
* rule ``mean``: ``μ``;
* rule ``percentile``: ``μ + z*·σ``, which is the limit too, without ε.

μ and σ² are mean and population variance of the first finite steps (``warmup_steps``), which are
not clipped. Then they move by ``μ ← α·μ + (1-α)·n`` and ``σ² ← α·σ² + (1-α)·(n-μ)²``, where n is
the norm after clipping (``history=clipped``, as published) or before (``raw``). Where σ ≤ ε·μ the
norms are on a plateau, so that any change would have a huge z: nothing is clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from runner.clip import ClipMode, Decision, GradStats, Layout, limit_norm
from runner.clip.transfer import where
from runner.config.modes import ZScore


@dataclass(eq=False)
class ZScoreClip(ZScore, ClipMode):  # type: ignore[misc]
    """Scale down a gradient whose norm lies far above a running mean."""

    initial_history: ClassVar = {"count": 0.0, "mean": 0.0, "variance": 0.0}

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        past = self._past
        count, mean, variance = past["count"], past["mean"], past["variance"]
        norm, z = stats.norm, self.limit
        begins, deviation = count < self.warmup_steps, variance**0.5
        unlimited = begins | (deviation <= self.eps * mean)
        eps = 0.0 if self.rule == "percentile" else self.eps
        limit = where(unlimited, math.inf, mean + z * (deviation + eps))
        above = norm > limit
        to = limit
        if self.rule == "mean":
            to = mean
        elif self.rule == "adaptive_scaling":
            excess = where(above, norm - mean, 1.0)
            to = mean + z * z * deviation * (deviation + eps) / excess
        kept = where(above, to, norm) if self.keeps_clipped else norm
        # One form of both: a running variance weighs the last square by one (1 - weight) more.
        weight = where(begins, 1.0 / (count + 1.0), 1.0 - self.decay)
        change = kept - mean
        square = where(begins, 1.0, 1.0 - weight) * change * change
        past["count"] = count + 1.0
        past["mean"] = mean + weight * change
        past["variance"] = (1.0 - weight) * (variance + weight * square)
        in_force = where(unlimited, math.nan, limit)
        return limit_norm(norm, limit, threshold=in_force, to=to)
