"""Who shares an axis with whom, and what is said of sizes that do not multiply to the ranks."""

import itertools

import pytest
import torch.distributed as dist

from runner.booster import HybridParallelPlugin
from runner.config.sizes import MeshSizes
from runner.parallel.mesh import Axes, position
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("ranks", "given", "said"),
    [
        (4, {"tp_size": 3}, "4 ranks are no multiple of tp_size 3: start 3 or 6 ranks by torchrun"),
        (4, {"dp_size": 3}, "4 ranks are not dp_size 3: start 3 ranks by torchrun"),
        (
            2,
            {"tp_size": 2, "pp_size": 2},
            "2 ranks are no multiple of tp_size 2 x pp_size 2 = 4: start 4 ranks by torchrun",
        ),
        (
            4,
            {"ep_size": 3},
            "3 ranks cannot share the experts of 4 data-parallel ranks evenly: give ep_size=1, 2 "
            "or 4, or another dp_size",
        ),
        (
            8,
            {"tp_size": 4, "ep_size": 4},
            "4 ranks cannot share the experts of 2 data-parallel ranks evenly: give ep_size=1 or "
            "2, or another dp_size",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(ranks, given, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        HybridParallelPlugin.sizes_of(ranks, given)


@pytest.mark.parametrize(
    "sizes", [MeshSizes(2, 2, 2), MeshSizes(3, 1, 2), MeshSizes(4, 2, 1), MeshSizes(1, 1, 4)]
)
def test_a_rank_has_one_place_and_a_place_one_rank(sizes):
    ranks = sizes.dp * sizes.tp * sizes.pp
    places = [position(rank, sizes) for rank in range(ranks)]
    assert sorted(places) == sorted(
        itertools.product(range(sizes.pp), range(sizes.dp), range(sizes.tp))
    )
    # Ranks that exchange most are neighbours.
    assert all(position(rank, sizes)[2] == rank % sizes.tp for rank in range(ranks))


def groups_of(cases):
    """For each of ``cases``, the ranks that this rank shares each axis with."""
    found = []
    for sizes in cases:
        axes = Axes.of("cpu", sizes)
        names = ("pp", "dp", "tp", "ep", "edp")
        groups = {n: dist.get_process_group_ranks(getattr(axes, n).get_group()) for n in names}
        # Each group has threads and sockets: the next model has the same ones.
        again = Axes.of("cpu", sizes)
        assert all(getattr(again, n).get_group() is getattr(axes, n).get_group() for n in names)
        found.append((position(dist.get_rank(), sizes), groups))
    return found


def test_groups_are_the_ranks_that_differ_along_one_axis():
    cases = [
        MeshSizes(4, ep=2),
        MeshSizes(2, 2),
        MeshSizes(2, 1, 2, 2),
        MeshSizes(1, 2, 2),
        MeshSizes(1, 1, 4),
    ]
    ranks = run_ranks(groups_of, 4, cases)
    for number, sizes in enumerate(cases):
        places = [rank[number][0] for rank in ranks]
        for rank, result in enumerate(ranks):
            stage, part, shard = places[rank]
            groups = result[number][1]
            for axis, free in (("pp", 0), ("dp", 1), ("tp", 2)):
                alike = [
                    other
                    for other, place in enumerate(places)
                    if all(place[i] == places[rank][i] for i in range(3) if i != free)
                ]
                assert groups[axis] == alike
            data = {p: r for r, p in enumerate(places) if p[0] == stage and p[2] == shard}
            first = part - part % sizes.ep
            near = [data[stage, first + i, shard] for i in range(sizes.ep)]
            assert groups["ep"] == near, "experts are spread over neighbouring data parts"
            same = range(part % sizes.ep, sizes.dp, sizes.ep)
            assert groups["edp"] == [data[stage, i, shard] for i in same]
