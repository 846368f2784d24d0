"""Differences of two trainings, and which of them are failures; the naive norm of one rank."""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from runner.clip import Decision
from runner.gradients import Layout, ParamShard, Units
from runner.verify.comparison import (
    compare_mode,
    compare_step,
    disagreements,
    naive_norm,
    relative,
    side_of,
    tensor_errors,
    worst_naive,
)
from tests.ranks import run_ranks

SIDE = side_of(
    Decision(
        norm=torch.tensor(2.0),
        after=torch.tensor(1.0),
        parts_clipped=torch.tensor(0.25),
        threshold=torch.tensor(math.nan),
    )
)
NAN = math.nan
INF = math.inf


def failures(metrics=SIDE, weights=None, drifted=(), ours="ab", reference="ab", history=False):
    ones = [dict.fromkeys(names, torch.ones(2)) for names in (ours, reference)]
    step = compare_step(1, [metrics], ones[0], SIDE, ones[1], 1e-9, history=history)
    return compare_mode([step], weights or {"a": 3e-12}, drifted, 1e-9)["failures"]


def test_an_error_is_relative():
    assert [relative(1.5, 1.0), relative(-1.0, 1.0), relative(0.0, 0.0)] == [0.5, 2.0, 0.0]
    assert relative(INF, INF) == 0.0


@pytest.mark.parametrize("pair", [(1e-300, 0.0), (NAN, 1.0), (1.0, NAN)])
def test_an_error_is_infinite_where_nothing_can_be_compared(pair):
    assert relative(*pair) == INF


ZEROS = torch.zeros(2)
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("ours", "reference", "error"),
    [
        ({"a": ONES * 0.5}, {"a": ONES, "b": 10 * ONES}, 0.5),
        ({"a": ONES * 2e-17}, {"a": ONES * 1e-17, "b": ONES * 10}, 1e-15),
        ({}, {"a": ZEROS, "b": ONES}, 0.0),  # an absent gradient is zeros
        ({}, {"a": ONES}, 1.0),
        ({"a": ONES}, {"b": ONES}, 1000.0),
        ({"a": torch.ones(3)}, {"a": ONES}, INF),
        ({"a": ONES * NAN}, {"a": ONES}, INF),
        ({"a": ONES}, {"a": ONES * NAN}, INF),
        ({"a": ONES}, {"a": ZEROS}, INF),
    ],
)
def test_the_error_of_a_parameter_is_relative_to_its_size(ours, reference, error):
    """But not to less than a thousandth of the largest one."""
    assert tensor_errors(ours, reference)["a"] == pytest.approx(error)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({}, []),
        ({"weights": {"a": 1e-8}}, ["weights after the last step are off by 1e-08"]),
        ({"drifted": list("abcdefg")}, ["the same bits: a, b, c, d, e and 2 more"]),
        ({"metrics": SIDE | {"norm": 2.1}}, ["‖G‖ of step 1 is off by 0.05"]),
        ({"metrics": SIDE | {"norm_clipped": 1.1}}, ["after clipping of step 1 is off"]),
        # A count is right or wrong; one element of a million is no rounding. Gradients of zero up
        # to rounding may be above a limit of their own past, while all gradients agree.
        ({"metrics": SIDE | {"fraction": 0.250001}}, ["0.250001 instead of 0.25"]),
        ({"metrics": SIDE | {"fraction": 0.3}, "history": True}, []),
        (
            {"metrics": SIDE | {"fraction": 0.3, "norm": 2.1}, "history": True},
            ["‖G‖ of step 1 is off by 0.05", "0.3 instead of 0.25"],
        ),
        (
            {"ours": "ab", "reference": "acdefgh"},
            ["the clipped gradient", "b: a gr", "c, d, e, f, g and"],
        ),
    ],
)
def test_what_exceeds_rounding_is_a_failure(made, said):
    lines = failures(**made)
    assert len(lines) == len(said)
    assert all(expected in line for expected, line in zip(said, lines, strict=True))


def test_the_worst_parameters_come_first():
    unit = torch.ones(1)
    steps = [
        compare_step(n, [SIDE], {"a": unit * (1 + error)}, SIDE, {"a": unit}, 1e-9)
        for n, error in ((1, 0.125), (2, 0.25))
    ]
    weights = {"a": 0.2, "b": 0.22, **dict.fromkeys("cdefg", 0.0)}
    worst = compare_mode(steps, weights, [], 1e-9)["worst"]
    assert [tuple(parameter.values()) for parameter in worst[:2]] == [
        ("a", 0.25, "gradient of step 2"),
        ("b", 0.22, "weight"),
    ]
    assert len(worst) == 5


def test_ranks_must_agree_to_the_bit():
    nan = SIDE | {"peak": NAN}
    near = nan | {"norm": math.nextafter(2.0, 3.0)}
    assert [*disagreements(1, [nan, nan])] == []
    [said] = disagreements(4, [nan, nan, near])
    assert said == "norm of step 4 is 2.0000000000000004 on rank 2, 2.0 on rank 0"


def layout_of(gradients):
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return Layout([ParamShard(str(i), p, Units((0, 1))) for i, p in enumerate(parameters)])


def by_torch():
    """What torch's own norm makes of gradients of 3, 4, 12 and 84 in all, by how they lie."""
    first = torch.tensor([[3.0], [4.0]])
    second = torch.tensor([[12.0], [84.0]])
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [distribute_tensor(t, mesh, [Shard(0)]) for t in (first, second)]
    kinds = {
        "whole": [first, second],
        "sharded": rows,
        "replicated": [rows[0], distribute_tensor(second, mesh, [Replicate()])],
        "mixed": [rows[0], second],
        "by rank": [second] if rank else [first],
        "one rank mixed": [rows[0]] if rank else [rows[0], second],
        "one rank empty": [] if rank else rows,
    }
    return {kind: naive_norm(layout_of(gradients), 2.0) for kind, gradients in kinds.items()}


@cache
def on_two_ranks():
    return run_ranks(by_torch, 2)


on_ranks = pytest.mark.xdist_group("torch's own norm")  # the ranks run once


@on_ranks
@pytest.mark.parametrize("kind", ["whole", "sharded", "replicated"])
def test_torchs_own_norm_of_tensors_of_one_kind_is_right(kind):
    for rank, results in enumerate(on_two_ranks()):
        norm = pytest.approx(7225**0.5, rel=1e-6)
        assert results[kind] == {"norm": norm, "rank": rank, "raised": None, "message": ""}


@on_ranks
def test_torchs_own_norm_of_parts_by_rank_is_that_of_a_part():
    parts = [results["by rank"] for results in on_two_ranks()]
    assert [part["norm"] for part in parts] == pytest.approx([5.0, 7200**0.5])
    assert worst_naive(parts, 7225**0.5)["rank"] == 0


@on_ranks
def test_what_torchs_own_norm_raises_is_recorded():
    for results in on_two_ranks():
        assert (results["mixed"]["norm"], results["mixed"]["raised"]) == (None, "RuntimeError")
        assert "mixed torch.Tensor and DTensor" in results["mixed"]["message"]


@on_ranks
def test_a_rank_that_torchs_own_norm_would_leave_waiting_does_not_hang():
    first, second = on_two_ranks()
    assert first["one rank mixed"]["raised"] == "RuntimeError"
    assert second["one rank mixed"] is first["one rank empty"] is None
    assert second["one rank empty"]["norm"] == 0.0


@on_ranks
def test_what_raised_is_worse_than_any_number():
    first, second = on_two_ranks()
    parts = [first["by rank"], second["by rank"]]
    assert worst_naive([None], 1.0) is None
    assert worst_naive([*parts, first["mixed"], None], 1.0) == first["mixed"] | {"error": INF}
    assert worst_naive([parts[0] | {"norm": NAN}], 1.0)["error"] == INF
