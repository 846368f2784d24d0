"""Clipping by one call, in anybody's training loop.

The names and arguments are those of Composer's gradient clipping, so that its scripts run with
their import lines changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from runner.clip.layout import Layout
from runner.clip.measure import total_norm
from runner.clip.mode import ClipMode, Outcome


def build(mode: str, **options: Any) -> ClipMode:
    """The clipping mode called ``mode``: the file ``runner/clip/<mode>.py``.

    Args:
        mode: ``norm``, ``value``, ``adaptive``, ``none``, or any further mode.
        options: arguments of :class:`runner.clip.mode.ClipMode`.

    Raises:
        ValueError: there is no such mode, or an option is out of range.
    """
    name = f"runner.clip.{mode}"
    known = mode.isidentifier() and find_spec(name) is not None
    kind = getattr(import_module(name), "MODE", None) if known else None
    if kind is None:
        raise ValueError(f"unknown clipping mode {mode!r}: use norm, value, adaptive or none")
    built = kind(**options)
    assert isinstance(built, ClipMode)
    return built


@torch.no_grad()
def apply_gradient_clipping(
    parameters: nn.Module | Iterable[Tensor] | Tensor,
    clipping_type: str,
    clipping_threshold: float,
    norm_type: float = 2.0,
) -> Outcome:
    """Clip the gradients of ``parameters`` in place. Call it after ``backward``, before ``step``.

    Args:
        parameters: a module (whose transposed convolutions and classifier head are then known),
            or parameters, or one tensor. Of a model whose parameters are DTensors (``fully_shard``,
            tensor parallelism) give the module, on every rank; for stages and experts boost the
            model with its plugin and clip through the optimizer.
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        norm_type: p of the total norm.

    Returns:
        What was done: the norm before and after, the coefficient, the share clipped.

    Raises:
        ValueError: an unknown type, or a threshold that is not above 0.
        TypeError: parameters are sharded, and are not given as a module.
    """
    mode = build(clipping_type, threshold=clipping_threshold, norm_type=norm_type)
    if isinstance(parameters, nn.Module):
        layout = Layout.of_model(parameters)
    else:
        layout = Layout.of_parameters(parameters)
    mode.bind(layout)
    return mode.clip(layout, total_norm(layout, norm_type))


@dataclass(frozen=True)
class GradientClipping:
    """Clipping as an algorithm of a :class:`runner.Trainer`.

    Example:
        ``Trainer(model=..., algorithms=[GradientClipping("norm", 0.1)])``
    """

    clipping_type: str
    clipping_threshold: float

    def mode(self) -> ClipMode:
        """The clipping mode that this describes."""
        return build(self.clipping_type, threshold=self.clipping_threshold)
