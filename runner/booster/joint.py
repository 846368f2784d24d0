"""Train a model and the parameters of its criterion by one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from runner.booster.plugin import ParallelModel, Plugin
from runner.clip import Layout
from runner.config.plugin_section import SCHEDULES
from runner.parallel.gradient_sync import Replicas, average, broadcast_model, in_turn

CRITERION = "criterion."
"""Prefix of the names of a criterion's parameters."""

Given = Mapping[str, Mapping[str, nn.Parameter]]
"""The parameters of each module before it was distributed, by prefix and name."""


def trained_together(model: nn.Module, criterion: Any) -> dict[str, nn.Module]:
    """Return the model, and a criterion with parameters, by the prefix of their names."""
    parts = {"": model}
    if isinstance(criterion, nn.Module):
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = [p for p in criterion.parameters() if p.requires_grad]
        shared = [names[parameter] for parameter in trained if parameter in names]
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


def together(model: ParallelModel, criterion: ParallelModel | None) -> ParallelModel:
    """Return both as one, which one optimizer step trains."""
    if criterion is None:
        return model
    own = frozenset(id(shard.param) for shard in criterion.layout.shards)
    # The gradients of a criterion are final after the backward pass.
    return replace(
        model,
        layout=Layout.union({"": model.layout, CRITERION: criterion.layout}),
        sync_grads=in_turn(model.sync_grads, criterion.sync_grads),
        steps=None if model.steps is None else model.steps | own,
    )


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
