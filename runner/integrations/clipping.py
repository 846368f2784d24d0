"""Clipping by one call, in any training loop.

``clipping_type`` and ``clipping_threshold`` are named as in Composer's gradient clipping.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from runner.clip.boosted import boosted_optimizer, owner_of
from runner.clip.call_history import CallHistory
from runner.clip.decision import Decision
from runner.clip.mode import ClipMode
from runner.gradients import transfer
from runner.gradients.layout import Layout
from runner.gradients.norms import Norms
from runner.gradients.over_ranks import (
    ProcessGroups,
    are_process_groups,
    compare_replicas,
    on_some_rank,
    outside_of_ddp,
    over_ranks,
    process_groups_of,
    require_process_groups,
    require_unmarked,
    without_gradient,
)
from runner.gradients.shard import WeakShard, add_up_gradient, is_dtensor, is_sharded

# Names of wrappers of other libraries, and their attribute that holds the model.
_INSIDE = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "_FabricModule": "_forward_module",  # Lightning Fabric's, around what really runs
}


@dataclass
class PlainClipper:
    """Clips a model that was not boosted, and keeps its layout.

    ``compared_later`` says, on all ranks alike, whether some rank has parameters without gradients
    that count as replicas: they are compared again when they have some. With ``each`` the share of
    each gradient is measured too. ``decision`` and ``norms`` are those of the last call.
    """

    layout: Layout
    mark: list[Any] = field(default_factory=list)
    process_groups: ProcessGroups = field(default_factory=dict)
    calls: CallHistory = field(default_factory=CallHistory)
    compared_later: bool = False
    without_gradient: list[Tensor] = field(default_factory=list)
    each: bool = False
    decision: Decision | None = None
    norms: Norms | None = None

    def clip(self, mode: ClipMode) -> Decision:
        """Clip by ``mode``, which is bound to the layout."""
        self.layout.separate_gradients()
        norms = mode.measure(self.layout, self.each)
        self.decision = mode.clip(self.layout, norms)
        norms.work = None  # it may hold gradients
        self.norms = norms
        return self.decision


# For each module that was not boosted the clippers that were made last, by their process groups.
_plain = WeakIdKeyDictionary()
# For each module inside of wrappers, and each boosted optimizer, what calls remember of it.
_histories = WeakIdKeyDictionary()
# For each parameter of a list that was clipped by a mode with a memory, what clips the list.
_lists = WeakIdKeyDictionary()
# For the first parameter of a list, what clips the list that was clipped last.
_last_lists = WeakIdKeyDictionary()
# Modules, and first parameters of lists, that were without gradients when they were clipped.
_warned = WeakIdKeyDictionary()


@dataclass
class ListClipper(PlainClipper):
    """Clips a list of parameters, which it does not keep alive.

    Attributes:
        parameters: references to the parameters.
        has_memory: whether a mode remembers earlier calls.
    """

    parameters: list[TensorWeakRef] = field(default_factory=list)
    has_memory: bool = False

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Return whether this is the clipper of a list."""
        if len(parameters) != len(self.parameters):
            return False
        pairs = zip(self.parameters, parameters, strict=True)
        return all(reference() is parameter for reference, parameter in pairs)

    def keep(self) -> None:
        """Note that a mode remembers a call, and let each parameter of the list find it."""
        self.has_memory = True
        for reference in self.parameters:
            _lists[reference()] = self


@torch.no_grad()
def apply_gradient_clipping(
    parameters: nn.Module | Iterable[Tensor] | Tensor,
    clipping_type: str,
    clipping_threshold: float | Tensor | None,
    norm_type: float = 2.0,
    *,
    groups: Mapping[str, Any] | None = None,
    process_groups: ProcessGroups | None = None,
    **options: Any,
) -> Decision:
    """Clip the gradients of ``parameters`` in place. Call it after ``backward``, before ``step``.

    A boosted model is clipped by its optimizer: gradients are synchronised and unscaled first, the
    norm is taken over the whole model on all ranks, and a second clipping in one step is refused.
    A gradient that is not finite is left as it is. The coefficient of ``norm`` leaves out the
    matrices that Muon steps, unless ``scales="all"`` is given. In a loop of Lightning Fabric or
    Accelerate give what their ``setup`` or ``prepare`` returned; unscale gradients before.

    A mode that remembers earlier steps (``percentile``, ``zscore``, ``adagc``, ``schedule``, and
    ``chain`` and ``groups`` of them) goes on from call to call. Its history belongs to the model,
    or to the list of parameters, and to the options of the mode, but not to its threshold. It ends
    with the model; :func:`clipping_state_dict` saves it.

    On several ranks a parameter that is no DTensor counts as a replica on each rank, unless
    ``groups`` says that ranks hold different parameters. Where other parameters of the model are
    sharded by ``fully_shard``, or averaged by ``DistributedDataParallel``, the first call compares
    the ranks. It cannot know this of a model without either: experts of such a model need
    ``groups``. Without ``groups``, the norm is taken over the parameters of one rank.

    Args:
        parameters: a module (whose layers and heads are then known), or parameters, or one tensor.
            Of a boosted model, on every rank: the boosted model, the user's own model object, or
            all parameters of either. Of another model whose parameters are DTensors
            (``fully_shard``): the module, on every rank.
        clipping_type: a clipping mode, such as ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0; None for ``chain`` and ``groups``.
        norm_type: p of the total norm.
        groups: for globs of parameter names the process group (or device mesh of one dimension)
            over which these parameters are distinct: each of its ranks holds others, and ranks
            outside of it hold replicas. ``groups={"experts.*": group}`` for experts;
            ``groups={"*": group}`` for pipeline stages of your own. All ranks of the world have to
            call then. In names of modes and patterns, ``experts.0.weight@1`` is the parameter on
            rank 1 of its group. With ``clipping_type="groups"`` this is the option of the mode.
        process_groups: the same as ``groups``, also with ``clipping_type="groups"``.
        options: options of the mode, such as ``units={"experts.*": [0, 1]}`` of ``adaptive``.

    Returns:
        What was done: the norm before and after, the coefficient, the share clipped.

    Raises:
        ValueError: an unknown type, a wrong option or threshold, no parameters, some parameters
            of a boosted model that cannot be clipped alone, or (``LayoutError``, on every rank)
            parameters that are no replicas and are not in ``groups``.
        StepOrderError: gradients of a boosted model are not final, or were clipped already.
        TypeError: parameters are sharded, and are not given as a module.
    """
    if isinstance(clipping_threshold, Tensor):  # a share of a norm that was returned
        clipping_threshold = clipping_threshold.item()
    options |= {"threshold": clipping_threshold, "norm_type": norm_type}
    if are_process_groups(groups):
        process_groups = groups
    elif groups is not None:
        if clipping_type != "groups":
            require_process_groups(groups)
        options["groups"] = groups
    subject = _module_or_list(parameters)
    clipper = clipper_of(subject, process_groups_of(process_groups))
    mode = clipper.calls.mode(clipping_type, options, clipper.layout)
    if isinstance(subject, list) and isinstance(clipper, ListClipper) and not clipper.has_memory:
        _require_no_memory(subject, clipping_type, mode)
    decision: Decision = clipper.clip(mode)
    if isinstance(clipper, ListClipper) and not clipper.has_memory and clipper.calls.state_dict():
        clipper.keep()
    warn_without_gradients(subject, clipper.layout, decision.norm, stacklevel=4)
    return decision


def clipping_state_dict(
    parameters: nn.Module | Iterable[Tensor] | Tensor,
) -> dict[str, Any]:
    """Return what calls of :func:`apply_gradient_clipping` remember of a model, to be saved.

    It is empty for modes without a history, and the same on every rank. The state of a boosted
    optimizer (``optimizer.state_dict()``) has it too.
    """
    return _calls_of(_module_or_list(parameters)).state_dict()


def load_clipping_state_dict(
    parameters: nn.Module | Iterable[Tensor] | Tensor, state: Mapping[str, Any]
) -> None:
    """Load what :func:`clipping_state_dict` returned; ``{}`` begins all histories anew."""
    subject = _module_or_list(parameters)
    _calls_of(subject).load_state_dict(state)
    if isinstance(subject, list) and owner_of(subject) is None:
        _list_clipper(subject).keep()


def warn_without_gradients(
    given: nn.Module | list[Tensor], layout: Layout, norm: Tensor, stacklevel: int
) -> None:
    """Warn once of a model, or a list of parameters, of which no parameter has a gradient."""
    if transfer.can_read(norm.device) and norm != 0.0:
        return
    if any(shard.param.grad is not None for shard in layout.shards):
        return
    # Other ranks may have gradients. A rank without any may read the norm: it waits for nothing.
    if layout.group is not None and float(norm) != 0.0:
        return
    key = given if isinstance(given, nn.Module) else given[0]
    if key not in _warned:
        _warned[key] = True
        warnings.warn(
            "no parameter has a gradient, so nothing was clipped and the norm is 0: call this "
            "after backward() and before zero_grad()",
            stacklevel=stacklevel,
        )


def _module_or_list(
    parameters: nn.Module | Iterable[Tensor] | Tensor,
) -> nn.Module | list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    subject = listed if isinstance(listed, nn.Module) else list(listed)
    if subject == []:
        raise ValueError("no parameters to clip: give a module, or parameters")
    return subject


def clipper_of(given: nn.Module | list[Tensor], process_groups: ProcessGroups | None = None) -> Any:
    """Return what clips a module, or a list of parameters; see :func:`apply_gradient_clipping`.

    For some parameters of a boosted model on one rank, their gradients are made final here.
    """
    for part in given.modules() if isinstance(given, nn.Module) else ():
        if isinstance(part, FSDPModule):
            # A forward pass after the backward pass may have gathered parameters without gradients.
            part.reshard()
    clipper, whole = boosted_optimizer(given)
    if clipper is not None:
        if process_groups:
            raise ValueError(
                "groups names process groups of a model that was not boosted: the plugin of a "
                "boosted one knows which ranks hold what, so leave it out"
            )
        if whole:
            return clipper
        clipper.begin_clip()
    if isinstance(given, nn.Module):
        return plain_clipper(given, process_groups)
    if process_groups:
        raise ValueError(
            "groups names parameters of a model: give the model instead of its parameters"
        )
    return _list_clipper(given)


def plain_clipper(model: nn.Module, process_groups: ProcessGroups | None = None) -> PlainClipper:
    """Return the clipper of a model that was not boosted; a new one if its parameters changed.

    Where parameters are sharded, or process groups are given, a new layout takes collectives: all
    ranks have to call this, and to change their parameters or placements together.
    """
    mark: list[Any] = []  # The layout keeps the parameters, so that no id is reused.
    for parameter in model.parameters():
        mark += [id(parameter), parameter.shape, parameter.requires_grad]
        if is_dtensor(parameter):
            add_up_gradient(parameter)
            mark += [parameter.placements, id(parameter.device_mesh)]
    groups = dict(process_groups or {})
    clippers: list[PlainClipper] = _plain.setdefault(model, [])  # type: ignore[no-untyped-call]
    for clipper in clippers:
        if clipper.process_groups == groups:
            if clipper.mark == mark and not _has_more_gradients(clipper):
                return clipper
            clippers.remove(clipper)
            break
    history = _history_of(_without_wrappers(model))
    layout = _plain_layout(model, groups)
    clipper = PlainClipper(layout, mark=mark, process_groups=groups, calls=history)
    if layout.group is not None:
        clipper.without_gradient = without_gradient(model)
        clipper.compared_later = on_some_rank(bool(clipper.without_gradient), layout.group)
    clippers.append(clipper)
    return clipper


def _has_more_gradients(clipper: PlainClipper) -> bool:
    """Return whether replicas without gradients have some now, on any rank."""
    if not clipper.compared_later:
        return False
    assert clipper.layout.group is not None
    has_gradients = any(parameter.grad is not None for parameter in clipper.without_gradient)
    return on_some_rank(has_gradients, clipper.layout.group)


def _plain_layout(model: nn.Module, process_groups: ProcessGroups) -> Layout:
    inner = _without_wrappers(model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if process_groups and not dist.is_initialized():
        raise ValueError("groups needs torch.distributed: call init_process_group first")
    if process_groups or any(is_sharded(parameter) for parameter in model.parameters()):
        assert dist.group.WORLD is not None
        return over_ranks(inner, dist.group.WORLD, process_groups)
    if ranks > 1:
        require_unmarked(model)
        apart, group = outside_of_ddp(model)
        if apart and group.size() > 1:
            compare_replicas(apart, group)
    return Layout.of_model(inner)


def _calls_of(given: nn.Module | list[Tensor]) -> CallHistory:
    """Return what calls remember of a model, which need not have a clipper yet, or of a list."""
    owner = owner_of(given)
    if owner is not None:
        calls: CallHistory = owner.calls
        return calls
    if isinstance(given, nn.Module):
        return _history_of(_without_wrappers(given))
    return _list_clipper(given).calls


def _list_clipper(given: list[Tensor]) -> ListClipper:
    """Return the clipper of a list of parameters, with a new layout if they have changed."""
    clipper: ListClipper | None = _lists.get(given[0])  # type: ignore[no-untyped-call]
    if clipper is not None and clipper.is_of(given):
        others = (_lists.get(parameter) for parameter in given)  # type: ignore[no-untyped-call]
        is_current = all(other is clipper for other in others)
    else:
        clipper = _last_lists.get(given[0])  # type: ignore[no-untyped-call]
        is_current = clipper is not None and clipper.is_of(given)
    mark = [(parameter.shape, parameter.requires_grad) for parameter in given]
    if clipper is not None and is_current and clipper.mark == mark:
        return clipper
    layout = Layout.of_parameters(given, WeakShard)
    if clipper is None or not is_current:
        references = [TensorWeakRef(parameter) for parameter in given]
        clipper = ListClipper(layout, parameters=references)
        _last_lists[given[0]] = clipper
    clipper.layout = layout
    clipper.mark = mark
    return clipper


def _require_no_memory(given: list[Tensor], kind: str, mode: ClipMode) -> None:
    """Refuse a mode that remembers some parameters of a list by an earlier call on another list."""
    for parameter in given if _lists else ():
        other: ListClipper | None = _lists.get(parameter)  # type: ignore[no-untyped-call]
        if other is not None and other.calls.remembers(mode):
            raise ValueError(
                f"clipping type {kind} remembers earlier calls, but an earlier call had only some "
                "of these parameters: give the same list in each call, or the model"
            )


def _history_of(module: nn.Module) -> CallHistory:
    """Return what calls remember of a model inside of its wrappers."""
    if module not in _histories:
        _histories[module] = CallHistory()
    history: CallHistory = _histories[module]
    return history


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
