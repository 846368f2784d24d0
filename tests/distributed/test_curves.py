"""Loss and norm are those of one process for twenty steps of SGD and of Adam."""

from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.distributed.cases import FAMILIES, Case, trainer
from tests.distributed.training import Rows
from tests.ranks import run_ranks

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
CURVES = ("train/loss", "grad/norm", "grad/norm_clipped", "clip/fraction")

WHERE = FAMILIES | {("hsdp", 4): "conv", ("zero2", 2): "conv"}


def curves(optimizer: str, model: str, plugin: str | None = None) -> list[list[float]]:
    rows = Rows()
    case = Case(model, "L2", accumulation=2, steps=20)
    trainer(case, plugin, optimizer=OPTIMIZERS[optimizer], sinks=[rows]).fit()
    return [[row[key] for key in CURVES] for row in rows.rows]


@cache
def alone(optimizer: str, model: str) -> list[list[float]]:
    return curves(optimizer, model)


def both(model: str, plugin: str) -> dict[str, Any]:
    return {optimizer: curves(optimizer, model, plugin) for optimizer in OPTIMIZERS}


@pytest.mark.parametrize(("plugin", "world"), WHERE)
@pytest.mark.product(every=4)
def test_twenty_steps_follow_the_curves_of_one_process(plugin, world):
    model = WHERE[plugin, world]
    for rank in run_ranks(both, world, model, plugin):
        for optimizer in OPTIMIZERS:
            wanted = alone(optimizer, model)
            assert len(wanted) == 20
            assert wanted[-1][0] < 0.99 * wanted[0][0], "it has learnt something"
            for ours, expected in zip(rank[optimizer], wanted, strict=True):
                assert ours == pytest.approx(expected, rel=1e-9), optimizer
