"""Modes that know the optimizer decide under every kind of plugin as one process does."""

from functools import partial

import pytest
import torch

from runner.clip import build
from tests.distributed.cases import FAMILIES as EVERY
from tests.distributed.cases import Case, trainer, uneven, unlike
from tests.distributed.training import Rows
from tests.on_device import call_kept_on_device
from tests.ranks import run_ranks

MODES = {
    "rms": ("update", {"threshold": 0.9}),
    "sigma": ("update", {"threshold": 0.001, "rule": "sigma", "window": 2}),
    "spike": ("spike", {"threshold": 4.0, "min_steps": 1}),
    "spike L1": ("spike", {"threshold": 4.0, "min_steps": 1, "norm_type": 1.0}),
}
# Models without biases: the gradient of a key's bias is zero but for rounding, and each optimizer
# here makes that large.
FAMILIES = {
    row: {"gpt": "tied", "moe": "moe_no_bias"}.get(model, model) for row, model in EVERY.items()
} | {
    ("fsdp", 2): "conv",
    ("hsdp", 4): "conv",
}
EXACT = ("train/step", "clip/clipped", "clip/fraction")
CLOSE = ("train/loss", "grad/norm", "grad/norm_clipped", "clip/coef", "clip/threshold", "eval/loss")


def train(model, name, plugin=None, fused=False):
    """Rows of every step, and the weights at the end."""
    mode, options = MODES[name]
    rows = Rows()
    adamw = partial(
        torch.optim.AdamW, lr=0.02, betas=(0.2, 0.6), eps=1e-6, weight_decay=0.1, fused=fused
    )
    made = trainer(Case(model, "none", 2, steps=9), plugin, optimizer=adamw, sinks=[rows])
    clipping = build(mode, **options)
    made.optimizer.bind(clipping)
    made.state.mode = clipping
    made.fit()
    return {"rows": rows.rows, "weights": made.booster.state_dict(made.model)}


def train_all(model, plugin, fused):
    return {name: train(model, name, plugin, fused) for name in MODES}


def assert_agrees(ranks, model):
    for name in MODES:
        ours = [rank[name] for rank in ranks]
        wanted = train(model, name)
        found = uneven(ours)
        for row, expected in zip(ours[0]["rows"], wanted["rows"], strict=True):
            found += [key for key in EXACT if row[key] != expected[key]]
            for key in CLOSE:
                close = pytest.approx(expected.get(key, 0.0), rel=1e-9, nan_ok=True)
                if row.get(key, 0.0) != close:
                    found.append(f"{row['train/step']} {key} {row.get(key)} {expected.get(key)}")
        found += unlike("weights", ours[0]["weights"], wanted["weights"], 1e-8)
        assert not found, name
        clipped = [row["clip/clipped"] for row in wanted["rows"]]
        assert {0, 1} <= {*clipped} or name == "rms"
        assert any(clipped)


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=3)
def test_steps_are_those_of_one_process(plugin, world):
    model = FAMILIES[plugin, world]
    assert_agrees(run_ranks(train_all, world, model, plugin, False), model)


@pytest.mark.parametrize(("plugin", "world"), [row for row in FAMILIES if row[1] == 2])
@pytest.mark.product(every=3)
def test_on_a_device_they_are_too(plugin, world):
    model = FAMILIES[plugin, world]
    ranks = run_ranks(call_kept_on_device, world, train_all, model, plugin, True)
    assert_agrees(ranks, model)
