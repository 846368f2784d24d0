"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

Elementwise, so a shard needs no word of the others but for the counts. Unlike scaling, it turns the
gradient's direction.
"""

import math

from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout, Number
from runner.clip.mode import ClipMode, Outcome, after_counting
from runner.clip.norms import combine, power_sums


class ValueClip(ClipMode):
    """Clamp elements."""

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Clamp in place and count what was changed; one collective where ranks share the model."""
        limit = self.limit
        shards, gradients = layout.gradients()
        peaks = power_sums(gradients, math.inf)
        changed: Number = 0.0
        elements = 0.0
        for shard, gradient, peak in zip(shards, gradients, peaks, strict=True):
            elements += gradient.numel() / shard.num_replicas
            if self.tally is not None:
                self.tally.add(gradient.abs(), 1 / shard.num_replicas)
            if not isinstance(peak, Tensor) and peak <= limit:
                continue  # To see that costs a thirtieth of counting.
            changed = changed + transfer.count(gradient.abs() > limit) / shard.num_replicas
            gradient.clamp_(-limit, limit)
        return after_counting(
            self, layout, norm, changed, elements, combine(peaks or [0.0], math.inf)
        )


MODE = ValueClip
