"""Clipping of gradients that are split over ranks, against torch's own on DTensors.

torch raises an error where a model mixes DTensors with plain tensors (tensor parallelism) or has
DTensors on different meshes (tensor and data parallelism). It is measured on stand-ins then: the
same local shards as DTensors that all lie on the largest mesh of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from runner.bench.pairs import interleave, milliseconds, ratio
from runner.bench.ranks import on_ranks, together
from runner.bench.subjects import SCALE, Small
from runner.bench.table import Row, Setting
from runner.booster import (
    Booster,
    HybridParallelPlugin,
    Plugin,
    TensorParallelPlugin,
    TorchFSDPPlugin,
)
from runner.clip import Layout, build, total_norm

TITLE = (
    "clipping by the norm over ranks (gloo, one thread each)\n"
    "1.00 is torch.nn.utils.clip_grad_norm_(foreach=True) on DTensors of the same shards"
)

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "fsdp": TorchFSDPPlugin,
    "tensor": partial(TensorParallelPlugin, None),
    "2-D mesh": partial(HybridParallelPlugin, tp_size=2, dp_size=2, zero_stage=2),
}
CURVE = (500, 1_000, 2_000)
"""Numbers of small tensors."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; ranks of one number are started once."""
    yield from on_ranks(_on_four, 4, setting)
    for number in () if setting.quick else (2, 8):
        yield from on_ranks(_on_any, number, setting)


class Transformer(nn.Module):
    """Parameters of a transformer: 149 tensors, 21.7 million elements; it computes nothing."""

    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "embed": "embedding_rowwise",
        "head": "colwise_rep",
    }

    def __init__(self, layers: int = 12, width: int = 384) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)


class Block(nn.Module):
    """Parameters of one block: twelve tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def _on_four(setting: Setting) -> list[Row]:
    model = partial(Transformer, 2, 64) if setting.quick else Transformer
    found = [row for name in PLUGINS for row in _rows(name, model, setting)]
    for number in (100,) if setting.quick else CURVE:
        found += _rows("fsdp", partial(Small, number), setting)
    return found


def _on_any(setting: Setting) -> list[Row]:
    return _rows("fsdp", Transformer, setting)


def _rows(name: str, make: Callable[[], nn.Module], setting: Setting) -> list[Row]:
    """Measure a threshold that binds, and one that does not, under one plugin."""
    torch.manual_seed(0)
    model = make()
    sizes = [parameter.numel() for parameter in model.parameters()]
    plugin = PLUGINS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, wrapped, *_ = Booster(plugin=plugin).boost(model, optimizer)
    layout: Layout = wrapped.layout
    stand_ins = _with_gradients(layout)
    gradients = [g for shard in layout.shards if (g := shard.gradient) is not None]
    saved = [gradient.clone() for gradient in gradients]
    norm = float(total_norm(layout))

    def restore() -> None:
        torch._foreach_copy_(gradients, saved)

    def ours(factor: float) -> Callable[[], object]:
        mode = build("norm", threshold=factor * norm)
        mode.bind(layout)
        return torch.no_grad()(lambda: mode.clip(layout))

    def torchs() -> Tensor:
        return nn.utils.clip_grad_norm_(stand_ins, 0.5 * norm, foreach=True)

    sides = {
        "torch": together(torchs, restore),
        "binding": together(ours(0.5), restore),
        "not binding": together(ours(2.0), restore),
    }
    times = interleave(sides, setting.pairs())
    medians = milliseconds(times)
    limit = 0.30 if isinstance(model, Transformer) else None
    size = f"{sum(sizes) / 1e6:.1f}M" if sum(sizes) > 1e5 else f"{sum(sizes) / 1e3:.0f}k"
    what = f"{name}, {len(sizes)} tensors, {size}, {plugin.world_size} ranks"
    return [
        Row(
            f"{what}, {binds}",
            ratio(times[binds], times["torch"]),
            limit,
            ms={"torch": medians["torch"], "ours": medians[binds]},
        )
        for binds in ("binding", "not binding")
    ]


def _with_gradients(layout: Layout) -> list[Tensor]:
    """Give every shard a random gradient; return stand-ins on one mesh with the same gradients."""
    sharded = [shard.param for shard in layout.shards if isinstance(shard.param, DTensor)]
    mesh = max((each.device_mesh for each in sharded), key=lambda mesh: mesh.ndim)
    found: list[Tensor] = []
    for shard in layout.shards:
        local = torch.randn_like(shard.weight).mul_(SCALE)
        parameter = shard.param
        places: Sequence[Placement] = [Replicate()] * mesh.ndim
        if isinstance(parameter, DTensor):
            on, own = parameter.device_mesh, parameter.placements
            parameter.grad = _distributed(local, on, own, parameter)
            places = _on_mesh(mesh, on, own)
        else:
            parameter.grad = local
        stand_in = nn.Parameter(_distributed(shard.weight, mesh, places, parameter))
        stand_in.grad = _distributed(local, mesh, places, parameter)
        found.append(stand_in)
    return found


def _distributed(local: Tensor, mesh: DeviceMesh, places: Any, like: Tensor) -> DTensor:
    return DTensor.from_local(
        local, mesh, places, run_check=False, shape=like.shape, stride=like.stride()
    )


def _on_mesh(mesh: DeviceMesh, of: DeviceMesh, places: Any) -> list[Placement]:
    """Return placements on ``mesh`` of a tensor that lies on a part ``of`` it, by axis name."""
    known = dict(zip(of.mesh_dim_names or (), places, strict=False))
    return [known.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]
