"""Mode ``percentile`` (AutoClip): λ is a percentile of the norms of all steps so far.

``λ_t = percentile_p(‖G‖_1, ..., ‖G‖_t)``, linearly interpolated, and ``G ← G · min(1, λ_t/‖G‖)``.
Seetharaman, Wichern, Pardo and Le Roux 2020 (arXiv 2007.14469); their code takes unclipped norms of
all steps, this one included, and clips from the first one on. Here a percentile of 0, which would
stop the training, clips nothing. The norms are kept in rising order: 8 bytes for each step (16 with
a ``window``), which a step reads and writes once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, limit_norm, transfer
from runner.config.modes import Percentile


@dataclass(eq=False)
class PercentileClip(Percentile, ClipMode):  # type: ignore[misc]
    """Scale the whole gradient so that its norm is at most a percentile of the norms so far.

    The history holds ``norms``, those that count in rising order with inf behind them; and with a
    window ``recent``, the same in the order of the steps with inf before them.
    """

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Make room for one more norm, and decide."""
        past, device = self._past, layout.device
        for name in ("norms",) if self.window is None else ("norms", "recent"):
            norms = past.get(name, torch.empty(0)).to(device, transfer.widest(device))
            # Only the device may know whether the step is finite: an inf that stays is no norm.
            room = 1 if self.window is None else self.window - len(norms)
            more = norms.new_full((room,), math.inf)
            past[name] = torch.cat([norms, more] if name == "norms" else [more, norms])
        return super().decide(layout, stats)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        past, norms = self._past, self._past["norms"]
        norm = transfer.on_device([stats.norm], layout.device)
        if self.window is not None:
            norms = _without(norms, past["recent"][:1])
        held = (norms < math.inf).sum(dtype=norms.dtype) + 1.0
        limit = _percentile(_with(norms, norm), held, self.limit)
        clips = (held >= self.min_steps) & (limit > 0)
        limit = torch.where(clips, limit, math.inf)
        kept = torch.minimum(norm, limit) if self.keeps_clipped else norm
        past["norms"] = _with(norms, kept)
        if self.window is not None:
            past["recent"] = torch.cat([past["recent"][1:], kept])
        in_force = transfer.read(torch.where(clips, limit, math.nan)[0])
        return limit_norm(stats.norm, transfer.read(limit[0]), threshold=in_force)

    def state_dict(self) -> dict[str, Any]:
        past = {name: norms[norms < math.inf] for name, norms in self._past.items()}
        return super().state_dict() | ({"history": past} if past else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        past = state.get("history", {})
        held, windowed = len(past.get("norms", ())), self.window is not None
        if held and (("recent" in past) != windowed or held > (self.window or held)):
            raise ValueError(f"window={self.window} is not that of the state, with {held} norms")
        super().load_state_dict(state)


def _with(norms: Tensor, norm: Tensor) -> Tensor:
    """Return rising ``norms`` with another one in its place, without the last of them."""
    before = torch.cat([norms.new_full((1,), -math.inf), norms[:-1]])
    return torch.maximum(before, torch.minimum(norms, norm))


def _without(norms: Tensor, norm: Tensor) -> Tensor:
    """Return rising ``norms`` without one that equals ``norm``, and inf behind them."""
    after = torch.cat([norms[1:], norms.new_full((1,), math.inf)])
    return torch.where(norms < norm, norms, after)


def _percentile(norms: Tensor, held: Tensor, percent: float) -> Tensor:
    """Return a percentile of the first ``held`` of rising norms, as NumPy interpolates, [1]."""
    at = (held - 1.0) * (percent / 100.0)
    low = at.floor()
    below = norms.index_select(0, low.long().view(1))
    above = norms.index_select(0, torch.minimum(low + 1.0, held - 1.0).long().view(1))
    return torch.lerp(below, above, at - low)
