"""Clipping by one call, in any training loop.

Names and arguments are those of Composer's gradient clipping, so that its scripts need only their
import lines changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from runner.clip.decision import Decision
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode, build
from runner.clip.shard import is_dtensor

# Names of wrappers of other libraries, and their attribute that holds the model.
_INSIDE = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "_FabricModule": "_forward_module",  # Lightning Fabric's, around what really runs
}


@dataclass
class PlainClipper:
    """Clips a model that was not boosted, and keeps its layout."""

    layout: Layout
    mark: list[Any] = field(default_factory=list)

    def clip(self, mode: ClipMode) -> Decision:
        """Clip by ``mode``, which is bound to the layout."""
        self.layout.separate_gradients()
        return mode.clip(self.layout)


# For modules and parameters a weak reference to their clipper, or "none" if they have none.
_boosted = WeakIdKeyDictionary()
# For each module that was not boosted the clipper that was made last.
_plain = WeakIdKeyDictionary()


def register(clipper: Any, owned: Iterable[nn.Module | Tensor]) -> None:
    """Register the boosted optimizer, or None, which clips what was boosted together.

    It makes gradients final (``begin_clip()``) and clips them (``clip(mode)``) over its ``layout``.
    """
    for each in owned:
        _boosted[each] = "none" if clipper is None else ref(clipper)


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
    matrices that Muon steps, unless ``scales="all"`` is given. In a loop of Lightning Fabric or
    Accelerate give what their ``setup`` or ``prepare`` returned; unscale gradients before.

    Args:
        parameters: a module (whose layers and heads are then known), or parameters, or one tensor.
            Of a boosted model, on every rank: the boosted model, the user's own model object, or
            all parameters of either. Of another model whose parameters are DTensors
            (``fully_shard``): the module, on every rank.
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        norm_type: p of the total norm.
        options: options of the mode, such as ``units={"experts.*": [0, 1]}`` of ``adaptive``.

    Returns:
        What was done: the norm before and after, the coefficient, the share clipped.

    Raises:
        ValueError: an unknown type, a wrong option or threshold, no parameters, or some parameters
            of a boosted model that cannot be clipped alone.
        StepOrderError: gradients of a boosted model are not final, or were clipped already.
        TypeError: parameters are sharded, and are not given as a module.
    """
    options |= {"threshold": clipping_threshold, "norm_type": norm_type}
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    given = listed if isinstance(listed, nn.Module) else list(listed)
    clipper, mode = clipper_of(given), build(clipping_type, **options)
    mode.bind(clipper.layout)
    decision: Decision = clipper.clip(mode)
    return decision


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


def clipper_of(given: nn.Module | list[Tensor]) -> Any:
    """Return what clips a module, or a list of parameters; see :func:`apply_gradient_clipping`.

    For some parameters of a boosted model on one rank, their gradients are made final here.
    """
    if given == []:
        raise ValueError("no parameters to clip: give a module, or parameters")
    module = given if isinstance(given, nn.Module) else None
    parameters = list(given.parameters()) if isinstance(given, nn.Module) else given
    for part in () if module is None else module.modules():
        if isinstance(part, FSDPModule):
            # A forward pass after the backward pass may have gathered parameters without gradients.
            part.reshard()
    owned = parameters if module is None or module not in _boosted else [module, *parameters]
    known = [_boosted.get(each) for each in owned]  # type: ignore[no-untyped-call]
    found = [each() if isinstance(each, ReferenceType) else each for each in known]
    clippers = {id(clipper): clipper for clipper in found if clipper is not None}
    clipper = next(iter(clippers.values()), None)
    if clipper == "none":
        raise ValueError(
            "this model was boosted without its optimizer, which synchronises gradients before "
            "they are clipped: booster.boost(model, optimizer)"
        )
    if clipper is not None:
        asked = {id(parameter) for parameter in parameters}
        shards = {id(shard.param): shard for shard in clipper.layout.shards}
        whole = all(key in asked or not one.param.requires_grad for key, one in shards.items())
        others = len(clippers) > 1 or any(each is None for each in found) or asked - shards.keys()
        if others or not (whole or clipper.layout.group is None):
            raise ValueError(
                "these are not the parameters of one boosted model, which are clipped together: "
                "give the boosted model, or its parameters(); clip several models one by one, or "
                "boost one module that holds them all"
            )
        if whole:
            return clipper
        clipper.begin_clip()
    if module is None:
        return PlainClipper(Layout.of_parameters(parameters))
    return plain_clipper(module)


def plain_clipper(model: nn.Module) -> PlainClipper:
    """Return the clipper of a model that was not boosted; a new one if its parameters changed.

    Where parameters are sharded, a new layout takes a collective: all ranks have to call this, and
    to change their parameters or placements together.
    """
    mark: list[Any] = []  # The layout keeps the parameters, so that no id is reused.
    for parameter in model.parameters():
        mark += [id(parameter), parameter.shape]
        if is_dtensor(parameter):
            mark += [parameter.placements, id(parameter.device_mesh)]
    known: PlainClipper | None = _plain.get(model)  # type: ignore[no-untyped-call]
    if known is None or known.mark != mark:
        known = _plain[model] = PlainClipper(Layout.of_model(_without_wrappers(model)), mark)
    return known


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers: its parameters have the names of the user's own."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise TypeError(
            "this model is wrapped by FSDP 1 (FullyShardedDataParallel), whose flat parameters "
            "cannot be clipped: use fully_shard (in Accelerate fsdp_version=2, in Lightning "
            "ModelParallelStrategy)"
        )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    attribute = next((inside for name, inside in _INSIDE.items() if name in kinds), None)
    return model if attribute is None else _without_wrappers(getattr(model, attribute))
