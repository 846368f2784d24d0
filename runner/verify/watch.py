"""The plugin's side: the training loop of a run, with a hook before and after clipping."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer
from torch.utils.data import Dataset

from runner.booster import Plugin
from runner.booster.joint import CRITERION
from runner.clip import ClipMode, Decision, GradStats, Layout, ParamShard
from runner.config.duration import Duration
from runner.config.schema import RunConfig
from runner.parallel.full_state_dict import gathered
from runner.telemetry.sinks.sink import Sink
from runner.train.trainer import Trainer
from runner.verify import naive
from runner.verify.comparison import Naive, SideMetrics
from runner.verify.setting import collate, dtype_of, make_criterion, make_model, make_optimizer

T = TypeVar("T")

Seen = Callable[[list[SideMetrics], dict[str, Tensor], list[Naive | None]], None]
"""Called in each step on the first rank with the metrics of all ranks, the clipped gradients of the
whole model, and the naive norm of each rank."""


class Watched(ClipMode):
    """A clipping mode that reports its metrics and the clipped gradients."""

    def __init__(self, mode: ClipMode, trainer: Trainer, seen: Seen) -> None:
        super().__init__(mode.threshold, mode.norm_type)
        self.info = mode.info  # type: ignore[misc]
        self._mode = mode
        self._trainer = trainer
        self._seen = seen

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Bind the mode."""
        self._mode.bind_optimizers(optimizers, layout)

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Prepare as the mode does."""
        self._mode.before_step(layout, decision)

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Limit the update as the mode does."""
        return self._mode.after_step(layout, decision)

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure as the mode does."""
        return self._mode.measure(layout, each)

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide as the mode does."""
        return self._mode.decide_finite(layout, stats)

    def clip(self, layout: Layout, stats: GradStats | None = None) -> Decision:
        """Clip, and gather what is reported; a collective."""
        by_hand = naive.rank_local(layout, self.norm_type)
        decision = self._mode.clip(layout, stats)
        trainer = self._trainer
        gradients = whole(trainer, lambda p: p.grad)
        if self.info.needs_optimizer:
            # With ZeRO stage 1 a mode may change a gradient on the rank alone that steps it.
            for own in from_all(_stepped_here(trainer)):
                gradients |= {name: own[name] for name in own.keys() & gradients.keys()}
        ranks = from_all((SideMetrics.of(decision), by_hand))
        if trainer.plugin.rank == 0:
            self._seen([rank[0] for rank in ranks], gradients, [rank[1] for rank in ranks])
        return decision


def make_trainer(
    config: RunConfig,
    plugin: Plugin,
    data: Dataset[Any],
    mode: ClipMode,
    *sinks: Sink,
) -> Trainer:
    """Make a trainer of ``verify.steps`` steps under ``plugin``, in ``verify.dtype`` by plain
    SGD.
    """
    model, _ = make_model(config)
    criterion = make_criterion(config)
    loader = plugin.prepare_dataloader(
        data,
        batch_size=config.data.batch_size,
        shuffle=True,
        drop_last=config.data.drop_last,
        seed=config.seed,
        collate_fn=partial(collate, dtype=dtype_of(config)),
    )
    return Trainer(
        model,
        loader,
        Duration(config.verify.steps, "ba"),
        algorithms=mode,
        optimizers=make_optimizer(config, model, criterion, mode),
        criterion=criterion,
        plugin=plugin,
        accumulation_steps=config.accumulation.steps,
        nonfinite="error",
        sinks=sinks,
    )


def _stepped_here(trainer: Trainer) -> dict[str, Tensor]:
    """Return the gradients of whole parameters that this rank steps, if others step the rest."""
    stepped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    shards = trainer.optimizer.layout.shards
    if all(id(shard.param) in stepped for shard in shards):
        return {}
    return {
        shard.name: shard.param.grad.detach().cpu()
        for shard in shards
        if id(shard.param) in stepped
        and shard.param.grad is not None
        and not isinstance(shard.param, DTensor)
    }


def whole(
    trainer: Trainer, value: Callable[[nn.Parameter], Tensor | None] | None = None
) -> dict[str, Tensor]:
    """Return a value of each parameter of the model and the criterion; see :func:`gathered`."""
    model, criterion = trainer.model, trainer.criterion
    found = gathered(model.unwrap(), model.renamed, value)
    if isinstance(criterion, nn.Module):
        own = gathered(criterion, {}, value)
        found |= {CRITERION + name: tensor for name, tensor in own.items()}
    return found


def from_all(mine: T) -> list[T]:
    """Return the values of all ranks; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def drifted(layout: Layout) -> list[str]:
    """Return the names of parameters whose replicas differ; a collective of one digest a shard."""
    here = {(shard.name, *_part(shard)): _digest(shard.weight) for shard in layout.shards}
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, None] = {}
    for ranks in from_all(here):
        for part, digest in ranks.items():
            if first.setdefault(part, digest) != digest:
                found[part[0]] = None
    return list(found)


def placements(layout: Layout) -> dict[str, str]:
    """Describe how each parameter of the whole model is distributed; a collective."""
    here = {shard.name: _placed(shard) for shard in layout.shards}
    found: dict[str, str] = {}
    for ranks in from_all(here):
        found = ranks | found
    return found


def _part(shard: ParamShard) -> tuple[Any, ...]:
    """Return which part of its parameter a rank holds: its index along each sharded mesh axis."""
    if not isinstance(shard.param, DTensor):
        return ()
    mesh = shard.param.device_mesh
    return tuple(
        (name, mesh.get_local_rank(axis))
        for axis, (name, placement) in enumerate(_axes(shard.param))
        if not placement.is_replicate()
    )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _placed(shard: ParamShard) -> str:
    if not isinstance(shard.param, DTensor):
        return "whole" if shard.num_replicas == 1 else f"whole on {shard.num_replicas} ranks"
    mesh = shard.param.device_mesh
    return ", ".join(
        f"{name} ({mesh.size(axis)}): {placement}"
        for axis, (name, placement) in enumerate(_axes(shard.param))
    )


def _axes(param: DTensor) -> list[tuple[str, Placement]]:
    """Return the name and the placement of each mesh axis of a parameter."""
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return list(zip(names, param.placements, strict=True))
