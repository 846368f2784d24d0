"""Mode ``norm``: G ← G · min(1, λ/‖G‖), one ‖G‖ over the whole model.

Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, algorithm 1). No epsilon is added to ‖G‖: the
clipped norm is λ, and a gradient whose norm is exactly λ is not touched.
"""

import torch
from torch import Tensor

from runner.clip.layout import Layout, Number
from runner.clip.mode import ClipMode, Outcome


class NormClip(ClipMode):
    """Scale the whole gradient so that its norm is at most λ."""

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Scale in place; no collective, because ``norm`` is already that of the world."""
        limit = self.limit
        _, gradients = layout.gradients()
        if isinstance(norm, Tensor):
            # On an accelerator a look at the norm would stall it: always multiply, by 1 mostly.
            coef = (limit / norm).clamp(max=1.0)
            if gradients:
                # Foreach's fast path wants the gradients' own type, but no narrower one.
                wide = torch.promote_types(gradients[0].dtype, torch.float32)
                torch._foreach_mul_(gradients, coef.to(wide))
            clipped = (norm > limit).to(norm.dtype)
            return Outcome(norm, norm * coef, coef, clipped, clipped, norm, limit)
        if norm <= limit:
            return Outcome.untouched(norm, limit, norm)
        coef_host = limit / norm
        if gradients:
            # A scalar in a tensor takes foreach's fast path on a CPU: a third of the time.
            torch._foreach_mul_(gradients, torch.tensor(coef_host, dtype=torch.float64))
        return Outcome(norm, norm * coef_host, coef_host, 1.0, 1.0, norm, limit)


MODE = NormClip
