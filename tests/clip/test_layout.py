"""A model in pieces is clipped like a whole one: each element, unit and replica counts once."""

import math
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from runner.clip import Layout, ParamShard, Units, build, total_norm
from runner.clip.layout import OptionError
from runner.clip.norms import norms
from runner.clip.shard import LayoutError, Whole, placed
from runner.clip.units import units_of
from tests.clip.reference import on, refused
from tests.clip.threads import Ranks

MODES = {"none": None, "norm": 0.9, "value": 0.7, "adaptive": 0.3}
KEPT = pytest.mark.parametrize("kept", [False, True])
ROWS = Units((1,))


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
        ParamShard("vector", part(made["vector"], left), Units((0,)), sharded_vector=True),
        ParamShard("copied", part(made["copied"], everything), ROWS, num_replicas=2),
        ParamShard("bias", part(made["bias"], everything), Units((0,)), num_replicas=2),
    ]


def clipped(layout, mode, norm_type=2.0, exclude=(), threshold=None):
    options = {"exclude": exclude} if mode == "adaptive" else {}
    clipper = build(mode, threshold=threshold or MODES[mode], norm_type=norm_type, **options)
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


def in_one(made, mode, norm_type=2.0, exclude=()):
    units = {name: Units((0,)) if p.ndim == 1 else ROWS for name, p in made.items()}
    layout = Layout([ParamShard(name, p, units[name]) for name, p in made.items()])
    return clipped(layout, mode, norm_type, exclude)


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
        wanted = in_one(whole(scale=scale), mode, norm_type)
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
    wanted, _ = in_one(made, "adaptive")
    assert 0.0 < wanted[4] < 1.0
    for outcome, _ in ranks:
        assert outcome == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["rows", "columns", "vector", "copied", "bias"])
def test_one_clipped_part_is_counted_once(name):
    """Of all elements and units: one element, one row, one vector."""
    made = whole(scale=1e-3)
    made[name].grad.flatten()[0] = 1e3
    for mode, of in (("value", 12 + 18 + 5 + 6 + 3), ("adaptive", 4 + 3 + 1 + 2 + 1)):
        for outcome, _ in on_two(made, mode):
            assert outcome[3:5] == (1.0, 1 / of)


def test_excluded_parameters_are_neither_clipped_nor_counted():
    for exclude in (("rows", "vector"), "col*", ("bias", "copied")):
        wanted = in_one(whole(), "adaptive", 2.0, exclude)
        assert_same(on_two(whole(), "adaptive", 2.0, exclude), wanted)


@KEPT
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_gradients_takes_part(mode, kept):
    """It has none for its rows and its part of the vector; its columns have gradients of zero."""
    made = whole()
    for name, at in (("rows", slice(2, None)), ("vector", slice(4, None))):
        made[name].grad[at] = 0.0
    made["columns"].grad[:, 4:] = 0.0
    (first, _), (second, _) = on_two(made, mode, kept=kept, absent=("rows", "vector"))
    wanted, _ = in_one(made, mode)
    assert repr(first) == repr(second)
    assert first[:3] == pytest.approx(wanted[:3], rel=1e-12)
    assert first[5] == pytest.approx(wanted[5], rel=1e-12)
    # Elements and units without a gradient are not among those that are counted.
    absent = {"value": (44 - 6 - 1, 44), "adaptive": (11 - 2, 11)}
    here, of = absent.get(mode, (1, 1))
    assert first[4] == pytest.approx(wanted[4] * of / here, rel=1e-12)


@KEPT
def test_a_vector_that_no_rank_has_a_gradient_of_is_no_unit(kept):
    gone = {"absent": ("vector",), "ranks_without": (0, 1), "threshold": 1e-6}
    ranks = on_two(whole(), "adaptive", kept=kept, **gone)
    assert [outcome[4] for outcome, _ in ranks] == [1.0, 1.0]


def test_a_rank_that_holds_nothing_adds_nothing():
    made = whole()
    known = {name: Whole(tuple(p.shape), False, True) for name, p in made.items()}

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


@KEPT
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_of_each_parameter(norm_type, kept):
    """Also where two parts of one parameter lie on a rank."""
    made = whole()
    exact = {name: float(torch.linalg.vector_norm(p.grad, norm_type)) for name, p in made.items()}
    halves = [part(made["rows"], at) for at in (slice(None, 2), slice(2, None))]
    with on(kept):
        found = Ranks(2).run(lambda own: norms(Layout(shards(made, own), own), norm_type))
        assert found == [pytest.approx(exact, rel=1e-12)] * 2
        twice = norms(Layout([ParamShard("rows", half, ROWS) for half in halves]), norm_type)
    assert twice == {"rows": pytest.approx(exact["rows"], rel=1e-12)}


# -- where the parts lie


def sharded(shape, placements, sizes):
    """A stand-in for a DTensor: placements along the axes of a mesh of these sizes."""
    mesh = MagicMock()
    mesh.size.side_effect = lambda axis: sizes[axis]
    mesh.get_group.side_effect = lambda axis: f"axis {axis}"
    known = {"shape": torch.Size(shape), "ndim": len(shape)}
    return Mock(spec=DTensor, placements=placements, device_mesh=mesh, **known)


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("shape", "placements", "sizes", "ranks", "num_replicas", "shard_groups", "sharded_vector"),
    [
        ((4, 6), [Shard(0)], [2], 2, 1, (), False),
        ((4, 6), [Shard(1)], [2], 2, 1, ("axis 0",), False),
        ((4, 6), [Replicate()], [2], 4, 4, (), False),
        ((4, 6), [Shard(1)], [1], 4, 4, (), False),
        ((4, 6), [Replicate(), Shard(0)], [2, 2], 4, 2, (), False),
        ((4, 6), [Replicate(), Shard(1)], [2, 3], 6, 2, ("axis 1",), False),
        ((4, 6), [Shard(0), Shard(1)], [2, 2], 8, 2, ("axis 1",), False),
        ((4, 6), [Shard(1), Shard(1)], [2, 2], 4, 1, ("axis 0", "axis 1"), False),
        ((4, 6), [Shard(1), Shard(0), Shard(1)], [2, 2, 2], 8, 1, ("axis 0", "axis 2"), False),
        ((6,), [Shard(0)], [2], 4, 2, (), True),
        ((6,), [Replicate()], [2], 2, 2, (), False),
        ((), [Replicate()], [2], 2, 2, (), False),
    ],
)
def test_placements_say_who_holds_what(
    shape, placements, sizes, ranks, num_replicas, shard_groups, sharded_vector
):
    shard = placed("weight", sharded(shape, placements, sizes), LINEAR, ranks)
    assert (shard.name, shard.param.placements) == ("weight", placements)
    assert (shard.num_replicas, shard.shard_groups, shard.sharded_vector) == (
        num_replicas,
        shard_groups,
        sharded_vector,
    )
    assert shard.units == units_of(torch.empty(shape))


def test_a_plain_parameter_is_whole_on_every_rank():
    shard = placed("weight", LINEAR.weight, LINEAR, 3)
    assert (shard.num_replicas, shard.shard_groups, shard.sharded_vector) == (3, (), False)
    assert shard.units == Units((1,))


def test_groups_of_a_transposed_convolution_are_not_split():
    """Its groups lie in dimension 0; a shard of dimension 1 leaves each output channel whole."""
    layer = nn.ConvTranspose2d(4, 6, 2, groups=2)
    weight = sharded((4, 3, 2, 2), [Shard(1)], [2])
    layer.register_parameter("weight", None)
    layer.__dict__["weight"] = weight
    assert placed("w", weight, layer, 2).shard_groups == ()
    weight.placements = [Shard(2)]
    assert placed("w", weight, layer, 2).shard_groups == ("axis 0",)
    weight.placements = [Shard(0)]
    refused(TypeError, "w|transposed convolution", lambda: placed("w", weight, layer, 2))
    for placement, ranks, error in ((Partial(), 2, TypeError), (Shard(0), 3, LayoutError)):
        held = sharded((4, 6), [placement], [2])
        refused(error, "w is", lambda held=held, n=ranks: placed("w", held, LINEAR, n))


def account(*models, **options):
    """Layouts of what each rank holds, a module each."""

    def body(group):
        return Layout.of_sharded(models[group.rank()], group, **options)

    return Ranks(len(models)).run(body)


def test_parts_that_do_not_add_up_are_refused_by_name():
    linear, known = nn.Linear(3, 2), {"weight": 6, "bias": 2}
    first, second = account(nn.Linear(3, 2), nn.Linear(3, 2))
    assert [shard.num_replicas for shard in first.shards] == [2, 2]
    assert first.names == second.names == ["weight", "bias"]
    assert first.sharded_vector == []
    assert first.heads == ("weight",)
    for options, words in (
        ({"whole": known | {"weight": 7}}, "weight has 7|account for 6"),
        ({"whole": known | {"extra": 1}}, "extra has 1|account for 0"),
        ({"whole": {"weight": 6}}, "bias|no such parameter"),
        ({"ranks": lambda name: 1}, "weight has 6|account for 12"),
    ):
        refused(LayoutError, words, lambda o=options: account(linear, linear, **o))
    # A huge parameter may round, but not lose an element in 10,000.
    large = nn.Linear(100, 100, bias=False)
    account(large, large, large, whole={"weight": 10_000})
    for elements, ranks in ((10_000, lambda name: 1), (10_001, None)):
        options = {"whole": {"weight": elements}, "ranks": ranks}
        refused(LayoutError, f"has {elements}", lambda o=options: account(large, large, **o))


def test_names_are_those_of_all_ranks_in_one_order():
    """A rank that holds nothing knows the names and the device of the others."""
    whole = {"weight": 6, "bias": 2}
    first, second = account(nn.Linear(3, 2), nn.Sequential(), whole=whole, ranks=lambda name: 1)
    assert first.names == second.names == ["weight", "bias"]
    assert second.shards == []
    assert second.device == torch.device("cpu")
    elsewhere = nn.Linear(3, 2, device="meta")
    _, second = account(elsewhere, nn.Sequential(), whole=whole, ranks=lambda name: 1)
    assert second.device == torch.device("meta")
    (nobody,) = account(nn.Sequential(), whole={})
    assert (nobody.device, nobody.names, nobody.heads) == (torch.device("cpu"), [], ())


def test_a_tied_parameter_has_its_first_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    (layout,) = account(model)
    assert layout.names == ["0.weight", "0.bias", "1.bias"]
    (layout,) = account(model, renamed={"0.weight": "embed"}, heads=["0.bias"],
                        whole={"embed": 9, "0.bias": 3, "1.bias": 3})  # fmt: skip
    assert layout.names == ["embed", "0.bias", "1.bias"]
    assert layout.heads == ("0.bias",)


def named(*names):
    return Layout([], parameters={name: Whole((1,), False, True) for name in names})


def test_patterns_match_by_glob_and_unknown_ones_list_names():
    layout = named(*[f"layer{i}.weight" for i in range(9)])
    assert layout.matching("*[12].weight", "exclude") == ["layer1.weight", "layer2.weight"]
    assert layout.matching("layer0.*", "exclude") == ["layer0.weight"]
    with pytest.raises(OptionError, match=r"layer2\.weight, \.\.\., layer6\.weight") as raised:
        layout.matching("x", "exclude")
    assert raised.value.option == "exclude"
    refused(OptionError, "clip.units=x|a, b, c, d, e, f, g",
            lambda: named(*"abcdefg").matching("x", "units"))  # fmt: skip


# -- several modules together


def test_the_union_of_modules_has_the_elements_of_all():
    first, second = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = torch.randn_like(parameter)
    apart = {"a.": Layout.of_model(first), "b.": Layout.of_model(second)}
    both = Layout.union(apart)
    assert both.names == ["a.weight", "a.bias", "b.weight"]
    assert [shard.name for shard in both.shards] == both.names
    assert both.heads == ("a.weight", "b.weight")
    assert [shard.num_replicas for shard in both.shards] == [1, 1, 1]
    assert both.group is None
    exact = math.hypot(*(total_norm(layout) for layout in apart.values()))
    assert total_norm(both) == pytest.approx(exact, rel=1e-12)
    assert Layout.union({"": apart["a."]}) is apart["a."]
    assert Layout.union({"c.": apart["a."]}).names == ["c.weight", "c.bias"]


def test_in_a_union_what_every_rank_holds_whole_counts_once():
    whole = nn.Linear(2, 2, bias=False)
    whole.weight.grad = torch.ones(2, 2)

    def body(ranks):
        spread = Layout([ParamShard("rows", part(made["rows"], rows[ranks.rank()]), ROWS)], ranks)
        both = Layout.union({"a.": Layout.of_model(whole), "b.": spread})
        assert both.group is ranks
        assert [shard.num_replicas for shard in both.shards] == [2, 1]
        return total_norm(both)

    made, rows = {"rows": nn.Parameter(torch.zeros(4, 3))}, (slice(None, 2), slice(2, None))
    made["rows"].grad = torch.ones(4, 3)
    assert Ranks(2).run(body) == [4.0, 4.0]


def test_two_modules_with_one_name_are_refused():
    layout, other = (Layout.of_model(nn.Linear(2, 2, bias=bias)) for bias in (True, False))
    layout.parameters = {"b.weight": layout.parameters["weight"]}
    refused(LayoutError, "b.weight", lambda: Layout.union({"": layout, "b.": other, "c.": other}))
