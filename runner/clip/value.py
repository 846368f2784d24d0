"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

It works element by element, so that ranks exchange nothing but counts. Unlike scaling, it changes
the direction of the gradient.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.norms import combine, power_sums
from runner.clip.transfer import Number
from runner.config.modes.value import Value


@dataclass(eq=False)
class ValueClip(Value, ClipMode):
    """Clamp elements."""

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements above λ on this rank."""
        limit = self.limit
        shards, gradients = layout.gradients()
        maxima = power_sums(gradients, math.inf)
        changed: Number = 0.0
        elements = 0.0
        above = []
        for shard, gradient, largest in zip(shards, gradients, maxima, strict=True):
            elements += gradient.numel() / shard.num_replicas
            if self.tally is not None:
                self.tally.add(gradient.abs(), 1 / shard.num_replicas)
            if not isinstance(largest, Tensor) and largest <= limit:
                continue  # Finding the maximum takes a thirtieth of the time of counting.
            changed = changed + transfer.count(gradient.abs() > limit) / shard.num_replicas
            above.append(gradient)
        parts = Parts(changed, elements, above)
        return Decision.change_parts(stats.norm, limit, combine(maxima or [0.0], math.inf), parts)

    def apply_parts(self, decision: Decision) -> None:
        """Clamp the gradients that have an element above λ."""
        assert decision.parts is not None
        for gradient in decision.parts.work:
            gradient.clamp_(-decision.threshold, decision.threshold)


MODE = ValueClip
