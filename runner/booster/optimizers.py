"""What is known of optimizers, by the names of their classes: plugins, fused kernels, Muon.

SGD, Adam, Lion and others compute the step of an element from that element: every plugin is right.
LARS, Muon and LAMB with ``max_grad_norm=None`` read a whole parameter, by norms and products that
torch computes over shards too. ``WHOLE`` do so by other operations: they are refused where
parameters are sharded (``fsdp``, ``zero`` 2 and 3, ``tensor``). ``FROM_ALL`` read all parameters:
they are refused also where a rank steps some of them (``zero`` 1, ``pipeline``, ``moe``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from runner.booster.plugin import Plugin
from runner.clip import Layout, Number
from runner.clip.shard import is_sharded
from runner.parallel.collectives import raise_first
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

_PARAMETER, _GRADIENT = attrgetter("param"), attrgetter("grad")


def require_safe(optimizer: Optimizer, made: ParallelModel, plugin: Plugin) -> None:
    """Refuse an optimizer whose steps would differ from those of one process; all ranks call it."""
    if made.layout.group is None:
        return
    names, kind, where = _names(optimizer), type(optimizer).__name__, type(plugin).__name__
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "timm") and not plugin.rank:
        log.warning("python -m runner verify tells if %s is right under %s", kind, where)
    if not names & (FROM_ALL | WHOLE):
        return
    found, layout = "", made.layout
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    elsewhere = made.steps is not None and any(id(s.param) not in made.steps for s in layout.shards)
    elsewhere |= made.pipeline is not None or len(layout.shards) < len(layout.names)
    if elsewhere and computes_from_all(optimizer):
        found = (
            f"{kind} computes its steps from all parameters (max_grad_norm=None turns off that of "
            f"LAMB), but under {where} each rank steps only some of them: choose TorchDDPPlugin "
            "(plugin=ddp) or another optimizer"
        )
    elif names & WHOLE and any(map(is_sharded, held)):
        found = (
            f"{kind} cannot step the parameters that {where} shards over ranks: choose "
            "LowLevelZeroPlugin(stage=1), TorchDDPPlugin (plugin=ddp) or another optimizer"
        )
    raise_first(found)  # Ranks may hold different experts or stages, and find different problems.


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
        self._optimizers, self._layout, self._steps = optimizers, layout, steps
        self._record()

    def _now(self) -> tuple[int, list[int]]:
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        return len(groups), list(map(id, chain.from_iterable(groups)))

    def _record(self) -> None:
        self._seen = self._now()
        # With ZeRO stage 1 other ranks step some of them.
        trained = [shard.param for shard in self._layout.shards if shard.param.requires_grad]
        float32 = {parameter.dtype for parameter in trained} == {torch.float32}
        self._steps_all = float32 and {*self._seen[1]}.issuperset(map(id, trained))

    def have_changed(self) -> bool:
        """Return whether groups changed since the last call; keep what this rank steps of them."""
        if self._now() == self._seen:
            return False
        shards = {id(shard.param): shard for shard in self._layout.shards}
        instead = (
            "Boost the model that owns it, and add parameters that the boosted model has now: "
            "model.unwrap().named_parameters()"
        )
        # Another rank may hold the stage that still has the parameter.
        raise_first(unknown(self._optimizers, shards.keys(), instead), self._layout.group is None)
        steps = self._steps
        for group in (group for each in self._optimizers for group in each.param_groups):
            group["params"] = [p for p in group["params"] if steps is None or id(p) in steps]
        for parameter in orthogonalized(self._optimizers):
            if (shard := shards[id(parameter)]).scaled:
                raise ValueError(
                    f"{shard.name} was given to Muon after boost, and clipping would scale it: "
                    "give Muon all of its matrices before booster.boost"
                )
        self._record()
        return True

    def fold(self, coef: Number) -> bool:
        """Return whether fused kernels multiply all gradients by ``coef``, seen by no hook."""
        fits = isinstance(coef, Tensor) or coef * LARGEST_SCALE >= 1.0
        return (
            fits
            and self._steps_all
            and not _global_optimizer_pre_hooks
            and all(
                type(optimizer) in SCALING
                and not optimizer._optimizer_step_pre_hooks
                and all(group.get("fused") for group in optimizer.param_groups)
                for optimizer in self._optimizers
            )
        )


def match_strides(layout: Layout) -> None:
    """Give every gradient the strides of its parameter.

    torch's fused CPU kernels read both in memory order and ignore strides: a channels-last gradient
    of a contiguous parameter would change the wrong weights without an error.
    """
    parameters = list(map(_PARAMETER, layout.shards))
    gradients = list(map(_GRADIENT, parameters))
    contiguous = {*map(type, gradients)} == {Tensor} and all(map(Tensor.is_contiguous, gradients))
    if contiguous and all(map(Tensor.is_contiguous, parameters)):
        return  # the usual case, in half the time
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def step_where(finite: bool | Tensor, optimizers: Sequence[Optimizer], coef: Number = 1.0) -> None:
    """Step optimizers if ``finite`` holds; fused kernels read a tensor on the device."""
    if isinstance(finite, Tensor) and _starts_momentum(optimizers):
        finite = bool(finite)
    if finite is False:
        return
    read: dict[str, Any] = {} if finite is True else {"found_inf": (~finite).float()}
    if isinstance(coef, Tensor) or coef != 1.0:
        read["grad_scale"] = torch.as_tensor(1.0 / coef, dtype=torch.float32)
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
