"""A mode is written once: it clips gradients that are split over ranks in any way like whole ones.

Rows, columns, cut vectors, several meshes, uneven and empty shards, replicas, ranks without a
gradient.
"""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from runner.clip import build
from runner.gradients import Layout
from runner.gradients.shard import local
from tests.distributed.by_hand import Clip
from tests.ranks import run_ranks

PLACED = {
    "plain": ((5, 3), None),
    "rows": ((6, 3), ("a", [Shard(0)])),
    "columns": ((3, 5), ("b", [Shard(1)])),
    "vector": ((7,), ("b", [Shard(0)])),
    "both": ((4, 6), ("ab", [Shard(1), Shard(0)])),
    "twice": ((9, 2), ("ab", [Shard(0), Shard(0)])),
    "vector_twice": ((10,), ("ab", [Shard(0), Shard(0)])),
    "repeated": ((4,), ("ab", [Replicate(), Replicate()])),
    "columns_twice": ((2, 8), ("ab", [Shard(1), Shard(1)])),
    "few": ((3,), ("all", [Shard(0)])),
}
MODES: list[Clip] = [("none", None, 2.0), ("value", 0.4, 2.0)]
MODES += [("norm", limit, p) for limit, p in ((2.0, 1.0), (1.5, 2.0), (1.0, 3.0), (0.5, math.inf))]
MODES += [("adaptive", limit, p) for limit, p in ((0.2, 1.0), (0.3, 2.0), (0.3, math.inf))]
SILENT = (None, "twice", "vector_twice", "columns_twice", "few")
"""Parameters without a gradient on the last rank; each rank has another part of them."""


def metrics_of(layout: Layout, clip: Clip) -> list[float]:
    name, threshold, norm_type = clip
    options = {"exclude": ()} if name == "adaptive" else {}
    mode = build(name, threshold=threshold, norm_type=norm_type, **options)
    mode.bind(layout)
    return [float(metric) for metric in mode.clip(layout).metrics]


def on_meshes() -> list[tuple[list[float], list[float], list[str]]]:
    """Clip parameters on four meshes of one world, and one without a mesh.

    For each mode: metrics of this rank and of one process; shards that differ from whole gradients.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes = {"a": grid["a"], "b": grid["b"], "ab": grid}
    meshes["all"] = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    last = dist.get_rank() == dist.get_world_size() - 1

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        where = PLACED[name][1]
        if where is None:
            return tensor
        return distribute_tensor(tensor, meshes[where[0]], where[1], src_data_rank=None)

    results = []
    for silent, clip in product(SILENT, MODES):
        whole = nn.ParameterDict()
        model = nn.ParameterDict()
        generator = torch.Generator().manual_seed(5)
        for name, (shape, _) in PLACED.items():
            weight, gradient = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
            whole[name] = nn.Parameter(weight)
            model[name] = nn.Parameter(part(name, weight))
            whole[name].grad = gradient
            model[name].grad = part(name, gradient.clone())
            if name == silent:  # for one process it is a gradient of zeros
                local(model[name].grad).mul_(0.0 if last else 1.0)
                whole[name].grad = model[name].grad.full_tensor().clone()
                model[name].grad = None if last else model[name].grad
        model["frozen"] = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        ours = metrics_of(Layout.of_sharded(model, dist.group.WORLD), clip)
        expected = metrics_of(Layout.of_model(whole), clip)
        pairs = [(n, model[n].grad, part(n, whole[n].grad)) for n in PLACED]
        pairs = [(n, local(a), local(b)) for n, a, b in pairs if a is not None]
        results.append(
            (ours, expected, [n for n, a, b in pairs if not torch.allclose(a, b, 1e-12, 0)])
        )
    return results


def test_a_layout_of_several_meshes_beside_plain_tensors_is_one_process():
    ranks = run_ranks(on_meshes, 4)
    for rank in ranks:
        compared = zip(rank, ranks[0], product(SILENT, MODES), strict=True)
        for (ours, expected, unlike), first, (silent, clip) in compared:
            assert expected[3] == (clip[0] != "none"), "the mode clips"
            assert [metric.hex() for metric in ours] == [metric.hex() for metric in first[0]]
            # Elements of an absent gradient are no part of what a fraction is a share of.
            indices = [0, 1, 2, 3, 5] if silent else range(len(ours))
            close = pytest.approx([expected[i] for i in indices], rel=1e-12, nan_ok=True)
            assert [ours[i] for i in indices] == close, (silent, clip)
            assert unlike == [], (silent, clip)
