"""A step does not depend on how its samples are split into microbatches and over ranks."""

import math

import pytest
import torch

from runner import Trainer
from runner.booster import SinglePlugin, TorchDDPPlugin
from runner.clip import build
from tests.distributed.training import Rows, images, network, tokens
from tests.ranks import run_ranks

SAME = ("train/loss", "grad/norm", "grad/norm_clipped", "clip/coef", "eval/loss")
COUNTS = ("train/step", "train/samples", "train/tokens", "clip/clipped", "eval/accuracy")
THRESHOLDS = {"none": None, "norm": 0.3, "value": 0.01, "adaptive": 0.02}


def train(kind, mode, samples, batch_size, accumulation, ddp=False, dtype=torch.float64):
    """Rows, final weights and clipped gradients of two epochs of plain SGD."""
    plugin = TorchDDPPlugin() if ddp else SinglePlugin()
    data = images(samples) if kind == "images" else tokens(samples)
    if data.inputs.is_floating_point():
        data.inputs = data.inputs.to(dtype)
    model = network(kind).to(dtype)
    loader = plugin.prepare_dataloader(data, batch_size, shuffle=True, seed=5)
    rows = Rows()
    trainer = Trainer(
        model,
        loader,
        "2ep",
        algorithms=build(mode, threshold=THRESHOLDS[mode]),
        eval_dataloader=plugin.prepare_dataloader(data, batch_size),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.2),
        plugin=plugin,
        accumulation_steps=accumulation,
        sinks=[rows],
    )
    gradients = []
    step = trainer.optimizer.step

    def keep():
        gradients.append([p.grad.clone() for p in model.parameters()])
        return step()

    trainer.optimizer.step = keep
    summary = trainer.fit()
    return {
        "rows": rows.rows,
        "weights": [p.detach() for p in model.parameters()],
        "gradients": gradients,
        "summary": summary,
    }


def assert_same(ours, reference, rel=1e-9):
    assert len(ours["rows"]) == len(reference["rows"])
    for row, wanted in zip(ours["rows"], reference["rows"], strict=True):
        assert [row.get(key) for key in COUNTS] == [wanted.get(key) for key in COUNTS]
        for key in SAME:
            assert row.get(key, 0.0) == pytest.approx(wanted.get(key, 0.0), rel=rel), key
        assert row["clip/fraction"] == pytest.approx(wanted["clip/fraction"], abs=1e-12)
    steps = zip(ours["gradients"], reference["gradients"], strict=True)
    for gradients, wanted in steps:
        for gradient, expected in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=rel, atol=1e-12)
    for weight, expected in zip(ours["weights"], reference["weights"], strict=True):
        torch.testing.assert_close(weight, expected, rtol=rel, atol=1e-12)


def assert_binds(result, mode):
    clipped = [row["clip/clipped"] for row in result["rows"]]
    assert (sum(clipped) > 0) == (mode != "none")


@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.parametrize("mode", ["none", "norm", "value", "adaptive"])
@pytest.mark.parametrize("samples", [77, 73])
def test_accumulation_is_one_big_batch(kind, mode, samples):
    big = train(kind, mode, samples, batch_size=32, accumulation=1)
    small = train(kind, mode, samples, batch_size=8, accumulation=4)
    assert_same(small, big)
    assert_binds(big, mode)
    microbatches = math.ceil(samples / 8)
    assert big["summary"]["steps"] == 2 * math.ceil(microbatches / 4)


@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.parametrize("mode", ["none", "norm", "value", "adaptive"])
def test_two_ranks_are_one_process(kind, mode):
    # 73 samples in windows of 32: the last microbatch leaves the second rank without a sample.
    one = train(kind, mode, 73, batch_size=32, accumulation=1)
    for batch_size, accumulation in ((4, 4), (16, 1)):
        both = run_ranks(train, 2, kind, mode, 73, batch_size, accumulation, True)
        for rank in both:
            assert_same(rank, one)
        # Replicas hold the same bits.
        for a, b in zip(both[0]["weights"], both[1]["weights"], strict=True):
            assert torch.equal(a, b)


def test_float32_agrees_to_1e_5():
    big = train("tokens", "norm", 77, 32, 1, dtype=torch.float32)
    small = train("tokens", "norm", 77, 8, 4, dtype=torch.float32)
    ranks = run_ranks(train, 2, "tokens", "norm", 77, 4, 4, True, torch.float32)
    for other in (small, ranks[0]):
        for row, wanted in zip(other["rows"], big["rows"], strict=True):
            assert row["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=1e-5)
        for weight, expected in zip(other["weights"], big["weights"], strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
