"""The plugin's side: a run's own training loop, looked at where its gradients are final."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.booster import Plugin
from runner.clip import ClipMode, Decision, GradStats, Layout, ParamShard
from runner.config.duration import Duration
from runner.config.schema import RunConfig
from runner.parallel.full_state_dict import gathered
from runner.telemetry.sinks.sink import Sink
from runner.train import build
from runner.train.trainer import Trainer
from runner.verify import naive
from runner.verify.comparison import Naive, SideMetrics
from runner.verify.setting import Collate, dtype_of, make_model, make_optimizer

T = TypeVar("T")

Seen = Callable[[list[SideMetrics], dict[str, Tensor], list[Naive | None]], None]
"""Takes, in each step on the first rank: the figures of all ranks, the clipped gradients of the
whole model, and what clipping by hand would have seen on each rank."""


class Watched(ClipMode):
    """A clipping mode that is looked at before and after it clips.

    Args:
        mode: what clips; bound already.
        trainer: whose gradients they are.
        seen: called on the first rank.
    """

    def __init__(self, mode: ClipMode, trainer: Trainer, seen: Seen) -> None:
        super().__init__(mode.threshold, mode.norm_type, mode.exclude, mode.eps)
        self._mode = mode
        self._trainer = trainer
        self._seen = seen

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide as the mode does."""
        return self._mode.decide_finite(layout, stats)

    def clip(self, layout: Layout, stats: GradStats | None = None) -> Decision:
        """Clip as the mode does; every rank takes part in looking."""
        by_hand = naive.rank_local(layout, self.norm_type)
        decision = self._mode.clip(layout, stats)
        trainer = self._trainer
        gradients = gathered(trainer.model.unwrap(), trainer.model.renamed, lambda p: p.grad)
        ranks = from_all((SideMetrics.of(decision), by_hand))
        if trainer.plugin.rank == 0:
            self._seen([rank[0] for rank in ranks], gradients, [rank[1] for rank in ranks])
        return decision


def make_trainer(config: RunConfig, plugin: Plugin, mode: ClipMode, *sinks: Sink) -> Trainer:
    """What trains ``verify.steps`` steps under ``plugin``, in ``verify.dtype`` by plain SGD.

    Args:
        config: of the request.
        plugin: how the model is spread.
        mode: of clipping; made for this side alone.
        sinks: where rows go; none but on the first rank.
    """
    device = build.device_of(config.device)
    model, _ = make_model(config, device)
    loader = plugin.prepare_dataloader(
        build.make_data(config.data).train,
        batch_size=config.data.batch_size,
        shuffle=True,
        drop_last=config.data.drop_last,
        seed=config.seed,
        collate_fn=Collate(dtype_of(config)),
    )
    return Trainer(
        model,
        loader,
        Duration(config.verify.steps, "ba"),
        algorithms=mode,
        optimizers=make_optimizer(config, model),
        plugin=plugin,
        accumulation_steps=config.accumulation.steps,
        nonfinite="error",
        sinks=sinks,
    )


def from_all(mine: T) -> list[T]:
    """What each rank has; every rank has to call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def from_first(mine: T) -> T:
    """What the first rank has; every rank has to call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    sent = [mine]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


def drifted(layout: Layout) -> list[str]:
    """Parameters of which several ranks hold the same part, but not the same bits.

    Every rank has to call it. One digest of each part travels.
    """
    here = {(shard.name, *_part(shard)): _digest(shard.weight) for shard in layout.shards}
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, None] = {}
    for ranks in from_all(here):
        for part, digest in ranks.items():
            if first.setdefault(part, digest) != digest:
                found[part[0]] = None
    return list(found)


def placements(layout: Layout) -> dict[str, str]:
    """Where each parameter of the whole model lies, in words; every rank has to call it."""
    here = {shard.name: _placed(shard) for shard in layout.shards}
    found: dict[str, str] = {}
    for ranks in from_all(here):
        found = ranks | found
    return found


def _part(shard: ParamShard) -> tuple[Any, ...]:
    """Which part of its parameter a rank holds: its place along the axes that split it."""
    if not isinstance(shard.param, DTensor):
        return ()
    mesh = shard.param.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    placed = zip(names, shard.param.placements, strict=True)
    return tuple(
        (name, mesh.get_local_rank(axis))
        for axis, (name, placement) in enumerate(placed)
        if not placement.is_replicate()
    )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _placed(shard: ParamShard) -> str:
    if not isinstance(shard.param, DTensor):
        return "whole" if shard.num_replicas == 1 else f"whole on {shard.num_replicas} ranks"
    mesh = shard.param.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return ", ".join(
        f"{name} ({mesh.size(axis)}): {placement}"
        for axis, (name, placement) in enumerate(zip(names, shard.param.placements, strict=True))
    )
