"""Clipping of gradients that are split over ranks, against torch's own.

torch clips DTensors of one mesh, as under fsdp. Where a model mixes them with plain tensors (tensor
parallelism) or has several meshes, it raises an error: there it clips each rank's shards as plain
tensors, by a norm of that rank alone, without communication.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.bench.clip import SCALE, gpt
from runner.bench.timing import Row, Setting, Side, clocked, compared, interleave
from runner.booster import Booster, HybridParallelPlugin, TensorParallelPlugin, TorchFSDPPlugin
from runner.clip import build
from runner.gradients import Layout, total_norm
from runner.launch.train import train

PLUGINS: dict[str, Callable[[], Any]] = {
    "fsdp": TorchFSDPPlugin,
    "tensor": TensorParallelPlugin,
    "2-D mesh": lambda: HybridParallelPlugin(tp_size=2, dp_size=2, zero_stage=2),
}


def on_ranks(measure: Callable[[Setting], list[Row]], number: int, setting: Setting) -> list[Row]:
    """Run ``measure`` on ``number`` local ranks, joined by gloo; return the rows of the first."""
    words = ["plugin=ddp", f"plugin.nproc={number}", "tracker=none", "device=cpu"]
    folder = setting.folder / f"ranks-{secrets.token_hex(3)}"
    folder.mkdir()
    # A partial object, which unlike a closure can be sent to other processes.
    ended = train(setting.config_of(words), folder, [], partial(_work, measure, setting))
    return ended["rows"]  # type: ignore[no-any-return]


def _work(measure: Callable[[Setting], list[Row]], setting: Setting, *_: Any) -> dict[str, Any]:
    # torch warns that its own clipping on a 2-D mesh is slow, and why.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return {"rows": measure(setting)}


def slowest(side: Side, prepare: Callable[[], object] = lambda: None) -> Side:
    """Return a side that all ranks begin at once, with the seconds of the slowest rank."""

    def timed() -> float:
        prepare()
        dist.barrier()
        seconds = torch.tensor(side(), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    return timed


def rows(setting: Setting) -> Iterator[Row]:
    """Clipping by the norm over ranks (gloo, one thread each).

    1.00 is clip_grad_norm_(foreach=True): of DTensors under fsdp, else of each rank's shards alone
    """
    yield from on_ranks(_of_all_plugins, 4, setting)
    if not setting.quick:
        yield from on_ranks(_of_fsdp, 2, setting)


def _of_all_plugins(setting: Setting) -> list[Row]:
    torch.manual_seed(0)
    return [row for name in PLUGINS for row in _rows(name, _model(setting), setting)]


def _of_fsdp(setting: Setting) -> list[Row]:
    torch.manual_seed(0)
    return _rows("fsdp", _model(setting), setting)


def _model(setting: Setting) -> nn.Module:
    return gpt(2, 64, heads=4) if setting.quick else gpt(heads=4)


def _clocked(work: Callable[[], object]) -> Side:
    return lambda: clocked(work)


def _rows(name: str, model: nn.Module, setting: Setting) -> list[Row]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    plugin = PLUGINS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, wrapped, *_ = Booster(plugin=plugin).boost(model, optimizer)
    layout: Layout = wrapped.layout
    theirs = []
    for shard in layout.shards:
        parameter = shard.param
        gradient = torch.randn_like(shard.weight).mul_(SCALE)
        plain = nn.Parameter(shard.weight)
        plain.grad = gradient
        if isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = gradient
        theirs.append(parameter if name == "fsdp" else plain)
    _, gradients = layout.gradients()
    saved = [gradient.clone() for gradient in gradients]
    norm = float(total_norm(layout))

    def restore() -> None:
        torch._foreach_copy_(gradients, saved)

    def ours(factor: float) -> Callable[[], object]:
        mode = build("norm", threshold=factor * norm)
        mode.bind(layout)
        return torch.no_grad()(lambda: mode.clip(layout))

    def torchs() -> Tensor:
        return nn.utils.clip_grad_norm_(theirs, 0.5 * norm, foreach=True)

    works = {"torch": torchs, "binding": ours(0.5), "not binding": ours(2.0)}
    sides = {side: slowest(_clocked(work), restore) for side, work in works.items()}
    times = interleave(sides, setting.pairs())
    limit = 0.30 if name == "fsdp" else None
    size = f"{sum(sizes) / 1e6:.1f}M" if sum(sizes) > 1e5 else f"{sum(sizes) / 1e3:.0f}k"
    what = f"{name}, {len(sizes)} tensors, {size}, {plugin.world_size} ranks"
    return [
        compared(f"{what}, {binds}", times, binds, "torch", limit)
        for binds in ("binding", "not binding")
    ]
