"""Mode ``percentile`` (AutoClip): λ is a percentile of the norms of all steps so far.

``λ_t = percentile_p(‖G‖_1, ..., ‖G‖_t)``, linearly interpolated, and ``G ← G · min(1, λ_t/‖G‖)``.
Seetharaman, Wichern, Pardo and Le Roux 2020 (arXiv 2007.14469); their code takes unclipped norms of
all steps, this one included, and clips from the first one on. Here a percentile of 0, which would
stop the training, clips nothing. Each step sorts the norms: 8 bytes for each step, or ``window``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from runner.clip import ClipMode, Decision, GradStats, Layout, limit_norm, transfer
from runner.config.modes import Percentile


@dataclass(eq=False)
class PercentileClip(Percentile, ClipMode):  # type: ignore[misc]
    """Scale the whole gradient so that its norm is at most a percentile of the norms so far.

    The history holds ``norms``, in the order of the steps, with inf where there is none.
    """

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Make room for one more norm, and decide."""
        norms = self._past.get("norms", torch.empty(0))
        norms = norms.to(layout.device, transfer.widest(layout.device))
        # Only the device may know whether the step is finite: an inf that stays is no norm.
        room = 1 if self.window is None else self.window - len(norms)
        self._past["norms"] = torch.cat([norms.new_full((room,), math.inf), norms])
        return super().decide(layout, stats)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        norm, before = transfer.on_device([stats.norm], layout.device), self._past["norms"][1:]
        rising = torch.cat([before, norm]).sort().values
        held = (rising < math.inf).sum(dtype=norm.dtype).view(1)
        at = (held - 1.0) * (self.limit / 100.0)
        low = at.floor()
        below, above = rising[low.long()], rising[torch.minimum(low + 1.0, held - 1.0).long()]
        limit = torch.lerp(below, above, at - low)  # as NumPy interpolates
        clips = (held >= self.min_steps) & (limit > 0)
        limit = torch.where(clips, limit, math.inf)
        kept = torch.minimum(norm, limit) if self.keeps_clipped else norm
        self._past["norms"] = torch.cat([before, kept])
        in_force = transfer.read(torch.where(clips, limit, math.nan)[0])
        return limit_norm(stats.norm, transfer.read(limit[0]), threshold=in_force)

    def state_dict(self) -> dict[str, Any]:
        past = {name: norms[norms < math.inf] for name, norms in self._past.items()}
        return super().state_dict() | ({"history": past} if past else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; of more norms than the window has, the latest."""
        super().load_state_dict(state)
        if self.window is not None and "norms" in self._past:
            self._past["norms"] = self._past["norms"][-self.window :]
