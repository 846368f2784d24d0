"""Mode ``adagc``: each tensor's norm is limited to λ times the running mean γ_p of its norm.

Wang et al. 2025 (AdaGC, arXiv 2502.11034, algorithm 1), with G the whole gradient and g_p that of
the parameter p::

    t < T:  h = min(1, λ_abs/‖G‖)          γ_p ← min(γ_p, ‖h·g_p‖)
    t ≥ T:  h_p = min(1, λ·γ_p/‖g_p‖)      γ_p ← β·γ_p + (1−β)·‖h_p·g_p‖

A step whose gradient is zero, or absent, leaves γ_p as it is. With the published rule a zero makes
γ_p zero in the warm-up: h_p is then 0 for ever, and the tensor is frozen. A parameter that gets its
first gradient after the warm-up is not clipped in that step, which begins its γ_p.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.clip import Decision, GradStats, Layout, transfer
from runner.clip.per_parameter import TensorMode
from runner.config.simple_modes import AdaGC


@dataclass(eq=False)
class AdaGCClip(AdaGC, TensorMode):  # type: ignore[misc]
    """Limit each tensor by its own history: ``gamma`` [parameters], infinite before a gradient."""

    limit_moves = True  # the warm-up has no λ
    _names: Sequence[str] = field(default=(), init=False, repr=False)
    _layout: Layout | None = field(default=None, init=False, repr=False)
    _at: Tensor | None = field(default=None, init=False, repr=False)  # of a part: in the history
    _warm: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("absolute", self.absolute > 0, "above 0")
        self.require("beta", 0 <= self.beta < 1, "at least 0 and below 1")
        self.require("warmup_steps", self.warmup_steps >= 0, "at least 0")

    def bind(self, layout: Layout) -> None:
        past, device, wide = self._past, layout.device, transfer.widest(layout.device)
        past["step"] = torch.as_tensor(past.get("step", 0.0)).to(device, wide)
        before = torch.as_tensor(past.get("gamma", ())).to(device, wide)
        # A name that is new takes the value behind the others.
        padded = torch.cat([before, before.new_full((1,), math.inf)])
        past["gamma"] = padded[self._places(layout, len(before))]
        self._layout, self._names = layout, layout.names

    def _places(self, layout: Layout, new: int) -> Tensor:
        """Return the places of the parameters of ``layout`` in the history."""
        places = {name: i for i, name in enumerate(self._names)}
        at = [places.get(name, new) for name in layout.names]
        return transfer.on_device(at, layout.device).long()

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Compare the norm of each tensor with its history; every rank knows all of them."""
        if self._layout is not layout:
            self.bind(layout)
        tensors, past = self.tensors(layout, stats), self._past
        norms, present, step = tensors.norms, tensors.present, past["step"]
        gamma = past["gamma"] if self._at is None else past["gamma"][self._at]
        warm, begun = step < self.warmup_steps, gamma.isfinite()
        bound = self.limit * gamma
        whole = torch.as_tensor(stats.norm, dtype=norms.dtype, device=norms.device)
        over = torch.where(warm, whole > self.absolute, norms > bound) & present
        scales = torch.where(over, torch.where(warm, self.absolute / whole, bound / norms), 1.0)
        after = tensors.scaled(scales)
        entering = after.norms if self.keeps_clipped else norms
        mean = torch.where(begun, self.beta * gamma + (1 - self.beta) * entering, entering)
        updated = torch.where(warm, gamma.minimum(entering), mean)
        updated = torch.where(norms > 0, updated, gamma)
        if self._at is None:
            past["gamma"] = updated
            self.end_parts()
        else:
            past["gamma"] = past["gamma"].index_copy(0, self._at, updated)
        compared = (torch.where(warm, math.nan, norms / gamma), over, present)
        limit = transfer.read(torch.where(warm, math.nan, whole.new_full((), self.limit)))
        return self.scale_tensors(
            layout, stats, scales, after=after, compared=compared, threshold=limit
        )

    def of_part(self, layout: Layout) -> AdaGCClip:
        """Return the mode for some parameters, with their places in the history."""
        made = copy.copy(self)
        made._layout, made._at = layout, self._places(layout, 0)
        return made

    def ready_for_parts(self) -> bool:
        """Return whether the warm-up is over, in which ‖G‖ decides; it waits for an accelerator."""
        if self._warm:
            self._warm = bool(self._past["step"] < self.warmup_steps)
        return not self._warm

    def end_parts(self) -> None:
        self._past["step"] = self._past["step"] + 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"names": list(self._names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._names, self._warm = state["names"], True
        if self._layout is not None:
            self.bind(self._layout)


MODE = AdaGCClip
