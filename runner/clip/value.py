"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

Elementwise, so a shard needs no word of the others but for the counts. Unlike scaling, it turns the
gradient's direction.
"""

from torch import Tensor

from runner.clip.layout import Layout, Number
from runner.clip.mode import ClipMode, Outcome, after_counting


class ValueClip(ClipMode):
    """Clamp elements."""

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Clamp in place and count what was changed; one collective where ranks share the model."""
        limit = self.limit
        pieces, gradients = layout.gradients()
        changed: Number = 0.0
        elements = 0.0
        for piece, gradient in zip(pieces, gradients, strict=True):
            count: Number = (gradient.abs() > limit).sum()
            if gradient.device.type == "cpu":
                count = int(count)
            if isinstance(count, Tensor) or count:
                gradient.clamp_(-limit, limit)
            changed = changed + count / piece.holders
            elements += gradient.numel() / piece.holders
        return after_counting(self, layout, norm, changed, elements)


MODE = ValueClip
