"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

Elementwise, so a shard needs no word of the others but for the counts. Unlike scaling, it turns the
gradient's direction.
"""

import math

from torch import Tensor

from runner.clip.layout import Layout, Number
from runner.clip.measure import combine, power_sums
from runner.clip.mode import ClipMode, Outcome, after_counting


class ValueClip(ClipMode):
    """Clamp elements."""

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Clamp in place and count what was changed; one collective where ranks share the model."""
        limit = self.limit
        pieces, gradients = layout.gradients()
        peaks: list[Number] = list(power_sums(gradients, math.inf))
        changed: Number = 0.0
        elements = 0.0
        for piece, gradient, peak in zip(pieces, gradients, peaks, strict=True):
            elements += gradient.numel() / piece.holders
            if not isinstance(peak, Tensor) and peak <= limit:
                continue  # To see that costs a thirtieth of counting.
            count: Number = (gradient.abs() > limit).sum()
            if gradient.device.type == "cpu":
                count = int(count)
            gradient.clamp_(-limit, limit)
            changed = changed + count / piece.holders
        return after_counting(
            self, layout, norm, changed, elements, combine(peaks or [0.0], math.inf)
        )


MODE = ValueClip
