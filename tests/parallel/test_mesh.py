"""Ranks and where they lie: the sizes of plugins, and those of a request, are the same."""

from types import SimpleNamespace

import pytest

from runner.booster import plugin
from runner.parallel.mesh import MeshSizes, SizeError, position
from runner.train.build import mesh_of

KINDS = {
    "tensor": (plugin.TensorParallelPlugin, {"tp_size": None}),
    "pipeline": (plugin.PipelineParallelPlugin, {"pp_size": None}),
    "moe": (plugin.MoeHybridParallelPlugin, {"ep_size": None}),
    "hybrid": (plugin.HybridParallelPlugin, {}),
}
NEUTRAL = {"dp_size": None, "tp_size": 1, "pp_size": 1, "ep_size": 1}


@pytest.mark.parametrize(
    ("name", "ranks", "given", "sizes"),
    [
        ("tensor", 4, {}, (1, 4, 1, 1)),
        ("tensor", 4, {"dp_size": 2}, (2, 2, 1, 1)),
        ("pipeline", 4, {"pp_size": 2}, (2, 1, 2, 1)),
        ("moe", 4, {}, (4, 1, 1, 4)),
        ("moe", 4, {"ep_size": 2}, (4, 1, 1, 2)),
        ("hybrid", 8, {"dp_size": 2, "tp_size": 2, "pp_size": 2, "ep_size": 2}, (2, 2, 2, 2)),
        ("hybrid", 8, {"tp_size": 2, "pp_size": 2}, (2, 2, 2, 1)),
        ("hybrid", 6, {"tp_size": 2, "pp_size": 2}, "tp_size 2 x pp_size 2 = 4"),
        ("hybrid", 4, {"dp_size": 2, "tp_size": 2, "pp_size": 2}, "x dp_size 2 = 8"),
        ("moe", 4, {"ep_size": 3}, "cannot share the experts of 4"),
        ("tensor", 4, {"tp_size": 3}, "4 ranks cannot be"),
    ],
)
def test_a_plugin_lays_ranks_out_as_the_request_was_checked(name, ranks, given, sizes):
    kind, defaults = KINDS[name]
    section = SimpleNamespace(name=name, **(NEUTRAL | defaults | given))
    if isinstance(sizes, tuple):  # What is not given is the constructor's default.
        for options in (vars(section), given):
            assert kind.sizes_of(ranks, options) == mesh_of(section, ranks) == sizes
        return
    for call, arguments in ((mesh_of, (section, ranks)), (kind.sizes_of, (ranks, vars(section)))):
        with pytest.raises(SizeError, match=sizes):
            call(*arguments)


def test_neighbours_share_weights():
    laid = [position(rank, MeshSizes(dp=2, tp=2, pp=2)) for rank in range(8)]
    assert laid == [(pp, dp, tp) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)]
