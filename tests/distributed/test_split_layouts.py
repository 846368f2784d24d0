"""A mode is written once: gradients split over ranks by hand are clipped like whole ones.

Rows over ranks (units whole), columns over ranks (units cut), a cut vector, uneven and empty
shards, replicas, and a rank that has no gradient.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.clip import Layout, ParamShard, build
from runner.clip.units import units_of
from tests.ranks import run_ranks

SHAPES = {"rows": (5, 3), "one_row": (1, 3), "columns": (4, 5), "vector": (7,), "bias": (4,)}
THRESHOLDS = {"none": None, "norm": 0.8, "value": 0.3, "adaptive": 0.2}


def whole() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in SHAPES.items():
        made[name] = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        made[name].grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    return made


def own_part(name: str, tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    if name == "bias":
        return tensor
    return tensor.tensor_split(world, dim=1 if name == "columns" else 0)[rank].clone()


def clip_split(mode: str, norm_type: float, silent: str | None) -> tuple[Any, dict[str, Any]]:
    """Clip this rank's parts; the last rank has no gradient for ``silent``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = []
    for name, parameter in whole().items():
        part = nn.Parameter(own_part(name, parameter.detach(), rank, world))
        if name != silent or rank != world - 1:
            part.grad = own_part(name, parameter.grad, rank, world)
        cut = (dist.group.WORLD,) if name in ("columns", "vector") else ()
        num_replicas = world if name == "bias" else 1
        shards.append(ParamShard(name, part, units_of(part), num_replicas, cut))
    layout = Layout(shards, group=dist.group.WORLD)
    options: dict[str, Any] = {"exclude": ()} if mode == "adaptive" else {}
    clipper = build(mode, threshold=THRESHOLDS[mode], norm_type=norm_type, **options)
    clipper.bind(layout)
    outcome = clipper.clip(layout)
    return outcome.metrics, {shard.name: shard.param.grad for shard in shards}


def clip_whole(mode: str, norm_type: float, silent: str | None, world: int):
    parameters = whole()
    if silent is not None:
        missing = own_part(silent, parameters[silent].grad, world - 1, world)
        if silent == "columns":
            parameters[silent].grad[:, -missing.shape[1] :] = 0
        else:
            parameters[silent].grad[len(parameters[silent]) - len(missing) :] = 0
    shards = [ParamShard(name, p, units_of(p)) for name, p in parameters.items()]
    layout = Layout(shards)
    options: dict[str, Any] = {"exclude": ()} if mode == "adaptive" else {}
    clipper = build(mode, threshold=THRESHOLDS[mode], norm_type=norm_type, **options)
    clipper.bind(layout)
    outcome = clipper.clip(layout)
    return outcome, {name: p.grad for name, p in parameters.items()}


def exact(figures: Any) -> list[str]:
    return [float(figure).hex() for figure in figures]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", ["none", "norm", "value", "adaptive"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_split_gradients_are_clipped_like_whole_ones(mode, norm_type, world):
    expected, gradients = clip_whole(mode, norm_type, None, world)
    results = run_ranks(clip_split, world, mode, norm_type, None)
    for rank, (outcome, parts) in enumerate(results):
        assert exact(outcome) == exact(results[0][0]), "ranks must hold the same bits"
        assert outcome == pytest.approx(expected.metrics, rel=1e-12, nan_ok=True)
        for name, part in parts.items():
            wanted = own_part(name, gradients[name], rank, world)
            torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
@pytest.mark.parametrize("silent", ["columns", "vector"])
def test_a_rank_without_a_gradient_takes_part(mode, silent):
    expected, gradients = clip_whole(mode, 2.0, silent, 2)
    results = run_ranks(clip_split, 2, mode, 2.0, silent)
    for rank, (outcome, parts) in enumerate(results):
        assert outcome[:4] == pytest.approx(expected.metrics[:4], rel=1e-12)
        assert outcome[5] == pytest.approx(expected.max_stat, rel=1e-12)
        for name, part in parts.items():
            if part is not None:
                wanted = own_part(name, gradients[name], rank, 2)
                torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-15)
