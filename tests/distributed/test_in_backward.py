"""Clipping in the backward pass, and stepping there, equals plain PyTorch under every plugin."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from runner.booster import Booster, SinglePlugin, TorchFSDPPlugin
from runner.clip import build
from tests.against_torch.by_tensor import MODES, STEPS, batch, network, optimizers, train_plain
from tests.ranks import run_ranks

PLUGINS = {
    "single": SinglePlugin,
    "fsdp": TorchFSDPPlugin,
    "hsdp": lambda: TorchFSDPPlugin(dp_replicate=2),
}

WAYS = [(mode, True, 1) for mode in MODES]
WAYS += [(mode, False, 2) for mode in MODES if mode != "update"]
"""Mode, whether the optimizer steps in the backward pass, and microbatches of a step."""

FEW = [("value", True, 1), ("adaptive", False, 2), ("adagc", True, 1)]


def train(plugin, mode, step, micros):
    booster = Booster(plugin=plugin, nonfinite="error")
    raw = network()
    model, optimizer, *_ = booster.boost(raw, optimizers(raw))
    threshold, options = MODES[mode]
    made = build(mode, threshold=threshold, **options)
    optimizer.clip_in_backward(made, step=step)
    rows = []
    for number in range(STEPS):
        for micro in range(micros):
            halves = zip(*(x.chunk(2) for x in batch(number, micro)), strict=True)
            mine = [*halves][plugin.data_rank :: plugin.data_size]
            with booster.no_sync(model) if micro < micros - 1 else nullcontext():
                losses = [F.cross_entropy(model(x), y) for x, y in mine]
                booster.backward(sum(losses) / len(losses) / micros, optimizer)
        kept = [p for p in raw.parameters() if p.grad is not None]
        freed = step and (mode != "adagc" or number >= MODES[mode][1]["warmup_steps"])
        assert bool(kept) != freed
        rows.append(optimizer.clip(made))
        optimizer.step()
        optimizer.zero_grad()
    rows = [(row.norm, row.norm_clipped, row.fraction) for row in rows]
    return rows, {n: v.clone() for n, v in booster.state_dict(model).items()}, made.state_dict()


def all_ways(name, ways):
    return [train(PLUGINS[name](), *way) for way in ways]


def compare(found, way):
    mode, _, micros = way
    rows, weights = train_plain(mode, micros)
    for number, (got, wanted) in enumerate(zip(found[0], rows, strict=True)):
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), (way, number)
    assert any(row[2] for row in rows) == (mode != "none")
    for name, weight in weights.items():
        torch.testing.assert_close(
            found[1][name], weight, rtol=1e-8, atol=1e-10, msg=f"{way} {name}"
        )


def test_one_process():
    for number, found in enumerate(all_ways("single", WAYS)):
        compare(found, WAYS[number])


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "single"])
def test_two_ranks(name):
    ways = WAYS if name == "fsdp" else FEW
    ranks = run_ranks(all_ways, 2, name, ways)
    for number, way in enumerate(ways):
        compare(ranks[0][number], way)
        assert ranks[1][number][0] == ranks[0][number][0], way
        assert str(ranks[1][number][2]) == str(ranks[0][number][2]), way
