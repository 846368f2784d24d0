"""Clipping by one call, in any training loop.

Names and arguments are those of Composer's gradient clipping, so that its scripts need only their
import lines changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.clip.boosted import clip_boosted
from runner.clip.bound import bound
from runner.clip.decision import Decision
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode, build


@torch.no_grad()
def apply_gradient_clipping(
    parameters: nn.Module | Iterable[Tensor] | Tensor,
    clipping_type: str,
    clipping_threshold: float,
    norm_type: float = 2.0,
    **options: Any,
) -> Decision:
    """Clip the gradients of ``parameters`` in place. Call it after ``backward``, before ``step``.

    A boosted model is clipped by its optimizer: gradients are synchronised and unscaled first, the
    norm is that of the whole model on all ranks, and a second clipping in one step is refused.
    A gradient that is not finite is left as it is. The coefficient of ``norm`` leaves out the
    matrices that Muon steps, unless ``scales="all"`` is given.

    In a loop of Lightning Fabric or Accelerate give what their ``setup`` or ``prepare`` returned.
    What the call knows of a module it keeps for the next one, until its parameters or their
    placements change. Gradients that a loss scaler has scaled have to be unscaled before.

    Args:
        parameters: a module (whose layers and heads are then known), or parameters, or one tensor.
            Of a boosted model, on every rank: the boosted model, the user's own model object, or
            all parameters of either. Of another model whose parameters are DTensors
            (``fully_shard``): the module, on every rank.
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        norm_type: p of the total norm.
        options: options of the mode, such as ``units={"experts.*": [0, 1]}`` of ``adaptive``: for
            layers that it does not know, the dimensions of parameters that index outputs.

    Returns:
        What was done: the norm before and after, the coefficient, the share clipped.

    Raises:
        ValueError: an unknown type or option, a threshold that is not above 0, no parameters,
            some parameters of a boosted model that cannot be clipped alone, or options that do not
            fit the parameters.
        StepOrderError: gradients of a boosted model are not final, or were clipped already.
        TypeError: parameters are sharded, and are not given as a module.
    """
    options |= {"threshold": clipping_threshold, "norm_type": norm_type}
    mode = build(clipping_type, **options)
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    given = listed if isinstance(listed, nn.Module) else list(listed)
    if given == []:
        raise ValueError("no parameters to clip: give a module, or parameters")
    decision = clip_boosted(given, mode)
    if decision is not None:
        return decision
    if isinstance(given, nn.Module):
        known = bound(given)
        layout, mode = known.layout, known.mode(clipping_type, options)
    else:
        layout = Layout.of_parameters(given)
        mode.bind(layout)
    layout.separate_gradients()
    return mode.clip(layout)


@dataclass(frozen=True)
class GradientClipping:
    """Clipping as an algorithm of a :class:`runner.Trainer`.

    Example:
        ``Trainer(model=..., algorithms=[GradientClipping("norm", 0.1)])``

    Args:
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        units: option ``units`` of ``adaptive``, see :func:`apply_gradient_clipping`.
        scales: ``"all"`` to multiply the matrices of Muon by the coefficient too.
    """

    clipping_type: str
    clipping_threshold: float
    units: Mapping[str, int | Sequence[int]] | None = None
    scales: Literal["auto", "all"] = "auto"

    def mode(self) -> ClipMode:
        """Make the clipping mode that this describes."""
        options: dict[str, Any] = {} if self.units is None else {"units": self.units}
        options |= {"threshold": self.clipping_threshold, "scales": self.scales}
        return build(self.clipping_type, **options)
