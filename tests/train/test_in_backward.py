"""A training that clips, or steps, in the backward pass takes the steps of the ordinary order."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Trainer
from runner.booster import SinglePlugin
from runner.clip import build
from runner.telemetry.options import Measurements
from tests.distributed.training import Rows

TIMES = ("time/step_s", "throughput/samples_per_s")

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
    limit = {"warmup_steps": 3, "absolute": 0.5} if mode == "adagc" else {}
    rows = Rows()
    made = Trainer(
        net,
        loader,
        duration,
        build(mode, threshold=1.02 if mode == "adagc" else 0.05, **limit),
        optimizers=optimizer,
        schedulers=schedule,
        accumulation_steps=steps,
        nonfinite="error",
        per_layer=True,
        sinks=[rows],
        clip_in_backward=way[0],
        step_in_backward=way[1],
        **options,
    )
    return made, rows.rows


def require_same(found, wanted):
    assert len(found) == len(wanted) > 0
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - set(TIMES):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize("mode", ["adagc", "value"])
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_and_weights(mode, steps, caplog):
    made = {way: training(way, mode=mode, steps=steps) for way in WAYS}
    assert ("save no memory" in caplog.text) == (steps > 1)
    for trainer, _ in made.values():
        trainer.fit()
    wanted, rows = made[WAYS[0]]
    assert any(row["clip/clipped"] for row in rows)
    assert len({row["train/lr"] for row in rows}) == len(rows)
    for trainer, found in made.values():
        require_same(found, rows)
        for name, weight in wanted.model.unwrap().state_dict().items():
            other = trainer.model.unwrap().state_dict()[name]
            torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("first", WAYS[1:])
def test_resume_also_in_the_other_order(first, tmp_path):
    whole, rows = training(WAYS[0])
    whole.fit()
    begun, _ = training(first, "6ba")
    begun.fit()
    path = begun.save(tmp_path)
    for way in (first, WAYS[0]):
        went_on, found = training(way)
        went_on.load(path)
        went_on.fit()
        require_same(found, rows[6:])


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ((True, False), "clip_cosine"),
        ((True, False), "noise_scale"),
        ((True, True), "update_ratio"),
    ],
)
def test_measurements_that_need_all_gradients_are_refused(way, name):
    with pytest.raises(ValueError, match=f"{name}: .*use clip"):
        training(way, measurements=Measurements(**{name: True}))


def test_updates_are_measured_beside_clipping_in_the_backward_pass():
    both = [training(way, measurements=Measurements(update_ratio=True)) for way in WAYS[:2]]
    for trainer, _ in both:
        trainer.fit()
    require_same(both[1][1], both[0][1])
