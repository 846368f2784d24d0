"""Check that an optimizer takes correct steps under a plugin.

================================================  ==============  ==============  =================
An optimizer computes the step of one element     ``single``,     ``zero`` 1,     ``fsdp``, ``zero``
from                                              ``ddp``         ``pipeline``,   2 and 3,
                                                                  ``moe``         ``tensor``
================================================  ==============  ==============  =================
that element: SGD, Adam, AdamW, Lion              correct         correct         correct
its parameter: Adafactor, LARS, Muon, LAMB with   correct         correct         if a trial step is
``max_grad_norm=None``                                                            correct
all parameters: LAMB with ``max_grad_norm``,      correct         refused         if a trial step is
Prodigy                                                                           correct
``torch.optim.LBFGS``                             correct         refused         refused
================================================  ==============  ==============  =================

Plugins of the second column keep parameters whole, but the optimizer of a rank holds only those
that the rank steps. Plugins of the third column give the optimizer DTensors; whether it computes a
norm or a mean over all shards depends on how it is written. Of ``timm.optim`` and ``torch.optim``,
Muon and LARS are correct there; :class:`torch.optim.Adafactor` raises an error. ``hybrid`` has the
restrictions of all the plugins that it combines.

A list of names cannot hold the optimizers that people write, so :func:`require_safe` compares small
trial steps with the class and its options (:mod:`runner.booster.optimizer_trial`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runner.booster.optimizer_trial import TOLERANCE, error_on_shards, steps_by_others
from runner.booster.plugin import ParallelModel, Plugin
from runner.clip.shard import is_sharded

ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.ASGD,
        optim.SparseAdam,
    }
)
"""Classes (not their subclasses) that are correct on any part of a model, so need no trial."""

BRANCHING = frozenset({"AdamP", "SGDP"})
"""Names of classes that branch on values of a tensor. On shards, ranks would branch differently and
block each other in collectives, so these are refused without a trial."""

MUON_TOLERANCE = 0.1
"""Tolerance for Muon, whose Newton-Schulz iteration runs in bfloat16. Orthogonalising each shard by
itself gives a far larger error."""

WHOLE = (
    "choose LowLevelZeroPlugin(stage=1) (plugin=zero plugin.zero_stage=1) or TorchDDPPlugin "
    "(plugin=ddp), which step whole parameters, or another optimizer"
)


def require_safe(optimizer: Optimizer, parallel: Collection[ParallelModel], plugin: Plugin) -> None:
    """Refuse an optimizer whose steps would differ from those of one process.

    Every rank has to call it: trial steps communicate, and all ranks refuse or none.
    """
    if type(optimizer) in ELEMENTWISE or all(each.layout.group is None for each in parallel):
        return
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if started else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = _problem(optimizer, parallel, type(plugin).__name__)
    # Ranks may hold different experts or stages, and so find different problems.
    found = [problem] * plugin.world_size
    if plugin.world_size > 1:
        dist.all_gather_object(found, problem)
    for each in found:
        if each:
            raise ValueError(each)


def orthogonalized(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters whose gradients an optimizer orthogonalizes: the matrices of Muon.

    Implementations that step other parameters by Adam mark these groups by ``use_muon``.
    """
    return [
        parameter
        for optimizer in optimizers
        if _is_muon(optimizer)
        for group in optimizer.param_groups
        if group.get("use_muon", True)
        for parameter in group["params"]
        if parameter.ndim > 1
    ]


def _is_muon(optimizer: Optimizer) -> bool:
    return any("muon" in kind.__name__.lower() for kind in type(optimizer).__mro__)


def _problem(optimizer: Optimizer, parallel: Collection[ParallelModel], where: str) -> str:
    """Return why ``optimizer`` would take wrong steps on this rank; empty if it would not."""
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        return (
            f"{name} searches along a direction over all parameters, which {where} spreads over "
            "ranks: choose TorchDDPPlugin (plugin=ddp) or another optimizer"
        )
    if any(map(_steps_some, parallel)) and steps_by_others(optimizer):
        return (
            f"{name} computes its steps from all parameters{_norm_option(optimizer)}, but "
            f"under {where} each rank steps only some of them: choose TorchDDPPlugin "
            "(plugin=ddp) or another optimizer"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = dict.fromkeys(p.device_mesh for p in held if isinstance(p, DTensor) and is_sharded(p))
    if meshes and any(kind.__name__ in BRANCHING for kind in type(optimizer).__mro__):
        return (
            f"{name} decides by the values of a whole parameter what to do, but under {where} a "
            f"rank holds a shard: {WHOLE}"
        )
    # All ranks of a mesh find the same problem, so none of them blocks the others.
    problems = [_problem_on_shards(optimizer, mesh, where) for mesh in meshes]
    return next((problem for problem in problems if problem), "")


def _steps_some(made: ParallelModel) -> bool:
    """Return whether the optimizer of a rank steps only some parameters of the model."""
    layout, own = made.layout, made.steps
    partitioned = own is not None and any(id(shard.param) not in own for shard in layout.shards)
    return partitioned or made.pipeline is not None or len(layout.shards) < len(layout.names)


def _norm_option(optimizer: Optimizer) -> str:
    """Return the hint about an option that clips the norm of the whole gradient."""
    set_ = any(group.get("max_grad_norm") for group in optimizer.param_groups)
    return " (max_grad_norm=None turns that off: clip by the booster instead)" if set_ else ""


def _problem_on_shards(optimizer: Optimizer, mesh: DeviceMesh, where: str) -> str:
    name = type(optimizer).__name__
    try:
        off = error_on_shards(optimizer, mesh)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"{name} cannot step the parameters that {where} shards over ranks ({first}): {WHOLE}"
        )
    if off <= (MUON_TOLERANCE if _is_muon(optimizer) else TOLERANCE):
        return ""
    return (
        f"{name} takes other steps on the parameters that {where} shards over ranks than on "
        f"whole ones (off by {off:.1g} in a trial): {WHOLE}"
    )
