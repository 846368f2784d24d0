"""Clipping by one call, in anybody's training loop.

The names and arguments are those of Composer's gradient clipping, so that its scripts run with
their import lines changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from runner.clip.boosted import clip_boosted
from runner.clip.decision import Decision
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode


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
    units: Mapping[str, int | Sequence[int]] | None = None,
) -> Decision:
    """Clip the gradients of ``parameters`` in place. Call it after ``backward``, before ``step``.

    A boosted model is clipped by its optimizer: gradients are synchronised and unscaled first, the
    norm is that of the whole model on all ranks, and a second clipping in one step is refused.

    Args:
        parameters: a module (whose layers and heads are then known), or parameters, or one tensor.
            Of a boosted model, on every rank: the boosted model, the user's own model object, or
            all parameters of either. Of another model whose parameters are DTensors
            (``fully_shard``): the module, on every rank.
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        norm_type: p of the total norm.
        units: of ``adaptive``, for a module with layers that it does not know: patterns of
            parameter names, and the dimension or dimensions of the parameter that index outputs,
            such as ``{"experts.*": [0, 1]}``.

    Returns:
        What was done: the norm before and after, the coefficient, the share clipped.

    Raises:
        ValueError: an unknown type, a threshold that is not above 0, no parameters at all,
            parameters of a boosted model that cannot be clipped by themselves, or units that do
            not fit the parameters.
        StepOrderError: gradients of a boosted model are not final, or were clipped already.
        TypeError: parameters are sharded, and are not given as a module.
    """
    mode = build(
        clipping_type, threshold=clipping_threshold, norm_type=norm_type, units=units or {}
    )
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    given = listed if isinstance(listed, nn.Module) else list(listed)
    if given == []:
        raise ValueError("no parameters to clip: give a module, or parameters")
    decision = clip_boosted(given, mode)
    if decision is not None:
        return decision
    layout = _layout_of(given)
    mode.bind(layout)
    layout.separate_gradients()
    return mode.clip(layout)


def _layout_of(given: nn.Module | list[Tensor]) -> Layout:
    if isinstance(given, nn.Module):
        return Layout.of_model(given)
    return Layout.of_parameters(given)


@dataclass(frozen=True)
class GradientClipping:
    """Clipping as an algorithm of a :class:`runner.Trainer`.

    Example:
        ``Trainer(model=..., algorithms=[GradientClipping("norm", 0.1)])``

    Args:
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        units: see :func:`apply_gradient_clipping`.
    """

    clipping_type: str
    clipping_threshold: float
    units: Mapping[str, int | Sequence[int]] | None = None

    def mode(self) -> ClipMode:
        """The clipping mode that this describes."""
        return build(self.clipping_type, threshold=self.clipping_threshold, units=self.units or {})
