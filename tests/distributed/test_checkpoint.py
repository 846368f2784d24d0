"""A training that continues from a checkpoint takes the steps of one that never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.export import whole_model
from runner.checkpoint.folder import manifest_of
from runner.optim.schedulers import CosineAnnealingLR
from tests.distributed.cases import FAMILIES, MODELS, Case, trainer
from tests.distributed.training import Rows
from tests.ranks import run_ranks
from tests.train.test_state import timeless

STEPS, SAVED = 7, 4
"""An epoch has three steps, so the checkpoint lies inside the second epoch."""


def made(model: str, plugin: str | None, rows: Rows, **options: Any) -> Any:
    schedulers: list[Any] = []

    def adam(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        schedulers.append(CosineAnnealingLR(optimizer, STEPS))
        return optimizer

    case = Case(model, "L2", accumulation=2, steps=STEPS)
    training = trainer(case, plugin, optimizer=adam, sinks=[rows], log_flush=3, **options)
    training.state.schedulers = schedulers
    return training


def held(training: Any) -> dict[str, Any]:
    """Weights of the whole model, the rate, the counts and the random state of this rank."""
    return {
        "weights": training.booster.state_dict(training.model),
        "rate": [group["lr"] for group in training.optimizer.param_groups],
        "progress": tuple(training.state.progress),
        "random": torch.get_rng_state(),
    }


def uninterrupted(model: str, plugin: str, folder: Path) -> Any:
    rows = Rows()
    training = made(model, plugin, rows)
    step = training._step
    at: dict[str, Any] = {}

    def saving(*args: Any) -> None:
        step(*args)
        if training.state.progress.step == SAVED:
            training.save(folder)
            at.update(held(training))

    training._step = saving
    training.fit()
    return {"at": at, "end": held(training), "rows": [timeless(row) for row in rows.rows]}


def continued(model: str, plugin: str, checkpoint: Path) -> Any:
    rows = Rows()
    training = made(model, plugin, rows)
    training.load(checkpoint)
    at = held(training)
    training.fit()
    return {"at": at, "end": held(training), "rows": [timeless(row) for row in rows.rows]}


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=2)
def test_it_continues_to_the_bit(plugin, world, tmp_path):
    model = FAMILIES[plugin, world]
    wanted = run_ranks(uninterrupted, world, model, plugin, tmp_path)
    [checkpoint] = tmp_path.iterdir()
    assert checkpoint.name == f"step_{SAVED:09d}"
    found = run_ranks(continued, world, model, plugin, checkpoint)
    for one, other in zip(wanted, found, strict=True):
        assert other["rows"] == one["rows"][SAVED:]
        for moment in ("at", "end"):
            torch.testing.assert_close(other[moment], one[moment], rtol=0, atol=0)
    # One process without a plugin reads the weights of all ranks.
    exported = whole_model(checkpoint, manifest_of(checkpoint))
    MODELS[model]().double().load_state_dict(exported, strict=True)
    torch.testing.assert_close(exported, wanted[0]["at"]["weights"], rtol=0, atol=0)
