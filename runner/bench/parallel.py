"""Clipping of gradients that are split over ranks, against torch's own on DTensors.

torch raises an error where a model mixes DTensors with plain tensors (tensor parallelism) or has
DTensors on different meshes (tensor and data parallelism). It is measured on stand-ins then: the
same local shards as DTensors that all lie on the largest mesh of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from runner.bench.pairs import clocked, interleave
from runner.bench.ranks import on_ranks, slowest
from runner.bench.subjects import SCALE, Small, gpt
from runner.bench.table import Row, Setting, compared
from runner.booster import Booster, HybridParallelPlugin, TensorParallelPlugin, TorchFSDPPlugin
from runner.clip import Layout, build, total_norm

TITLE = (
    "clipping by the norm over ranks (gloo, one thread each)\n"
    "1.00 is torch.nn.utils.clip_grad_norm_(foreach=True) on DTensors of the same shards"
)

PLUGINS: dict[str, Callable[[], Any]] = {
    "fsdp": TorchFSDPPlugin,
    "tensor": partial(TensorParallelPlugin, None),
    "2-D mesh": partial(HybridParallelPlugin, tp_size=2, dp_size=2, zero_stage=2),
}
Make = Callable[[], nn.Module]


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; ranks of one number are started once."""
    model: Make = partial(gpt, 2, 64, heads=4) if setting.quick else partial(gpt, heads=4)
    small: Make = partial(Small, 100 if setting.quick else 2_000)
    on_four = [*((name, model) for name in PLUGINS), ("fsdp", small)]
    yield from on_ranks(partial(_each, on_four), 4, setting)
    for number in () if setting.quick else (2, 8):
        yield from on_ranks(partial(_each, on_four[:1]), number, setting)


def _each(asked: Sequence[tuple[str, Make]], setting: Setting) -> list[Row]:
    return [row for name, make in asked for row in _rows(name, make, setting)]


def _rows(name: str, make: Make, setting: Setting) -> list[Row]:
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

    works = {"torch": torchs, "binding": ours(0.5), "not binding": ours(2.0)}
    sides = {side: slowest(partial(clocked, work), restore) for side, work in works.items()}
    times = interleave(sides, setting.pairs())
    limit = None if isinstance(model, Small) else 0.30
    size = f"{sum(sizes) / 1e6:.1f}M" if sum(sizes) > 1e5 else f"{sum(sizes) / 1e3:.0f}k"
    what = f"{name}, {len(sizes)} tensors, {size}, {plugin.world_size} ranks"
    return [
        compared(f"{what}, {binds}", times, binds, "torch", limit)
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
