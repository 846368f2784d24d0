"""A mode is written once: it clips gradients that are split over ranks in any way like whole ones.

Rows, columns, cut vectors, several meshes, uneven and empty shards, replicas, ranks without a
gradient, and partial sums.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runner.clip import GradStats, Layout, ParamShard, Units, build, total_norm
from runner.clip.shard import local
from runner.clip.units import units_of
from tests.distributed.by_hand import Clip, Loop
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

# -- DTensors on several meshes

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


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A weight and a gradient of each shape, whole."""
    generator = torch.Generator().manual_seed(5)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return {n: (torch.randn(s, **options), torch.randn(s, **options)) for n, s in shapes.items()}


def metrics_of(layout: Layout, clip: Clip) -> list[float]:
    name, threshold, norm_type = clip
    options = {"exclude": ()} if name == "adaptive" else {}
    mode = build(name, threshold=threshold, norm_type=norm_type, **options)
    mode.bind(layout)
    return [float(metric) for metric in mode.clip(layout).metrics]


def on_meshes() -> list[tuple[list[float], list[float], list[str]]]:
    """Clip parameters on four meshes of one world, and one without a mesh.

    Returns:
        For each mode the metrics of this rank, those of one process, and the names of parameters
        whose shard differs from that of the whole clipped gradient.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes = {"a": grid["a"], "b": grid["b"], "ab": grid}
    meshes["all"] = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        where = PLACED[name][1]
        if where is None:
            return tensor
        return distribute_tensor(tensor, meshes[where[0]], where[1], src_data_rank=None)

    found = []
    for clip in MODES:
        whole, model = nn.ParameterDict(), nn.ParameterDict()
        for name, (weight, gradient) in drawn({n: s for n, (s, _) in PLACED.items()}).items():
            whole[name], model[name] = nn.Parameter(weight), nn.Parameter(part(name, weight))
            whole[name].grad, model[name].grad = gradient, part(name, gradient.clone())
        model["frozen"] = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        ours = metrics_of(Layout.of_sharded(model, dist.group.WORLD), clip)
        wanted = metrics_of(Layout.of_model(whole), clip)
        pairs = [(n, model[n].grad, part(n, whole[n].grad)) for n in PLACED]
        unlike = [n for n, a, b in pairs if not torch.allclose(local(a), local(b), 1e-12, 0)]
        found.append((ours, wanted, unlike))
    return found


def test_several_meshes_and_plain_tensors_in_one_layout():
    ranks = run_ranks(on_meshes, 4)
    for rank in ranks:
        for (ours, wanted, unlike), first, clip in zip(rank, ranks[0], MODES, strict=True):
            assert wanted[3] == (clip[0] != "none"), "the mode clips"
            assert [f.hex() for f in ours] == [f.hex() for f in first[0]]
            assert ours == pytest.approx(wanted, rel=1e-12, nan_ok=True), clip
            assert unlike == [], clip


# -- shards by hand, with a rank that has no gradient

SHAPES = {"rows": (5, 3), "one_row": (1, 3), "columns": (4, 5), "vector": (7,), "bias": (4,)}
SILENT = ("columns", "vector", "one_row")


def own_part(name: str, tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    if name == "bias":
        return tensor
    return tensor.tensor_split(world, dim=1 if name == "columns" else 0)[rank]


def by_hand(rank: int, world: int, silent: str, clip: Clip) -> tuple[list[float], dict[str, Any]]:
    """Clip the parts of a rank. The last rank has no gradient of ``silent``; rank -1 is a process
    that has everything, with zeros in its place.
    """
    shards = []
    for name, (weight, gradient) in drawn(SHAPES).items():
        if name == silent:
            own_part(name, gradient, world - 1, world).zero_()
        alone = rank < 0 or name == "bias"
        whole = nn.Parameter(weight)
        part = whole if alone else nn.Parameter(own_part(name, weight, rank, world).clone())
        if name != silent or rank != world - 1:
            part.grad = gradient if alone else own_part(name, gradient, rank, world).clone()
        cut = (dist.group.WORLD,) if rank >= 0 and name in ("columns", "vector") else ()
        copies = world if rank >= 0 and name == "bias" else 1
        shards.append(ParamShard(name, part, units_of(part), copies, cut))
    layout = Layout(shards, group=dist.group.WORLD if rank >= 0 else None)
    return metrics_of(layout, clip), {shard.name: shard.param.grad for shard in shards}


def all_by_hand() -> list[Any]:
    where = dist.get_rank(), dist.get_world_size()
    return [by_hand(*where, silent, clip) for silent in SILENT for clip in MODES[1:]]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_a_gradient_takes_part(world):
    asked = [(silent, clip) for silent in SILENT for clip in MODES[1:]]
    ranks = run_ranks(all_by_hand, world)
    for number, (silent, clip) in enumerate(asked):
        expected, gradients = by_hand(-1, world, silent, clip)
        for rank, results in enumerate(ranks):
            metrics, parts = results[number]
            assert [m.hex() for m in metrics] == [m.hex() for m in ranks[0][number][0]]
            # Elements of an absent gradient are no part of what a fraction is a share of.
            assert metrics[:4] == pytest.approx(expected[:4], rel=1e-12)
            assert metrics[5] == pytest.approx(expected[5], rel=1e-12, nan_ok=True)
            for name, part in parts.items():
                if part is not None:
                    wanted = own_part(name, gradients[name], rank, world)
                    torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-15)


# -- what a layout reads of DTensors


class Dispatched(TorchDispatchMode):
    """Records the operations that a DTensor takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def dispatched() -> list[str]:
    found = []
    for plugin in ("fsdp", "tensor"):
        for clip in MODES[1::2]:
            loop = Loop(plugin, make("gpt", torch.float32))
            loop.backward(*batch_for("gpt", torch.float32))
            loop.optimizer.unscale()
            with Dispatched() as seen:
                loop.clip(clip)
            assert any(isinstance(shard.param, DTensor) for shard in loop.layout.shards)
            found += [f"{plugin}, {clip}: {name}" for name in seen.found]
    return found


def odd_shards() -> tuple[list[str], bool, list[str]]:
    """Names of the shards with gradients among absent, empty, plain and split ones; whether they
    are what this rank holds; the same names without plain and absent ones.
    """
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()

    def parameter(rows: int, placement: Any) -> nn.Parameter:
        own = torch.ones((rows + 1 - rank) // 2 if placement == Shard(0) else rows, 3)
        whole = {"run_check": False, "shape": (rows, 3), "stride": (3, 1)}
        return nn.Parameter(DTensor.from_local(own, mesh, [placement], **whole))

    params = {name: parameter(rows, Shard(0)) for name, rows in {"rows": 4, "few": 1}.items()}
    params |= {"absent": parameter(5, Shard(0)), "copied": parameter(2, Replicate())}
    params["plain"] = nn.Parameter(torch.ones(2, 3))
    for name, each in params.items():
        if name != "absent":
            each.grad = torch.full_like(each, len(name))
    layout = Layout([ParamShard(name, p, Units((1,))) for name, p in params.items()])
    shards, gradients = layout.gradients()
    own = [torch.full_like(local(params[s.name].detach()), len(s.name)) for s in shards]
    same = all(map(torch.equal, own, gradients))
    assert {type(gradient) for gradient in gradients} == {torch.Tensor}
    few = Layout([s for s in layout.shards if s.name not in ("absent", "plain")])
    return [s.name for s in shards], same, [s.name for s in few.gradients()[0]]


def partial_sums() -> tuple[set[str], set[str]]:
    """Names of gradients that are partial sums before and after clipping; it refuses others."""
    loop = Loop("sequence", make("gpt"))
    loop.backward(*batch_for("gpt"))

    def partial() -> set[str]:
        named = {n: p.grad for n, p in loop.raw.named_parameters() if isinstance(p.grad, DTensor)}
        return {n for n, g in named.items() if any(each.is_partial() for each in g.placements)}

    before = partial()
    loop.optimizer.clip_grad_by_norm(0.1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(3, 2)
    for name, parameter in list(model.named_parameters()):
        spread = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
        placement = Partial() if name == "bias" else Replicate()
        spread.grad = DTensor.from_local(torch.ones(parameter.shape), mesh, [placement])
        setattr(model, name, spread)
    layout = Layout.of_sharded(model, dist.group.WORLD)
    for mode in ("norm", "value", "adaptive"):
        with pytest.raises(TypeError, match="bias"):
            build(mode, threshold=0.1).clip(layout, GradStats(1.0, True))
    with pytest.raises(TypeError, match="bias"):
        total_norm(layout)
    return before, partial()


def dtensors() -> Any:
    return dispatched(), odd_shards(), partial_sums()


def test_gradients_of_dtensors_are_read_as_plain_tensors():
    for rank, (operations, (names, same, few), (before, after)) in enumerate(run_ranks(dtensors, 2)):
        assert operations == []
        present = ["rows", "few", "copied"] if rank == 0 else ["rows", "copied"]
        assert (names, same, few) == ([*present, "plain"], True, present)
        # What works on a part of the sequence: norms, and the biases of row-wise layers.
        assert {"norm.weight", "blocks.0.mlp.down.bias"} <= before
        assert after == set()
