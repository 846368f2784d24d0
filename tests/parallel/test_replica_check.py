"""Gradients of what tensor ranks hold alike are compared, and only at first."""

import torch
import torch.distributed as dist
from torch import nn

from runner.parallel.tensor_styles import PlanError, ReplicaCheck
from tests.distributed.test_collectives import Counting
from tests.ranks import run_ranks

NAN, ZERO = float("nan"), torch.zeros(64)


def noise(seed):
    return torch.randn(64, generator=torch.Generator().manual_seed(seed))


def said_of(*steps, dtype=torch.float32):
    """For each step, the number of collectives, or the parameters ``p0``, ... that differed."""
    parameters = [nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in steps[0]]
    check = ReplicaCheck({f"p{i}": p for i, p in enumerate(parameters)}, dist.group.WORLD)
    said = []
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(dtype)
        with Counting() as counter:
            try:
                check()
            except PlanError as error:
                said.append(str(error).partition(":")[0])
            else:
                said.append(counter.calls.total())
    return said


def looks():
    rank = dist.get_rank()
    same, own = noise(7), noise(rank)
    rounded, coarse = same * (1 + 1e-5 * own), same * (1 + 8e-3 * own)
    missing, centred = None if rank else same, noise(rank) - noise(rank).mean()
    half = {"dtype": torch.bfloat16}
    off = same * (1.03 if rank else 1.0)
    return [
        (said_of([same, same], [same, same], [own, own]), [1, 0, 0]),
        (said_of([rounded]), [1]),
        (said_of([coarse], **half), [1]),
        (said_of([off]), ["p0"]),
        (said_of([off], **half), [1]),
        (said_of([same * (1.2 if rank else 1.0)], **half), ["p0"]),
        (said_of([same * 1e6, own]), [1]),  # rounding alone
        (said_of([same, own, rounded, centred]), ["p1, p3"]),
        (said_of([same, missing]), ["p1"]),
        (said_of([same, None]), [1]),
        (said_of([same * NAN if rank else same], [own]), [1, "p0"]),  # an overflow
        (said_of([ZERO], [ZERO], [own]), [1, 1, "p0"]),
        (said_of([same, ZERO], [own, own]), [1, "p1"]),
        (said_of([same, ZERO], [same, ZERO], [own, own]), [1, 1, 0]),
    ]


def test_gradients_are_compared_once_and_by_more_than_rounding():
    for said in run_ranks(looks, 2):
        assert [found for found, _ in said] == [wanted for _, wanted in said]
