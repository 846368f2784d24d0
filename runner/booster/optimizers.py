"""Facts about optimizers, by the names of their classes: plugins, fused kernels, Muon.

SGD, Adam, Lion and others compute the step of an element from that element: every plugin is right.
LARS, Muon and LAMB with ``max_grad_norm=None`` read a whole parameter, by norms and products that
torch computes over shards too. Optimizers of ``WHOLE`` read a whole parameter by operations that
torch does not compute over shards: they are refused where parameters are sharded (``fsdp``,
``zero`` 2 and 3, ``tensor``). Optimizers of ``FROM_ALL`` read all parameters: they are also refused
where a rank steps only some parameters (``zero`` 1, ``pipeline``, ``moe``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from runner.booster.plugin import Plugin
from runner.gradients import Layout, transfer
from runner.gradients.layout import OwnClip
from runner.gradients.shard import is_sharded
from runner.parallel.collectives import from_all, raise_first
from runner.parallel.distribution import ParallelModel

log = logging.getLogger(__name__)

LAMB = frozenset({"Lamb", "LAMB"})
FROM_ALL = LAMB | {"LBFGS", "Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptSGD", "DAdaptLion"}
WHOLE = (FROM_ALL - LAMB) | {"torch.Adafactor", "AdamP", "SGDP", "NvNovoGrad", "NovoGrad", "Mars"}
WHOLE |= {"Rprop", "SOAP", "Shampoo", "DistributedShampoo"}
AT_ONCE = FROM_ALL | {"Adan", "Adahessian", "SparseAdam", "Lookahead"}
"""Optimizers that cannot step one parameter after the other."""

SCALING = (SGD, Adam, AdamW, Adagrad)
"""Optimizers whose fused kernels divide gradients by ``grad_scale``. A subclass may not."""

LARGEST_SCALE = 1e30  # the largest divisor of gradients in a fused step: float32 has to hold it


def require_safe(optimizer: Optimizer, parallel: ParallelModel, plugin: Plugin) -> None:
    """Refuse an optimizer whose steps would differ from one process's steps; all ranks call it."""
    if parallel.layout.group is None:
        return
    kind = type(optimizer).__name__
    where = type(plugin).__name__
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "timm") and not plugin.rank:
        log.warning("python -m runner verify tells if %s is right under %s", kind, where)
    names = _names(optimizer)
    if not names & (FROM_ALL | WHOLE):
        return
    problem = ""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _steps_only_some(parallel) and computes_from_all(optimizer):
        problem = (
            f"{kind} computes its steps from all parameters (max_grad_norm=None turns off that of "
            f"LAMB), but under {where} each rank steps only some of them: choose TorchDDPPlugin "
            "(plugin=ddp) or another optimizer"
        )
    elif names & WHOLE and any(is_sharded(parameter) for parameter in parameters):
        problem = (
            f"{kind} cannot step the parameters that {where} shards over ranks: choose "
            "LowLevelZeroPlugin(stage=1), TorchDDPPlugin (plugin=ddp) or another optimizer"
        )
    raise_first(problem)  # Ranks may hold different experts or stages, and find different problems.


def _steps_only_some(parallel: ParallelModel) -> bool:
    """Return whether the optimizer of this rank steps only some of the model's parameters."""
    layout = parallel.layout
    if parallel.pipeline is not None or len(layout.shards) < len(layout.names):
        return True
    steps = parallel.steps
    return steps is not None and any(id(shard.param) not in steps for shard in layout.shards)


def computes_from_all(optimizer: Optimizer, names: frozenset[str] = FROM_ALL) -> bool:
    """Return whether each step is computed from all parameters; LAMB's by its own clipping."""
    if "max_grad_norm" in optimizer.defaults:
        return any(group["max_grad_norm"] for group in optimizer.param_groups)
    return bool(_names(optimizer) & names)


def orthogonalized(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the matrices of Muon; some implementations mark their groups by ``use_muon``."""
    return [
        parameter
        for optimizer in optimizers
        if any("muon" in name.lower() for name in _names(optimizer))
        for group in optimizer.param_groups
        if group.get("use_muon", True)
        for parameter in group["params"]
        if parameter.ndim > 1
    ]


def own_clips(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> tuple[OwnClip, ...]:
    """Return what parameter groups say of clipping, ``"clip": False`` or a threshold.

    Args:
        names: name of each parameter by its id.

    Raises:
        ValueError: a group says something else.
    """
    clips = []
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        clip = group.get("clip")
        if clip is None or clip is True:
            continue
        is_number = isinstance(clip, int | float) and not isinstance(clip, bool)
        if clip is not False and not (is_number and clip > 0):
            raise ValueError(
                f"clip of parameter group {number} is {clip!r}: give False to leave its gradients "
                "as they are, or a threshold above 0"
            )
        of_group = frozenset(names[id(parameter)] for parameter in group["params"])
        threshold = None if clip is False else float(clip)
        clips.append(OwnClip(f"param_groups.{number}", of_group, threshold))
    return tuple(clips)


def require_same_clips(clips: Sequence[OwnClip]) -> None:
    """Refuse parameter groups that say other things of clipping on another rank; a collective."""
    described = [(clip.group, sorted(clip.names), clip.threshold) for clip in clips]
    of_ranks = from_all(described)
    if any(of_rank != described for of_rank in of_ranks):
        raise ValueError(
            "parameter groups say other things of clipping on another rank: give each rank the "
            'same groups, with the same "clip"'
        )


def _names(optimizer: Optimizer) -> set[str]:
    kinds = type(optimizer).mro()
    torchs = {f"torch.{k.__name__}" for k in kinds if k.__module__.startswith("torch.")}
    return torchs | {k.__name__ for k in kinds}


def unknown(optimizers: Iterable[Optimizer], known: Collection[int], instead: str) -> str:
    """Describe a parameter that would be neither synchronised nor clipped; ``known``: ids."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    return (
                        f"param_groups[{number}]['params'][{place}] of {type(optimizer).__name__}, "
                        f"of shape {list(parameter.shape)}, is no parameter of a boosted module: "
                        f"it would be neither synchronised nor clipped. {instead}"
                    )
    return ""


class BoostedGroups:
    """The parameter groups of the optimizers that step together; ``steps``: ids of this rank."""

    def __init__(
        self, optimizers: Sequence[Optimizer], layout: Layout, steps: frozenset[int] | None
    ) -> None:
        self._optimizers = optimizers
        self._layout = layout
        self._steps = steps
        self._record()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _ids(self) -> tuple[list[Any], list[int]]:
        """Return what groups say of clipping, and the ids of their parameters, in each step."""
        groups = self._groups()
        clips = [group.get("clip") for group in groups]
        return clips, [id(parameter) for group in groups for parameter in group["params"]]

    def restore_clips(self) -> None:
        """Let groups say of clipping what they said at boost, after a state was loaded."""
        for group, clip in zip(self._groups(), self._clips, strict=True):
            if clip is not None:
                group["clip"] = clip
            else:
                group.pop("clip", None)

    def _record(self) -> None:
        self._seen = self._ids()
        self._clips, ids = self._seen
        # With ZeRO stage 1 other ranks step some of them.
        trained = [shard.param for shard in self._layout.shards if shard.param.requires_grad]
        float32 = {parameter.dtype for parameter in trained} == {torch.float32}
        self._steps_all = float32 and {id(parameter) for parameter in trained} <= {*ids}

    def have_changed(self) -> bool:
        """Return whether groups changed since the last call; keep what this rank steps of them."""
        clips, ids = self._ids()
        if (clips, ids) == self._seen:
            return False
        self._require_same_clips(clips)
        shards = {id(shard.param): shard for shard in self._layout.shards}
        instead = (
            "Boost the model that owns it, and add parameters that the boosted model has now: "
            "model.unwrap().named_parameters()"
        )
        # Another rank may hold the stage that still has the parameter.
        raise_first(unknown(self._optimizers, shards.keys(), instead), self._layout.group is None)
        if self._steps is not None:
            for group in self._groups():
                group["params"] = [p for p in group["params"] if id(p) in self._steps]
        for parameter in orthogonalized(self._optimizers):
            shard = shards[id(parameter)]
            if shard.name not in self._layout.orthogonalized:
                raise ValueError(
                    f"{shard.name} was given to Muon after boost, and clipping would scale it: "
                    "give Muon all of its matrices before booster.boost"
                )
        self._record()
        return True

    def _require_same_clips(self, clips: Sequence[Any]) -> None:
        for number, clip in enumerate(clips):
            before = self._clips[number] if number < len(self._clips) else None
            if clip != before:
                raise ValueError(
                    f"clip of parameter group {number} is {clip!r}, but was {before!r} at boost, "
                    "which tells it all ranks: set it before booster.boost"
                )

    def fold(self, coef: Tensor) -> bool:
        """Return whether fused kernels multiply all gradients by ``coef``, seen by no hook."""
        if not self._steps_all or _global_optimizer_pre_hooks:
            return False
        if transfer.can_read(coef.device) and coef.item() * LARGEST_SCALE < 1.0:
            return False
        for optimizer in self._optimizers:
            if type(optimizer) not in SCALING or optimizer._optimizer_step_pre_hooks:
                return False
            for group in optimizer.param_groups:
                if not group.get("fused"):
                    return False
        return True


def match_strides(layout: Layout) -> None:
    """Give every gradient the strides of its parameter.

    torch's fused CPU kernels read both in memory order and ignore strides: a channels-last gradient
    of a contiguous parameter would change the wrong weights without an error.
    """
    parameters = [shard.param for shard in layout.shards]
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    # The usual case, in half the time. For 2,000 parameters ``map`` saves 0.15 ms of each step.
    plain = {type(gradient) for gradient in gradients} == {Tensor}
    if plain and all(map(Tensor.is_contiguous, [*gradients, *parameters])):
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def step_where(
    finite: bool | Tensor, optimizers: Sequence[Optimizer], coef: Tensor | None = None
) -> None:
    """Step optimizers if ``finite`` holds; fused kernels read a tensor on the device."""
    if isinstance(finite, Tensor) and _starts_momentum(optimizers):
        finite = bool(finite)
    if finite is False:
        return
    read: dict[str, Any] = {} if finite is True else {"found_inf": (~finite).float()}
    if coef is not None and not (transfer.can_read(coef.device) and coef.item() == 1.0):
        read["grad_scale"] = coef.reciprocal().float()
    for optimizer in optimizers:
        vars(optimizer).update(read)
        try:
            optimizer.step()
        finally:
            for name in read:
                del vars(optimizer)[name]


def _starts_momentum(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a step would allocate momentum buffers on this rank.

    torch's fused SGD leaves them uninitialised if ``found_inf`` skips that step; the next step
    would add their contents to the weights.
    """
    return any(
        parameter.grad is not None and parameter not in optimizer.state
        for optimizer in optimizers
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
    )
