"""Check that the ranks of a run fit its plugin, its model and this machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from runner.booster.plugin import SCHEDULES, MeshSizes, SizeError
from runner.config.environment import (
    StartedRank,
    in_slurm_step,
    started_nodes,
    started_rank,
    variable,
)
from runner.config.notation import plural
from runner.config.plugin_section import PluginSection
from runner.config.problem import Problem
from runner.train import build


def unfit_size(plugin: PluginSection, ranks: int) -> Problem | None:
    """Return what is wrong with the sizes of the plugin for the ranks of a run."""
    started = started_rank()
    if started is not None:
        problem = _unfit_for_started(plugin, started)
        if problem is not None:
            return problem
    try:
        sizes = build.mesh_of(plugin, ranks)
    except SizeError as error:
        return _refused_size(plugin, ranks, error)
    return _unfit_for_machines(plugin, ranks, sizes, started)


def _unfit_for_started(plugin: PluginSection, started: StartedRank) -> Problem | None:
    """Return why a run cannot use the ranks that torchrun or srun started."""
    ranks = started.world_size
    nproc = plugin.nproc
    starter = "srun" if in_slurm_step() else "torchrun"
    if plugin.name == "single" and ranks > 1:
        text = f"trains on one rank, and {starter} started {ranks}: plugin=ddp trains on all"
        if starter == "srun":
            text += "; separate runs: srun env -u SLURM_PROCID python -m runner"
        return Problem("plugin", "single", text)
    local_ranks = variable("LOCAL_WORLD_SIZE")
    if nproc is None or nproc == local_ranks or (local_ranks is None and ranks % nproc == 0):
        return None
    count = plural(ranks, "rank")
    if local_ranks is not None:
        count = f"{plural(local_ranks, 'rank')} on each machine"
    return Problem("plugin.nproc", nproc, f"{starter} started {count}: leave it out")


def _refused_size(plugin: PluginSection, ranks: int, error: SizeError) -> Problem:
    """Return the problem of sizes that do not fit the ranks, at the key that can be changed."""
    key = error.key
    if key == "nproc" and started_rank() is not None:  # the launcher has chosen it
        sizes = ("tp_size", "pp_size", "dp_size")
        typed = [name for name in sizes if (getattr(plugin, name) or 1) > 1]
        if not typed:
            return Problem("plugin", plugin.name, str(error))
        key = typed[0]
    elif key == "nproc" and plugin.nproc is None and (plugin.nnodes or 1) > 1:
        key = "nnodes"
    return Problem(f"plugin.{key}", getattr(plugin, key) or ranks, str(error))


def _unfit_for_machines(
    plugin: PluginSection, ranks: int, sizes: MeshSizes, started: StartedRank | None
) -> Problem | None:
    """Return why the ranks cannot be spread over the machines of this run."""
    nodes = plugin.nnodes or 1
    local_ranks = ranks // nodes
    if started is not None:
        nodes = started_nodes() or nodes
        local_ranks = started.local_world_size
    if plugin.nnodes not in (None, nodes):
        text = f"{plural(nodes, 'machine')} started ranks: leave it out"
        return Problem("plugin.nnodes", plugin.nnodes, text)
    if nodes > 1 and local_ranks % sizes.tp:
        text = (
            f"{sizes.tp} do not divide the {local_ranks} ranks of a machine (plugin.nnodes={nodes})"
        )
        return Problem("plugin.tp_size", plugin.tp_size, text)
    return None


def too_many(plugin: PluginSection, ranks: int, uses_gpus: bool) -> Problem | None:
    """Return the problem of more local ranks than there are GPUs, or than cores can share."""
    if started_rank() is not None:
        return None
    gpus = torch.cuda.device_count() if uses_gpus else None
    return plugin.too_many_ranks(ranks, gpus)


def unfit_model(
    plugin: PluginSection, ranks: int, model: nn.Module, batch: int, tokens: int | None
) -> Iterator[Problem]:
    """Yield why a plugin, whose sizes fit the ranks, cannot split this model or its batches.

    Args:
        plugin: the section of the plugin.
        ranks: the world size.
        model: the whole model.
        batch: samples in a microbatch of one data-parallel rank.
        tokens: length of the sequences in the data; None if it has none.
    """
    kind, options = build.plugin_of(plugin)
    for key, value, message in kind.problems(model, ranks, options):
        yield Problem(f"plugin.{key}", value, message)
    sizes = build.mesh_of(plugin, ranks)
    if plugin.sequence_parallel and (sizes.tp == 1 or (tokens or 0) % sizes.tp):
        message = "splits over plugin.tp_size ranks, which must be 2 or more"
        if sizes.tp > 1:
            message = f"cannot split sequences of {tokens} evenly over {sizes.tp} ranks"
        yield Problem("plugin.sequence_parallel", True, message)
    if sizes.pp > 1:
        stages = sizes.pp * SCHEDULES[plugin.schedule].stages_per_rank
        parts = plugin.num_microbatches or stages
        if batch < parts:
            message = f"must be {parts} or more: plugin.num_microbatches"
            yield Problem("data.batch_size", batch, message)
