"""A step does not depend on how its samples are split into microbatches and over ranks."""

import pytest
import torch

from runner import Trainer
from runner.booster import SinglePlugin, TorchDDPPlugin
from runner.clip import build
from tests.distributed.training import Rows, images, network, tokens
from tests.ranks import run_ranks

SAME = ("train/loss", "grad/norm", "grad/norm_clipped", "clip/coef", "clip/fraction", "eval/loss")
COUNTS = ("train/step", "train/samples", "train/tokens", "clip/clipped", "eval/accuracy")
THRESHOLDS = {"none": None, "norm": 0.3, "value": 0.01, "adaptive": 0.02}
ASKED = [(k, mode, n) for k in ("images", "tokens") for mode in THRESHOLDS for n in (73, 77)]


def train(kind, mode, samples, batch_size, accumulation):
    """Rows and final weights of two epochs of plain SGD."""
    ranks = torch.distributed.is_initialized()
    plugin = TorchDDPPlugin() if ranks else SinglePlugin()
    data = images(samples) if kind == "images" else tokens(samples)
    if data.inputs.is_floating_point():
        data.inputs = data.inputs.double()
    model, rows = network(kind).double(), Rows()
    Trainer(
        model,
        plugin.prepare_dataloader(data, batch_size, shuffle=True, seed=5),
        "2ep",
        algorithms=build(mode, threshold=THRESHOLDS[mode]),
        eval_dataloader=plugin.prepare_dataloader(data, batch_size),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.2),
        plugin=plugin,
        accumulation_steps=accumulation,
        sinks=[rows],
    ).fit()
    return rows.rows, [p.detach() for p in model.parameters()]


def train_all(batch_size, accumulation):
    return [train(*each, batch_size, accumulation) for each in ASKED]


def assert_same(ours, wanted):
    for row, expected in zip(ours[0], wanted[0], strict=True):
        assert [row.get(key) for key in COUNTS] == [expected.get(key) for key in COUNTS]
        for key in SAME:
            assert row.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), 1e-9, 1e-12), key
    for weight, expected in zip(ours[1], wanted[1], strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)


def test_accumulation_and_two_ranks_are_one_big_batch():
    """With 73 samples in windows of 32, the last microbatch leaves a rank without a sample."""
    big, small = train_all(32, 1), train_all(8, 4)
    ranks = run_ranks(train_all, 2, 4, 4)
    for number, (_, mode, samples) in enumerate(ASKED):
        rows = big[number][0]
        assert len(rows) == 2 * -(-samples // 32)
        assert any(row["clip/clipped"] for row in rows) == (mode != "none")
        for ours in (small, *ranks):
            assert_same(ours[number], big[number])
        assert all(map(torch.equal, ranks[0][number][1], ranks[1][number][1]))
