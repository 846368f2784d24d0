"""Mode ``percentile`` (AutoClip): λ is a percentile of the norms of all steps so far.

``λ_t = percentile_p(‖G‖_1, ..., ‖G‖_t)``, linearly interpolated, and ``G ← G · min(1, λ_t/‖G‖)``.
Seetharaman, Wichern, Pardo and Le Roux 2020 (arXiv 2007.14469); their code takes unclipped norms of
all steps, this one included, and clips from the first one on. Here a percentile of 0, which would
stop the training, clips nothing.

The norms are kept in rising order: 8 bytes for each step that counts (16 with a ``window``), which
a step reads and writes once: on one CPU core 1.3 ms with 100,000 norms, 28 ms with a million.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, limit_norm, transfer
from runner.config.simple_modes import Percentile

FEWEST = 256  # number of norms that a new buffer has room for


@dataclass(eq=False)
class PercentileClip(Percentile, ClipMode):  # type: ignore[misc]
    """Scale the whole gradient so that its norm is at most a percentile of the norms so far.

    The history holds ``count``, the number of finite steps so far; ``norms``, those that count in
    rising order; and with a window ``recent``, the same in the order of the steps. Places that are
    not filled yet hold inf.
    """

    _most: int = field(default=0, init=False, repr=False)  # steps that may have been finite

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, why in self.conflicts(vars(self)) if self.threshold is not None else ():
            raise ValueError(f"{option} {why}")

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Make room for one more norm, and decide.

        Only the device may know how many steps were finite, so the host counts all of them.
        """
        past, device, wide = self._past, layout.device, transfer.widest(layout.device)
        past["count"] = past.get("count", torch.zeros(1)).to(device, wide)
        self._most += 1
        room = min(self._most, self.window or sys.maxsize)
        for name in ("norms",) if self.window is None else ("norms", "recent"):
            norms = past.get(name, torch.empty(0)).to(device, wide)
            if len(norms) < room:
                norms = torch.cat([norms, norms.new_full((max(FEWEST, room),), math.inf)])
            past[name] = norms
        return super().decide(layout, stats)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Insert ‖G‖ into the norms, and compare it with their percentile; no collective."""
        past = self._past
        norm = transfer.on_device([stats.norm], layout.device)
        norms, count = past["norms"], past["count"] + 1.0
        held = count
        if self.window is not None:
            slot = past["count"].remainder(self.window).long()
            norms = _without(norms, past["recent"].index_select(0, slot))
            held = count.clamp(max=float(self.window))
        limit = _percentile(_with(norms, norm), held, self.limit)
        clips = (held >= self.min_steps) & (limit > 0)
        limit = torch.where(clips, limit, math.inf)
        kept = torch.minimum(norm, limit) if self.keeps_clipped else norm
        past["norms"], past["count"] = _with(norms, kept), count
        if self.window is not None:
            past["recent"] = past["recent"].index_copy(0, slot, kept)
        in_force = transfer.read(torch.where(clips, limit, math.nan)[0])
        return limit_norm(stats.norm, transfer.read(limit[0]), threshold=in_force)

    def state_dict(self) -> dict[str, Any]:
        state, past = super().state_dict(), self._past
        if past:
            held = min(int(past["count"]), self.window or sys.maxsize)
            state["history"] = {
                name: value if name == "count" else value[:held].clone()
                for name, value in past.items()
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        past = state.get("history", {})
        held, count = len(past.get("norms", ())), int(past.get("count", 0))
        same = held == min(count, self.window or sys.maxsize)
        if not same or (held and ("recent" in past) != (self.window is not None)):
            raise ValueError(f"window={self.window} is not that of the state, with {held} norms")
        super().load_state_dict(state)
        self._most = count


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
    below = norms.index_select(0, low.long())
    above = norms.index_select(0, torch.minimum(low + 1.0, held - 1.0).long())
    return torch.lerp(below, above, at - low)


MODE = PercentileClip
