"""Clipping inside of the fused step gives the weights of clipping before it, under every plugin."""

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch

from runner.booster.fused import Fold
from tests.distributed.cases import FAMILIES, Case, trainer
from tests.distributed.training import Rows
from tests.ranks import run_ranks

# An eps near the size of the gradients: rounding errors of gradients that are zero stay small.
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.003, eps=1e-3, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}

STEPS = 30

NO_DTENSORS = ("fsdp", "hsdp", "zero2", "zero3", "tensor", "sequence", "moe_zero3", "hybrid")
"""Beginnings of the plugins with DTensors, which torch's fused SGD does not take."""


def trained(plugin: str, model: str, optimizer: str, folds: bool, steps: int):
    """Weights after some steps, losses, and how many of the steps were folded on this rank."""
    taken = 0
    takes = Fold.takes

    def counted(fold: Fold, *given: object) -> bool:
        nonlocal taken
        here = folds and takes(fold, *given)
        taken += here
        return here

    rows = Rows()
    case = Case(model, "L2", accumulation=2, double=False, steps=steps)
    with patch.object(Fold, "takes", counted):
        made = trainer(case, plugin, optimizer=OPTIMIZERS[optimizer], sinks=[rows])
        made.fit()
    losses = [row["train/loss"] for row in rows.rows]
    return made.booster.state_dict(made.model), losses, taken


def apart_by(weights, others) -> float:
    """Norm of the difference of two models, relative to the norm of the second."""
    assert weights.keys() == others.keys()
    off = sum(
        (weights[name] - other).double().square().sum().item() for name, other in others.items()
    )
    return math.sqrt(off / sum(other.double().square().sum().item() for other in others.values()))


def both(plugin: str, model: str, optimizers: list[str], steps: int):
    return {
        name: [trained(plugin, model, name, folds, steps) for folds in (True, False)]
        for name in optimizers
    }


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=4)
def test_folded_steps_are_those_of_clipping_first(plugin, world):
    names = ["adamw"] if plugin.startswith(NO_DTENSORS) else list(OPTIMIZERS)
    ranks = run_ranks(both, world, plugin, FAMILIES[plugin, world], names, STEPS)
    for name, (folded, apart) in ranks[0].items():
        assert apart_by(folded[0], apart[0]) < 1e-6, name
    for rank in ranks:
        for name, (folded, apart) in rank.items():
            assert folded[2] > STEPS // 2, f"{name}: {folded[2]} of {STEPS} steps were folded"
            assert apart[2] == 0
            assert folded[1] == pytest.approx(apart[1], rel=1e-5)
            assert folded[1][-1] < 0.99 * folded[1][0], "it has learnt something"
