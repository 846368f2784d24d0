"""What torch's own call makes of what a rank holds: right, wrong, or raised; and it never hangs."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from runner.clip import Layout, ParamShard, Units
from runner.verify import naive
from runner.verify.comparison import Naive
from tests.ranks import run_ranks


def shard(name, gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return ParamShard(name, parameter, Units(tuple(range(gradient.ndim))))


def on_ranks(kind, norm_type=2.0):
    """One rank's outcome for two gradients of 3, 4, 12 and 84 in all."""
    torch.manual_seed(0)
    first, second = torch.tensor([[3.0], [4.0]]), torch.tensor([[12.0], [84.0]])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [distribute_tensor(t, mesh, [Shard(0)]) for t in (first, second)]
    whole = distribute_tensor(second, mesh, [Replicate()])
    shards = {
        "whole": [first, second],
        "sharded": rows,
        "replicated": [rows[0], whole],
        "mixed": [rows[0], second],
        "by rank": [first] if dist.get_rank() == 0 else [second],
        "one rank mixed": [rows[0], second] if dist.get_rank() == 0 else [rows[0]],
        "one rank empty": rows if dist.get_rank() == 0 else [],
    }[kind]
    layout = Layout([shard(str(i), gradient) for i, gradient in enumerate(shards)])
    return naive.rank_local(layout, norm_type)


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 7225**0.5), (1.0, 103.0), (math.inf, 84.0)])
@pytest.mark.parametrize("kind", ["whole", "sharded", "replicated"])
def test_gradients_of_one_kind_are_measured_right(kind, norm_type, norm):
    for rank, made in enumerate(run_ranks(on_ranks, 2, kind, norm_type)):
        assert made.norm == pytest.approx(norm, rel=1e-6)
        assert made.rank == rank


def test_a_rank_that_holds_a_part_measures_its_part():
    first, second = run_ranks(on_ranks, 2, "by rank")
    assert (first.norm, second.norm) == pytest.approx((5.0, 7200**0.5))
    assert naive.worst([first, second], 7225**0.5).rank == 0


def test_a_mixture_raises_and_is_told_of():
    for made in run_ranks(on_ranks, 2, "mixed"):
        assert made.norm is None
        assert made.raised == "RuntimeError"
        assert "mixed torch.Tensor and DTensor" in made.message


@pytest.mark.parametrize("kind", ["one rank mixed", "one rank empty"])
def test_no_rank_waits_for_one_that_does_not_call(kind):
    first, second = run_ranks(on_ranks, 2, kind)
    if kind == "one rank mixed":
        assert first.raised == "RuntimeError"
        assert second is None
    else:
        assert first is None
        assert second.norm == 0.0


def test_one_process_has_nothing_to_get_wrong():
    assert naive.rank_local(Layout([shard("a", torch.ones(2))]), 2.0) is None
    assert naive.worst([None], 1.0) is None


def test_what_raised_is_worse_than_any_number():
    raised = Naive(None, "RuntimeError", "no", rank=1)
    assert naive.worst([Naive(math.nan), raised, None], 1.0) == raised
    off = naive.worst([Naive(1.0), Naive(1.5, rank=1)], 1.0)
    assert (off.rank, off.error) == (1, 0.5)
    assert naive.worst([Naive(math.nan)], 1.0).error == math.inf
