"""A model in pieces is clipped like a whole one: each element, unit and replica counts once."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from runner.clip import build
from runner.gradients import Layout, ParamShard, Units, total_norm
from runner.gradients.shard import LayoutError, Whole, placed
from runner.gradients.units import units_of
from tests.clip.reference import on, refused

MODES = {
    "none": {},
    "norm": {"threshold": 0.9},
    "value": {"threshold": 0.7},
    "adaptive": {"threshold": 0.3, "exclude": ()},
    "per_parameter": {"threshold": 0.9},
    "adagc": {"threshold": 1.05, "absolute": 0.9, "warmup_steps": 1},
    "chain": {"links": [{"mode": "per_parameter", "threshold": 0.9}, 0.8]},
    "groups": {"groups": {"rows": 0.3, "c*": {"mode": "value", "threshold": 0.7}}},
}
KEPT = pytest.mark.parametrize("kept", [False, True])
ROWS = Units((1,))


class Ranks:
    """A process group whose ranks are threads: each test puts elements where it wants."""

    def __init__(self, world):
        self.world = world
        self._here = threading.local()
        self._barrier = threading.Barrier(world, timeout=600)
        self._sent = [None] * world

    def size(self):
        return self.world

    def rank(self):
        return self._here.rank

    def everyone(self, mine):
        self._sent[self.rank()] = mine
        self._barrier.wait()
        sent = list(self._sent)
        self._barrier.wait()
        return sent

    def run(self, body):
        def work(rank):
            self._here.rank = rank
            try:
                return body(self)
            except BaseException:
                self._barrier.abort()
                raise

        def all_to_all_single(rows, sent, group, async_op):
            columns = [each.chunk(self.world) for each in group.everyone(sent.clone())]
            torch.cat([parts[self.rank()] for parts in columns], out=rows)

        def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
            every = torch.stack(group.everyone(tensor.clone()))
            least = {dist.ReduceOp.MIN: every.amin, dist.ReduceOp.MAX: every.amax}
            tensor.copy_(least.get(op, every.sum)(0))

        def broadcast(tensor, group, group_src):
            tensor.copy_(group.everyone(tensor.clone())[group_src])

        def all_gather(tensors, tensor, group):
            for received, sent in zip(tensors, group.everyone(tensor.clone()), strict=True):
                received.copy_(sent)

        with (
            patch.object(dist, "all_to_all_single", all_to_all_single),
            patch.object(dist, "all_reduce", all_reduce),
            patch.object(dist, "all_gather", all_gather),
            patch.object(dist, "broadcast", broadcast),
            patch.object(dist, "get_backend_config", lambda group: "cpu:gloo"),
            ThreadPoolExecutor(self.world) as pool,
        ):
            futures = [pool.submit(work, rank) for rank in range(self.world)]
        for error in (future.exception() for future in futures):
            if error and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


def whole(seed=0, scale=1.0):
    """Named weights with gradients, of which :func:`shards` partitions to two ranks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"rows": (4, 3), "columns": (3, 6), "vector": (5,), "copied": (2, 3), "bias": (3,)}
    made = {}
    for name, shape in shapes.items():
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[name] = nn.Parameter(draw)
        made[name].grad = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return made


def part(parameter, at):
    mine = nn.Parameter(parameter.detach()[at].clone())
    mine.grad = parameter.grad[at].clone()
    return mine


def shards(made, ranks):
    """What one of two ranks holds of :func:`whole`; the vector is cut unevenly."""
    first = ranks.rank() == 0
    half = slice(None, 2) if first else slice(2, None)
    left = slice(None, 4) if first else slice(4, None)
    everything = slice(None)
    return [
        ParamShard("rows", part(made["rows"], half), ROWS),
        ParamShard(
            "columns", part(made["columns"], (everything, left)), ROWS, shard_groups=(ranks,)
        ),
        ParamShard("vector", part(made["vector"], left), Units((0,)), shard_groups=(ranks,)),
        ParamShard("copied", part(made["copied"], everything), ROWS, num_replicas=2),
        ParamShard("bias", part(made["bias"], everything), Units((0,)), num_replicas=2),
    ]


def clipped(layout, mode, norm_type=2.0, **options):
    clipper = build(mode, norm_type=norm_type, **{**MODES[mode], **options})
    clipper.bind(layout)
    outcome = clipper.clip(layout)
    gradients = {s.name: None if (g := s.gradient) is None else g.clone() for s in layout.shards}
    return tuple(map(float, outcome.metrics)), gradients


def on_two(made, mode, *args, kept=False, absent=(), ranks_without=(1,), **options):
    """Clip on two ranks; ``absent`` names parameters without a gradient on some of them."""

    def body(ranks):
        held = shards(made, ranks)
        for shard in held:
            if shard.name in absent and ranks.rank() in ranks_without:
                shard.param.grad = None
        return clipped(Layout(held, ranks), mode, *args, **options)

    with on(kept):
        return Ranks(2).run(body)


def one_layout(made):
    units = {name: Units((0,)) if p.ndim == 1 else ROWS for name, p in made.items()}
    return Layout([ParamShard(name, p, units[name]) for name, p in made.items()])


def assert_same(ranks, wanted):
    (mine, first), (other, second) = ranks
    outcome, gradients = wanted
    assert repr(mine) == repr(other)
    assert mine == pytest.approx(outcome, rel=1e-12, nan_ok=True)
    assert mine[3:5] == outcome[3:5]
    assert torch.equal(first["copied"], second["copied"])
    joined = first | {
        name: torch.cat([first[name], second[name]], dim)
        for name, dim in (("rows", 0), ("columns", 1), ("vector", 0))
    }
    for name, gradient in joined.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=0)


@KEPT
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_clip_like_one(mode, norm_type, kept):
    """Also where nothing is clipped, and the coefficient is exactly 1."""
    for scale in (1.0, 1e-3):
        ranks = on_two(whole(scale=scale), mode, norm_type, kept=kept)
        wanted = clipped(one_layout(whole(scale=scale)), mode, norm_type)
        assert wanted[0][3] == float(mode != "none" and scale == 1.0)
        assert_same(ranks, wanted)
        if not wanted[0][3]:
            assert ranks[0][0][0] == ranks[0][0][1]
            assert ranks[0][0][2:5] == (1.0, 0.0, 0.0)


@KEPT
def test_a_cut_unit_counts_whole_where_one_rank_has_no_gradient_for_it(kept):
    made = whole()
    made["columns"].grad[:, 4:] = 0.0
    ranks = on_two(made, "adaptive", kept=kept, absent=("columns",))
    wanted, _ = clipped(one_layout(made), "adaptive")
    assert 0.0 < wanted[4] < 1.0
    for outcome, _ in ranks:
        assert outcome == pytest.approx(wanted, rel=1e-12)


@KEPT
def test_a_vector_that_no_rank_has_a_gradient_of_is_no_unit(kept):
    gone = {"absent": ("vector",), "ranks_without": (0, 1), "threshold": 1e-6}
    ranks = on_two(whole(), "adaptive", kept=kept, **gone)
    assert [outcome[4] for outcome, _ in ranks] == [1.0, 1.0]


def test_a_rank_that_holds_nothing_adds_nothing():
    made = whole()
    known = {name: Whole(tuple(p.shape), True) for name, p in made.items()}

    def body(ranks):
        if ranks.rank() == 1:
            layout = Layout([], ranks, parameters=known)
            assert layout.device == torch.device("cpu")
            assert Layout([], ranks, elsewhere="meta").device == torch.device("meta")
        else:
            layout = Layout(
                [ParamShard(name, p, ROWS) for name, p in made.items() if p.ndim > 1], ranks
            )
        found = [total_norm(layout, p) for p in (1.0, 2.0, math.inf)]
        clipper = build("value", threshold=0.7)
        return [*found, *map(float, clipper.clip(layout).metrics)]

    first, second = Ranks(2).run(body)
    assert first == second
    every = torch.cat([p.grad.flatten() for p in whole().values() if p.ndim > 1])
    assert first[0] == pytest.approx(float(every.abs().sum()), rel=1e-12)
    assert first[2] == float(every.abs().max())
    assert first[7] == float((every.abs() > 0.7).double().mean())


# -- where the parts lie


def sharded(shape, placements, sizes):
    """A stand-in for a DTensor: placements along the axes of a mesh of these sizes."""
    mesh = MagicMock()
    mesh.size.side_effect = lambda axis: sizes[axis]
    mesh.get_group.side_effect = lambda axis: f"axis {axis}"
    known = {"shape": torch.Size(shape), "ndim": len(shape)}
    return Mock(spec=DTensor, placements=placements, device_mesh=mesh, **known)


LINEAR, ROW, COLUMN, COPY = nn.Linear(2, 2), Shard(0), Shard(1), Replicate()


def test_placements_say_who_holds_what():
    for shape, placements, sizes, ranks, wanted in (
        ((4, 6), [ROW], [2], 2, (1, ())),
        ((4, 6), [COLUMN], [2], 2, (1, ("axis 0",))),
        ((4, 6), [COPY], [2], 4, (4, ())),
        ((4, 6), [COLUMN], [1], 4, (4, ())),
        ((4, 6), [COPY, ROW], [2, 2], 4, (2, ())),
        ((4, 6), [COPY, COLUMN], [2, 3], 6, (2, ("axis 1",))),
        ((4, 6), [ROW, COLUMN], [2, 2], 8, (2, ("axis 1",))),
        ((4, 6), [COLUMN, COLUMN], [2, 2], 4, (1, ("axis 0", "axis 1"))),
        ((4, 6), [COLUMN, ROW, COLUMN], [2, 2, 2], 8, (1, ("axis 0", "axis 2"))),
        ((6,), [ROW], [2], 4, (2, ("axis 0",))),
        ((6,), [COPY], [2], 2, (2, ())),
        ((), [COPY], [2], 2, (2, ())),
    ):
        shard = placed("weight", sharded(shape, placements, sizes), LINEAR, ranks)
        assert (shard.num_replicas, shard.shard_groups) == wanted
        assert (shard.name, shard.units) == ("weight", units_of(torch.empty(shape)))
    for placement, ranks, error in ((Partial(), 2, TypeError), (ROW, 3, LayoutError)):
        held = sharded((4, 6), [placement], [2])
        refused(error, "w is", placed, "w", held, LINEAR, ranks)
    alone = sharded((4, 6), [ROW], [2])
    refused(TypeError, "parameters[0] is sharded", Layout.of_parameters, [alone])


def test_groups_of_a_transposed_convolution_are_not_split():
    """Its groups lie in dimension 0; a shard of dimension 1 leaves each output channel whole."""
    layer = nn.ConvTranspose2d(4, 6, 2, groups=2)
    weight = sharded((4, 3, 2, 2), [COLUMN], [2])
    layer.register_parameter("weight", None)
    layer.__dict__["weight"] = weight
    assert placed("w", weight, layer, 2).shard_groups == ()
    weight.placements = [Shard(2)]
    assert placed("w", weight, layer, 2).shard_groups == ("axis 0",)
    weight.placements = [ROW]
    refused(TypeError, "w|transposed convolution", placed, "w", weight, layer, 2)


def account(*models, **options):
    """Layouts of what each rank holds, a module each."""

    def body(group):
        return Layout.of_sharded(models[group.rank()], group, **options)

    return Ranks(len(models)).run(body)


def test_parts_that_do_not_add_up_are_refused_by_name():
    linear, known = nn.Linear(3, 2), {"weight": 6, "bias": 2}
    large = nn.Linear(100, 100, bias=False)
    account(large, large, large, whole={"weight": 10_000})
    for model, options, words in (
        (linear, {"whole": known | {"weight": 7}}, "weight has 7|account for 6"),
        (linear, {"whole": known | {"extra": 1}}, "extra has 1|account for 0"),
        (linear, {"whole": {"weight": 6}}, "bias|no such parameter"),
        (linear, {"ranks": lambda name: 1}, "weight has 6|account for 12"),
        # A huge parameter may round, but not lose an element in 10,000.
        (large, {"ranks": lambda name: 1, "whole": {"weight": 10_000}}, "has 10000|for 20000"),
        (large, {"whole": {"weight": 10_001}}, "has 10001"),
    ):
        refused(LayoutError, words, account, model, model, **options)


def test_names_are_those_of_all_ranks_in_one_order():
    """A rank that holds nothing knows the names and the device of the others."""
    known = {"weight": 6, "bias": 2}
    first, second = account(nn.Linear(3, 2), nn.Linear(3, 2))
    assert [shard.num_replicas for shard in first.shards] == [2, 2]
    assert first.names == second.names == ["weight", "bias"]
    assert first.heads == ("weight",)
    for device in ("cpu", "meta"):
        model = nn.Linear(3, 2, device=device)
        first, second = account(model, nn.Sequential(), whole=known, ranks=lambda name: 1)
        assert first.names == second.names == ["weight", "bias"]
        assert (second.shards, second.device) == ([], torch.device(device))
    (nobody,) = account(nn.Sequential(), whole={})
    assert (nobody.device, nobody.names, nobody.heads) == (torch.device("cpu"), [], ())
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    (layout,) = account(tied)
    assert layout.names == Layout.of_model(tied).names == ["0.weight", "0.bias", "1.bias"]
    sizes = {"embed": 9, "0.bias": 3, "1.bias": 3}
    (layout,) = account(tied, renamed={"0.weight": "embed"}, heads=["0.bias"], whole=sizes)
    assert (layout.names, layout.heads) == (list(sizes), ("0.bias",))
