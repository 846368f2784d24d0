"""Ranks and where they lie: the sizes of plugins, and those of a request, are the same."""

from types import SimpleNamespace

import pytest

from runner.booster.plugin import (
    HybridParallelPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
)
from runner.config.sizes import MeshSizes, SizeError, sizes
from runner.parallel.mesh import position

KINDS = {
    "tensor": TensorParallelPlugin,
    "pipeline": PipelineParallelPlugin,
    "moe": MoeHybridParallelPlugin,
    "hybrid": HybridParallelPlugin,
}
OPEN = {"tensor": "tp_size", "pipeline": "pp_size", "moe": "ep_size"}


def section(name, **given):
    neutral = {"dp_size": None, "tp_size": 1, "pp_size": 1, "ep_size": 1}
    neutral |= {"nproc": None, "nnodes": None}
    own = {OPEN[name]: None} if name in OPEN else {}
    return SimpleNamespace(name=name, **(neutral | own | given))


@pytest.mark.parametrize(
    ("name", "ranks", "given"),
    [
        ("tensor", 4, {}),
        ("tensor", 4, {"tp_size": 2}),
        ("tensor", 4, {"dp_size": 2}),
        ("pipeline", 4, {"pp_size": 2}),
        ("pipeline", 3, {}),
        ("moe", 4, {}),
        ("moe", 4, {"ep_size": 2}),
        ("hybrid", 8, {"tp_size": 2, "pp_size": 2}),
        ("hybrid", 8, {"dp_size": 2, "tp_size": 2, "pp_size": 2, "ep_size": 2}),
        ("hybrid", 8, {}),
    ],
)
def test_a_plugin_lays_ranks_out_as_the_request_was_checked(name, ranks, given):
    asked = section(name, **given)
    assert KINDS[name].sizes_of(ranks, vars(asked)) == sizes(asked, ranks)
    # What is not given is the constructor's default.
    assert KINDS[name].sizes_of(ranks, given) == sizes(asked, ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "given"),
    [
        ("hybrid", 6, {"tp_size": 2, "pp_size": 2}),
        ("hybrid", 4, {"dp_size": 2, "tp_size": 2, "pp_size": 2}),
        ("moe", 4, {"ep_size": 3}),
        ("tensor", 4, {"tp_size": 3}),
    ],
)
def test_both_refuse_the_same(name, ranks, given):
    asked = section(name, **given)
    with pytest.raises(SizeError) as of_request:
        sizes(asked, ranks, started=True)
    with pytest.raises(SizeError) as of_plugin:
        KINDS[name].sizes_of(ranks, vars(asked))
    assert str(of_plugin.value) == str(of_request.value)


def test_neighbours_share_weights():
    laid = [position(rank, MeshSizes(dp=2, tp=2, pp=2)) for rank in range(8)]
    assert laid[:4] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [stage for stage, _, _ in laid] == [0] * 4 + [1] * 4
    assert len(set(laid)) == 8
