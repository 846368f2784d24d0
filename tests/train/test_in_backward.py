"""A training that clips, or steps, in the backward pass takes the steps of the ordinary order."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Trainer
from runner.booster import SinglePlugin
from runner.clip import build
from tests.distributed.training import Rows

TIMES = {"time/step_s", "throughput/samples_per_s"}
WAYS = [(False, False), (True, False), (True, True)]
"""Whether gradients are clipped, and parameters stepped, in the backward pass."""


def training(way, duration="12ba", mode="adagc", steps=1, **options):
    """A trainer of a tiny network with a schedule, and the rows that it will write."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(64, 6) * 3, torch.randint(3, (64,))
    loader = SinglePlugin().prepare_dataloader(TensorDataset(inputs, targets), 8, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    limit = {"threshold": 0.05}
    if mode == "adagc":
        limit = {"threshold": 1.02, "warmup_steps": 3, "absolute": 0.5}
    options |= {"optimizers": optimizer, "schedulers": schedule, "accumulation_steps": steps}
    options |= {"clip_in_backward": way[0], "step_in_backward": way[1], "sinks": [Rows()]}
    algorithms = build(mode, **limit)
    made = Trainer(net, loader, duration, algorithms, nonfinite="error", per_layer=True, **options)
    return made, made.state.meter.sinks[0].rows


def require_same(found, wanted):
    assert len(found) == len(wanted) > 0
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - TIMES:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize("mode", ["adagc", "value"])
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_weights_and_a_resume_in_the_other_order(mode, steps, caplog, tmp_path):
    made = [training(way, mode=mode, steps=steps) for way in WAYS]
    assert ("save no memory" in caplog.text) == (steps > 1)
    for trainer, _ in made:
        trainer.fit()
    wanted, rows = made[0]
    assert any(row["clip/clipped"] for row in rows)
    assert len({row["train/lr"] for row in rows}) == len(rows)
    for trainer, found in made:
        require_same(found, rows)
        pairs = zip(trainer.model.parameters(), wanted.model.parameters(), strict=True)
        for ours, weight in pairs:
            torch.testing.assert_close(ours, weight, rtol=1e-6, atol=1e-7)
    begun, _ = training(WAYS[steps], "6ba", mode, steps)
    begun.fit()
    path = begun.save(tmp_path)
    for way in (WAYS[steps], WAYS[0]):
        went_on, found = training(way, mode=mode, steps=steps)
        went_on.load(path)
        went_on.fit()
        require_same(found, rows[6:])
