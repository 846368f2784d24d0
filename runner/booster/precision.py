"""Mixed precision: the dtype of a forward pass, and the scale of an fp16 loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

SMALLEST_SCALE = 2.0**-24
"""Smallest scale of an fp16 loss: the smallest fp16 number. Otherwise a loss that is never finite
would halve the scale down to 0."""


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype of a forward pass under precision ``name``; None for full precision."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"unknown precision {name!r}: use {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass
class LossScale:
    """The dynamic scale of an fp16 loss (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    The scale is constant within an accumulation window. Only :meth:`update` changes it, which is
    called once per optimizer step, after the gradients were unscaled.

    Attributes:
        scale: current factor on the loss.
        growth_interval: number of consecutive finite steps after which the scale grows.
        growth: factor on the scale when it grows.
        backoff: factor on the scale after a step that was not finite.
        finite_steps: number of finite steps since the scale last changed.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        """Reduce the scale after an overflow, increase it after enough finite steps."""
        if not finite:
            self.scale = max(self.scale * self.backoff, SMALLEST_SCALE)
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale *= self.growth
            self.finite_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of finite steps."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.scale, self.finite_steps = state["scale"], state["finite_steps"]
