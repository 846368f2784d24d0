"""Gradients of what tensor ranks hold alike are compared, and only at first."""

import torch
import torch.distributed as dist
from torch import nn

from runner.parallel.tensor_styles import PlanError, ReplicaCheck
from tests.distributed.test_collectives import Counting
from tests.ranks import run_ranks

NAN = float("nan")
ZERO = torch.zeros(64)


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


EXPECTED = {
    "compared in the first step only": [1, 0, 0],
    "rounded": [1],
    "rounded to half precision": [1],
    "3 % off": ["p0"],
    "3 % off in half precision": [1],
    "20 % off in half precision": ["p0"],
    "small beside another gradient": [1],
    "two of four differ": ["p1, p3"],
    "missing on one rank": ["p1"],
    "missing on all ranks": [1],
    "compared after an overflow": [1, "p0"],
    "compared after zeros": [1, 1, "p0"],
    "zero in the first step": [1, "p1"],
    "zero in two steps": [1, 1, 0],
}


def outcomes():
    rank = dist.get_rank()
    same = noise(7)
    differing = noise(rank)
    centred = differing - differing.mean()
    rounded = same * (1 + 1e-5 * differing)
    coarse = same * (1 + 8e-3 * differing)
    off = same * (1.03 if rank else 1.0)
    far_off = same * (1.2 if rank else 1.0)
    missing = None if rank else same
    overflow = same * NAN if rank else same
    half = torch.bfloat16
    return {
        "compared in the first step only": said_of(
            [same, same], [same, same], [differing, differing]
        ),
        "rounded": said_of([rounded]),
        "rounded to half precision": said_of([coarse], dtype=half),
        "3 % off": said_of([off]),
        "3 % off in half precision": said_of([off], dtype=half),
        "20 % off in half precision": said_of([far_off], dtype=half),
        "small beside another gradient": said_of([same * 1e6, differing]),
        "two of four differ": said_of([same, differing, rounded, centred]),
        "missing on one rank": said_of([same, missing]),
        "missing on all ranks": said_of([same, None]),
        "compared after an overflow": said_of([overflow], [differing]),
        "compared after zeros": said_of([ZERO], [ZERO], [differing]),
        "zero in the first step": said_of([same, ZERO], [differing, differing]),
        "zero in two steps": said_of([same, ZERO], [same, ZERO], [differing, differing]),
    }


def test_gradients_that_differ_by_more_than_rounding_are_named():
    for of_rank in run_ranks(outcomes, 2):
        assert of_rank == EXPECTED
