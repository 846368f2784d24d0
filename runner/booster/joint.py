"""Train several modules by one optimizer step: models, and a criterion with parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from runner.booster.plugin import ParallelModel, Plugin
from runner.clip import Layout
from runner.config.plugin_section import SCHEDULES
from runner.parallel.gradient_sync import Replicas, average, broadcast_model

CRITERION = "criterion."
"""Prefix of the names of a criterion's parameters."""


def named(models: Sequence[nn.Module], criterion: Any) -> dict[str, nn.Module]:
    """Return the modules that are trained together, by the prefix of their parameters' names."""
    parts = {"": models[0]} if len(models) == 1 else {f"{i}.": m for i, m in enumerate(models)}
    owner: dict[nn.Parameter, str] = {}
    for prefix, model in parts.items():
        for name, parameter in model.named_parameters():
            first = owner.setdefault(parameter, prefix + name)
            if first != prefix + name:
                raise ValueError(
                    f"{first} and {prefix}{name} are one parameter of two models: boost one module "
                    "that holds both models"
                )
    if isinstance(criterion, nn.Module):
        trained = [p for p in criterion.parameters() if p.requires_grad]
        shared = [owner[parameter] for parameter in trained if parameter in owner]
        if len(shared) == len(trained):
            return parts
        if shared:
            raise ValueError(
                f"{shared[0]} is also a parameter of the criterion, which has others of its own: "
                "keep the model out of the criterion"
            )
        parts[CRITERION] = criterion
    return parts


def replicate(criterion: nn.Module, plugin: Plugin) -> ParallelModel:
    """Replicate a criterion on every rank, with gradients averaged over data-parallel ranks."""
    schedule = getattr(plugin, "schedule", "gpipe")
    if SCHEDULES[schedule].splits_backward and getattr(plugin, "stage_count", 1) > 1:
        raise ValueError(
            f"{schedule} takes no gradient of a criterion's parameters: choose schedule='1f1b'"
        )
    whole = ParallelModel(criterion, Layout.of_model(criterion))
    world = dist.group.WORLD
    if plugin.world_size == 1 or world is None:
        return whole
    broadcast_model(criterion, world)
    # All of them: a frozen one may be unfrozen later.
    replicas = Replicas(list(criterion.parameters()), world, plugin.data_size)
    return replace(whole, sync_grads=partial(_average, replicas, plugin))


def _average(replicas: Replicas, plugin: Plugin) -> None:
    """Average the gradients of a criterion.

    Ranks that read the same samples have equal gradients, of which one counts.
    """
    if not plugin.reports_metrics:
        for parameter in replicas.parameters:
            parameter.grad = None
    average(replicas)


def require_known(
    optimizers: Sequence[Optimizer], given: Mapping[str, Mapping[str, nn.Parameter]]
) -> None:
    """Refuse a parameter that would be neither synchronised nor clipped."""
    known = {id(parameter) for named in given.values() for parameter in named.values()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    where = f"param_groups[{number}]['params'][{place}]"
                    raise ValueError(
                        f"{where} of {type(optimizer).__name__}, of shape {list(parameter.shape)}, "
                        "is no parameter of the model or of the criterion: it would be neither "
                        "synchronised nor clipped. Give boost (or Trainer) the module that owns "
                        "it, as the criterion or in the model, or leave it out of the optimizer"
                    )


def names_of(
    parameters: Iterable[Tensor], given: Mapping[str, Mapping[str, nn.Parameter]]
) -> set[str]:
    """Return the names of parameters in the layout of all modules."""
    wanted = {id(parameter) for parameter in parameters}
    return {
        prefix + name
        for prefix, named in given.items()
        for name, parameter in named.items()
        if id(parameter) in wanted
    }


def rebind(
    optimizers: Sequence[Optimizer],
    given: Mapping[str, Mapping[str, nn.Parameter]],
    parts: Mapping[str, nn.Module],
    parallel: Mapping[str, ParallelModel],
) -> None:
    """Replace the parameters of optimizers by those that this rank steps after distribution."""
    replaced: dict[int, list[nn.Parameter]] = {}
    for prefix, made in parallel.items():
        now: dict[str, list[nn.Parameter]] = {}
        for own, parameter in parts[prefix].named_parameters():
            if made.steps is None or id(parameter) in made.steps:
                now.setdefault(made.renamed.get(own, own), []).append(parameter)
        replaced |= {id(old): now.get(name, []) for name, old in given[prefix].items()}
    if all([id(p) for p in new] == [old] for old, new in replaced.items()):
        return
    for optimizer in optimizers:
        if optimizer.state:
            raise ValueError("boost the model before the first step: the optimizer has state")
        for group in optimizer.param_groups:
            group["params"] = [new for p in group["params"] for new in replaced[id(p)]]
            kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
            if len(kinds) > 1:
                # No kernel accepts DTensors together with plain tensors (those of a criterion).
                group["fused"] = group["foreach"] = False
            elif True in kinds and not isinstance(optimizer, Adam):
                group["fused"] = None  # Only fused Adam, and AdamW, accept DTensors.
