"""Gradients of what tensor ranks hold alike are compared, and only at first."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.booster.plugin import TensorParallelPlugin
from runner.parallel.replica_check import ReplicaCheck
from runner.parallel.tensor_styles import PlanError
from tests.distributed.by_hand import Loop
from tests.distributed.odd_models import batch_for, make
from tests.distributed.test_collectives import Counting
from tests.ranks import run_ranks

NAN, ZERO = float("nan"), torch.zeros(64)


def noise(seed):
    return torch.randn(64, generator=torch.Generator().manual_seed(seed))


def said_of(*steps, dtype=torch.float32):
    """Return, for each step, the collectives and the gradients that differed.

    Args:
        steps: for each step, the gradients of the parameters ``p0``, ``p1`` and so on.
        dtype: data type of the parameters.
    """
    parameters = [nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in steps[0]]
    agree = ReplicaCheck({f"p{i}": p for i, p in enumerate(parameters)}, dist.group.WORLD)
    said = []
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(dtype)
        with Counting() as counter:
            try:
                agree()
            except PlanError as error:
                said.append(str(error).partition(":")[0])
            else:
                said.append(counter.calls.total())
    return said


def looks():
    rank = dist.get_rank()
    same, own = noise(7), noise(rank)
    rounded = same * (1 + 1e-5 * own)
    coarse = same * (1 + 8e-3 * own)
    missing = None if rank else same
    centred = noise(rank) - noise(rank).mean()
    return {
        "same, three steps": said_of([same, same], [same, same], [own, own]),
        "rounded": said_of([rounded]),
        "rounded to bfloat16": said_of([coarse], dtype=torch.bfloat16),
        "rounding alone": said_of([same * 1e6, own]),
        "parts": said_of([same, own, rounded, centred]),
        "missing on one": said_of([same, missing]),
        "missing on all": said_of([same, None]),
        "an overflow": said_of([same * NAN if rank else same], [own]),
        "no gradient yet": said_of([ZERO], [ZERO], [own]),
        "zero at first": said_of([same, ZERO], [own, own]),
        "zero twice": said_of([same, ZERO], [same, ZERO], [own, own]),
    }


def collectives_of_steps():
    """Those that make gradients final, step by step, with and without the first look."""
    loop = Loop(TensorParallelPlugin(), make("gpt"))
    found = []
    for _ in range(3):
        loop.backward(*batch_for("gpt"))
        with Counting() as counter:
            loop.optimizer.unscale()
        found.append(counter.calls.total())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return found


def asked():
    return looks(), collectives_of_steps()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(asked, 2)


def test_gradients_are_compared_once_and_by_more_than_rounding(ranks):
    for said, _ in ranks:
        assert said == {
            "same, three steps": [1, 0, 0],
            "rounded": [1],
            "rounded to bfloat16": [1],
            "rounding alone": [1],
            "parts": ["p1, p3"],
            "missing on one": ["p1"],
            "missing on all": [1],
            "an overflow": [1, "p0"],
            "no gradient yet": [1, 1, "p0"],
            "zero at first": [1, "p1"],
            "zero twice": [1, 1, 0],
        }


def test_only_the_first_step_takes_a_collective_for_it(ranks):
    for _, (first, *others) in ranks:
        assert others == [first - 1] * 2
