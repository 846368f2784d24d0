"""What a rank receives to agree with all others, by torch's fake process group.

A fake group has any number of ranks and sends nothing: all other ranks count as having nothing to
add, or what this rank has. A real group has as many collectives of the same sizes, and other
values. Gradients and weights themselves are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from runner.bench.timing import Row, Setting, row
from runner.clip import build
from runner.clip.second_moment import OptimizerMode
from runner.gradients import Layout
from runner.gradients.account import Described, described_once
from runner.gradients.shard import Whole
from runner.parallel.collectives import on_any_rank
from runner.telemetry.gauges import Gauges

WIDTH = 8  # elements of a row of a matrix
STAGES = 8  # ranks that hold different layers, under zero 1, pipeline and moe
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "norm": ("norm", {"threshold": 1.0}),
    "norm, p = inf": ("norm", {"threshold": 1.0, "norm_type": float("inf")}),
    "value": ("value", {"threshold": 0.1}),
    "adaptive": ("adaptive", {"threshold": 0.02}),
    "percentile": ("percentile", {"threshold": 10.0}),
    "zscore": ("zscore", {"threshold": 2.5}),
    "per_parameter": ("per_parameter", {"threshold": 1.0}),
    "per_parameter, p = inf": ("per_parameter", {"threshold": 1.0, "norm_type": float("inf")}),
    "adagc": ("adagc", {"threshold": 1.05}),
    "chain of adagc and norm": ("chain", {"links": [{"mode": "adagc", "threshold": 1.05}, 1.0]}),
    "groups of value and norm": (
        "groups",
        {"groups": {"*.weight": {"mode": "value", "threshold": 0.1}, "*": 1.0}},
    ),
    "schedule of value": ("schedule", {"threshold": 0.1, "of": "value"}),
    "update": ("update", {"threshold": 1.0}),
    "spike": ("spike", {"threshold": 4.0}),
}
MEGABYTE = 1e6


class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of this rank, and the bytes that it receives.

    An all-reduce receives its buffer twice, as by a ring; an all-gather receives the part of each
    other rank.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others = (ranks - 1) / ranks
        self.collectives = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d":
            return result
        name = func.__name__.partition(".")[0]
        self.collectives += 1
        output = args[0] if isinstance(args[0], Tensor) else args[0][0]
        received = output.numel() * output.element_size()
        if name == "allreduce_":
            received *= 2 * self._others
        elif name == "alltoall_base_":
            received *= self._others
            output.copy_(args[1])  # a fake group leaves what the memory had
        elif name != "broadcast_":
            raise NotImplementedError(f"the bytes of {name} are not known")
        self.bytes += received
        return result


@contextmanager
def fake_ranks(number: int) -> Iterator[dist.ProcessGroup]:
    """Make a fake process group of ``number`` ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=number)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def rows(setting: Setting) -> Iterator[Row]:
    """Megabytes that a rank receives in a step, and at boost, apart from gradients and weights.

    by torch's fake process group, for a model of 10,000 parameters; modes under ddp send nothing
    """
    parameters = 200 if setting.quick else 10_000
    for ranks in (8, 64) if setting.quick else (8, 64, 1024, 16_384):
        # The limits hold for 1,024 ranks.
        yield from of_ranks(ranks, parameters, limits=ranks == 1024)


def of_ranks(ranks: int, parameters: int, limits: bool = False) -> Iterator[Row]:
    """Yield the rows of a number of ranks: at boost, and a step of each plugin and mode."""

    def measured(what: str, work: Callable[[], object], limit: float) -> Row:
        received = Received(ranks)
        with received:
            work()
        text = f"{ranks} ranks, {what}, {received.collectives} collectives"
        return row(text, [received.bytes / MEGABYTE], limit if limits else None, "MB")

    with fake_ranks(ranks) as group:
        mesh = init_device_mesh("cpu", (ranks,))
        # Layouts as plugins hand them to modes. zero 2 and 3 have the layout of fsdp, pipeline and
        # moe the layout of zero1.
        models = {
            "fsdp": sharded_model(parameters // 2, mesh, 0),
            "tensor": sharded_model(parameters // 2, mesh, 1),
            "zero1": sharded_model(parameters // 2 // STAGES, None, 0),
        }
        layouts: dict[str, Layout] = {}
        for plugin in ("fsdp", "tensor"):
            model = models[plugin]
            # A fake group adds nothing: a sum over all ranks is what this rank has.
            sizes = {name: _local_size(parameter) for name, parameter in model.named_parameters()}

            def boost(name: str = plugin, sizes: dict[str, int] = sizes) -> None:
                layouts[name] = Layout.of_sharded(models[name], group, sizes)

            yield measured(f"boost, {plugin}", boost, 50.0)
        described = Described(layouts["fsdp"].shards)
        whole = dict.fromkeys(described.table, 0)
        cpu = torch.device("cpu")
        yield measured(
            "boost, ranks with other names",
            lambda: described_once(described, group, whole, cpu),
            50.0,
        )
        layouts["zero1"] = _stage(models["zero1"], group, described.table)
        for plugin, layout in layouts.items():
            for name, (mode, options) in MODES.items():
                step = _step(layout, models[plugin], mode, options)
                yield measured(f"{plugin}, {name}", step, 1.0)
        gauges = Gauges(layouts["fsdp"], 2.0, per_layer=True, updates=True)
        values = torch.zeros(3 * parameters, dtype=torch.float64)
        yield measured("rows by layer", lambda: gauges.over_ranks([values]), 1.0)
        flags = [True] * parameters
        yield measured("parameters in use", lambda: on_any_rank(flags, group), 1.0)


def sharded_model(layers: int, mesh: DeviceMesh | None, dim: int) -> nn.Module:
    """Return linear layers of which this rank has one row, or one column; whole without a mesh."""
    model = nn.Sequential()
    for _ in range(layers):
        layer = nn.Linear(WIDTH, 1) if dim == 0 else nn.Linear(1, WIDTH)
        for name, parameter in list(layer.named_parameters()):
            along = dim if parameter.ndim > 1 else 0
            parameter.requires_grad_(False)
            parameter.grad = torch.full_like(parameter, 0.01)
            if mesh is not None:
                placements = [Shard(along)]
                sharded = DTensor.from_local(parameter.data, mesh, placements, run_check=False)
                gradient = DTensor.from_local(parameter.grad, mesh, placements, run_check=False)
                parameter = nn.Parameter(sharded)
                parameter.grad = gradient
                setattr(layer, name, parameter)
            parameter.requires_grad_(True)
        model.append(layer)
    return model


def _local_size(parameter: Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _stage(model: nn.Module, group: dist.ProcessGroup, table: dict[str, Whole]) -> Layout:
    """Return the layout of whole layers, of which other ranks hold others."""
    return Layout(Layout.of_model(model).shards, group, parameters=table)


def _step(
    layout: Layout, model: nn.Module, name: str, options: dict[str, Any]
) -> Callable[[], object]:
    """Return a step of a mode that is bound."""
    mode = build(name, **options)
    if isinstance(mode, OptimizerMode):
        mode.bind_optimizers([torch.optim.AdamW(model.parameters())], layout)
    mode.bind(layout)
    return lambda: mode.clip(layout)
