"""Which optimizers take the steps of one process under which plugin, by the names of their classes.

SGD, Adam, Lion and others compute the step of an element from that element: every plugin is right.
LARS, Muon and LAMB with ``max_grad_norm=None`` read a whole parameter, by norms and products that
torch computes over shards too. ``WHOLE`` do so by other operations: they are refused where
parameters are sharded (``fsdp``, ``zero`` 2 and 3, ``tensor``). ``FROM_ALL`` read all parameters:
they are refused also where a rank steps some of them (``zero`` 1, ``pipeline``, ``moe``). A class
that is of neither torch nor timm is let through, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from runner.booster.plugin import ParallelModel, Plugin
from runner.clip.shard import is_sharded

log = logging.getLogger(__name__)

LAMB = frozenset({"Lamb", "LAMB"})
FROM_ALL = LAMB | {"LBFGS", "Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptSGD", "DAdaptLion"}
WHOLE = (FROM_ALL - LAMB) | {"torch.Adafactor", "AdamP", "SGDP", "NvNovoGrad", "NovoGrad", "Mars"}
WHOLE |= {"Rprop", "SOAP", "Shampoo", "DistributedShampoo"}
AT_ONCE = FROM_ALL | {"Adan", "Adahessian", "SparseAdam", "Lookahead"}
"""Optimizers that cannot step one parameter after the other."""


def require_safe(optimizer: Optimizer, parallel: Collection[ParallelModel], plugin: Plugin) -> None:
    """Refuse an optimizer whose steps would differ from those of one process; all ranks call it."""
    if all(each.layout.group is None for each in parallel):
        return
    names, kind, where = _names(optimizer), type(optimizer).__name__, type(plugin).__name__
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "timm") and not plugin.rank:
        log.warning(
            "%s is not known here: if it computes the step of an element from other parameters, "
            "or from a whole one, its steps may differ under %s; python -m runner verify tells",
            kind,
            where,
        )
    if not names & (FROM_ALL | WHOLE):
        return
    found = [""]
    if any(map(_steps_some, parallel)) and computes_from_all(optimizer):
        clips = any(group.get("max_grad_norm") for group in optimizer.param_groups)
        how = " (max_grad_norm=None turns that off: clip by the booster instead)" if clips else ""
        found = [
            f"{kind} computes its steps from all parameters{how}, but under {where} each rank "
            "steps only some of them: choose TorchDDPPlugin (plugin=ddp) or another optimizer"
        ]
    elif names & WHOLE and any(is_sharded(p) for g in optimizer.param_groups for p in g["params"]):
        found = [
            f"{kind} cannot step the parameters that {where} shards over ranks: choose "
            "LowLevelZeroPlugin(stage=1) (plugin=zero plugin.zero_stage=1) or TorchDDPPlugin "
            "(plugin=ddp), which step whole parameters, or another optimizer"
        ]
    if plugin.world_size > 1:
        # Ranks may hold different experts or stages, and so find different problems.
        here, found = found[0], [""] * plugin.world_size
        dist.all_gather_object(found, here)
    if problem := next(filter(None, found), ""):
        raise ValueError(problem)


def computes_from_all(optimizer: Optimizer, names: frozenset[str] = FROM_ALL) -> bool:
    """Return whether each step is computed from all parameters; LAMB's by its own clipping."""
    if "max_grad_norm" in optimizer.defaults:
        return any(group["max_grad_norm"] for group in optimizer.param_groups)
    return bool(_names(optimizer) & names)


def orthogonalized(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters whose gradients an optimizer orthogonalizes: the matrices of Muon.

    Implementations that step other parameters by Adam mark these groups by ``use_muon``.
    """
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


def _steps_some(made: ParallelModel) -> bool:
    """Return whether the optimizer of a rank steps only some parameters of the model."""
    layout, own = made.layout, made.steps
    partitioned = own is not None and any(id(shard.param) not in own for shard in layout.shards)
    return partitioned or made.pipeline is not None or len(layout.shards) < len(layout.names)
