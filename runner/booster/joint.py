"""Train several modules by one optimizer step: models, and a criterion with parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from runner.booster.plugin import ParallelModel, Plugin
from runner.clip import Layout
from runner.config.plugin_section import SCHEDULES
from runner.parallel.final_gradients import Final
from runner.parallel.gradient_sync import Replicas, average, broadcast_model, in_turn

CRITERION = "criterion."
"""Prefix of the names of a criterion's parameters."""

Given = Mapping[str, Mapping[str, nn.Parameter]]
"""The parameters of each module before it was distributed, by prefix and name."""


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
        if shared and len(shared) < len(trained):
            raise ValueError(
                f"{shared[0]} is also a parameter of the criterion, which has others of its own: "
                "keep the model out of the criterion"
            )
        if trained and not shared:
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

    def sync_grads() -> None:
        # Ranks that read the same samples have equal gradients, of which one counts.
        for parameter in () if plugin.reports_metrics else replicas.parameters:
            parameter.grad = None
        average(replicas)

    return replace(whole, sync_grads=sync_grads)


def together(parallel: Mapping[str, ParallelModel]) -> ParallelModel:
    """Return the distributed modules as one, which one optimizer step trains."""
    every = list(parallel.values())
    steps = None
    if any(made.steps is not None for made in every):
        steps = frozenset(
            id(shard.param)
            for made in every
            for shard in made.layout.shards
            if made.steps is None or id(shard.param) in made.steps
        )
    # The gradients of a criterion are final after the backward pass.
    calls = [made.watch_final for prefix, made in parallel.items() if prefix != CRITERION]
    known = [call for call in calls if call is not None]

    def watch(final: Final) -> None:
        for call in known:
            call(final)

    return ParallelModel(
        every[0].module,
        Layout.union({prefix: made.layout for prefix, made in parallel.items()}),
        in_turn(*(made.sync_grads for made in every)),
        in_turn(*(made.broadcast_params for made in every)),
        steps,
        watch_final=watch if len(known) == len(calls) else None,
    )


def names_of(parameters: Iterable[Tensor], given: Given) -> set[str]:
    wanted = set(map(id, parameters))
    return {
        prefix + name
        for prefix, named in given.items()
        for name, parameter in named.items()
        if id(parameter) in wanted
    }


def rebind(
    optimizers: Sequence[Optimizer],
    given: Given,
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
