"""The loop: rows, skipped steps, schedules, evaluation, and what it prints."""

import json
import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from runner import GradientClipping, Trainer
from runner.booster import NonFiniteGradient
from runner.booster.batch import BatchError
from runner.optim.schedulers import LinearWarmupCosineLR
from tests.distributed.training import Rows


def parts(samples=40, bad=None, batch=8):
    torch.manual_seed(0)
    inputs = torch.randn(samples, 6)
    targets = (inputs @ torch.randn(6, 3)).argmax(-1)
    if bad is not None:
        inputs[bad] = math.nan
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, DataLoader(TensorDataset(inputs, targets), batch)


def fit(model, loader, duration="3ep", clip=("norm", 0.3), **options):
    rows = Rows()
    algorithms = [GradientClipping(*clip)] if clip else []
    summary = Trainer(model, loader, duration, algorithms, sinks=[rows], **options).fit()
    return rows.rows, summary


@pytest.mark.parametrize("clip", [None, ("norm", 0.3), ("value", 0.02), ("adaptive", 0.05)])
def test_rows_agree_with_themselves(clip):
    model, loader = parts()
    rows, summary = fit(model, loader, clip=clip)
    assert [row["train/step"] for row in rows] == list(range(1, 16))
    for row in rows:
        product = row["clip/coef"] * row["grad/norm"]
        assert product == pytest.approx(row["grad/norm_clipped"], rel=1e-9)
        if clip is None:
            assert (row["clip/coef"], row["clip/clipped"]) == (1.0, 0)
            assert "clip/threshold" not in row
            continue
        assert row["clip/threshold"] == clip[1]
        assert row["clip/clipped"] == (row["clip/fraction"] > 0)
        if clip[0] == "norm":
            assert row["clip/coef"] == pytest.approx(min(1, clip[1] / row["grad/norm"]), rel=1e-9)
            assert row["clip/clipped"] == (row["grad/norm"] > clip[1])
    mean = sum(row["clip/clipped"] for row in rows) / len(rows)
    assert summary["clip/ratio_total"] == rows[-1]["clip/ratio_total"] == pytest.approx(mean)
    assert json.dumps(summary)
    if clip is not None:
        assert mean > 0


def test_an_interval_between_rows_loses_no_step():
    every, _ = fit(*parts())
    some, summary = fit(*parts(), log_interval=4, log_flush=3)
    assert [row["train/step"] for row in some] == [4, 5, 8, 10, 12, 15]
    norms = [row["grad/norm"] for row in every]
    clipped = [row["clip/clipped"] for row in every]
    begin = 0
    for row in some:
        end = row["train/step"]
        assert row["grad/norm"] == norms[end - 1]
        assert row["grad/norm_mean"] == pytest.approx(sum(norms[begin:end]) / (end - begin))
        assert row["grad/norm_max"] == max(norms[begin:end])
        assert row["clip/ratio"] == pytest.approx(sum(clipped[begin:end]) / (end - begin))
        assert row["clip/ratio_total"] == pytest.approx(sum(clipped[:end]) / end)
        begin = end
    assert summary["grad/norm"]["max"] == max(norms)
    assert summary["steps"] == 15
    assert summary["best"]["train/loss"] == min(row["train/loss"] for row in every)


def test_a_skipped_step_moves_neither_weights_nor_schedule_and_is_not_clipped():
    model, loader = parts(bad=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LinearWarmupCosineLR(optimizer, 5, warmup_fraction=0.0)
    rows, summary = fit(
        model, loader, "1ep", optimizers=optimizer, schedulers=schedule, eval_dataloader=None
    )
    assert [row["grad/nonfinite"] for row in rows] == [0, 1, 1, 1, 1]
    assert rows[1]["clip/clipped"] == 0
    assert math.isnan(rows[1]["grad/norm_clipped"])
    assert rows[1]["train/lr"] == rows[2]["train/lr"] < rows[0]["train/lr"]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert summary["grad/nonfinite"] == 1
    clipped = sum(row["clip/clipped"] for row in rows)
    assert summary["clip/ratio_total"] == pytest.approx(clipped / 5)


def test_a_run_that_breaks_off_leaves_the_rows_before_it():
    rows = Rows()
    model, loader = parts(bad=30)
    trainer = Trainer(model, loader, "1ep", sinks=[rows], nonfinite="error")
    with pytest.raises(NonFiniteGradient):
        trainer.fit()
    assert [row["train/step"] for row in rows.rows] == [1, 2, 3]


@pytest.mark.parametrize(("duration", "steps"), [("1ep", 5), ("7ba", 7), ("17sp", 3), ("48sp", 6)])
def test_durations(duration, steps):
    rows, summary = fit(*parts(), duration)
    assert len(rows) == summary["steps"] == steps


@pytest.mark.parametrize("flush", [1, 5, 50])
@pytest.mark.parametrize("interval", [1, 4])
def test_evaluation_by_interval_and_at_the_end(flush, interval):
    model, loader = parts()
    rows, summary = fit(
        model,
        loader,
        "12ba",
        eval_dataloader=loader,
        eval_interval="5ba",
        log_flush=flush,
        log_interval=interval,
    )
    evaluated = [row["train/step"] for row in rows if "eval/loss" in row]
    assert evaluated == [5, 10, 12]
    inputs, targets = loader.dataset.tensors
    with torch.no_grad():
        outputs = model(inputs)
    assert rows[-1]["eval/loss"] == pytest.approx(
        nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6
    )
    assert rows[-1]["eval/accuracy"] == (outputs.argmax(-1) == targets).double().mean().item()
    assert summary["best"]["eval/accuracy"] == max(r.get("eval/accuracy", 0) for r in rows)


def test_the_probe_prints_weights_that_move_on_the_last_microbatch():
    said = []
    model, loader = parts()
    fit(model, loader, "2ba", accumulation_steps=4, probe=3, say=said.append)
    assert len(said) == 5  # four microbatches, and the one that is left of the epoch
    values = [line.split(": ")[1] for line in said]
    assert values[0] == values[1] == values[2] != values[3]
    assert "step 1 microbatch 4/4" in said[3]
    assert "step 2 microbatch 1/1" in said[4]


def test_layer_norms_add_up():
    model, loader = parts()
    rows, _ = fit(model, loader, "2ba", per_layer=True)
    for row in rows:
        layers = {key: value for key, value in row.items() if key.startswith("grad/norm/")}
        assert set(layers) == {f"grad/norm/{name}" for name, _ in model.named_parameters()}
        total = math.sqrt(sum(value**2 for value in layers.values()))
        assert total == pytest.approx(row["grad/norm"], rel=1e-6)


def test_batch_norm_under_accumulation_is_warned_of(caplog):
    _, loader = parts()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    with caplog.at_level(logging.WARNING):
        Trainer(model, loader, accumulation_steps=2)
    assert "batch norm sees one microbatch" in caplog.text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(precision):
    model, loader = parts()
    rows, _ = fit(model, loader, "4ep", precision=precision, optimizers=None)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    full, _ = fit(*parts(), "4ep")
    assert rows[0]["grad/norm"] == pytest.approx(full[0]["grad/norm"], rel=0.05)


def test_a_sampler_of_the_users_is_told_the_epoch():
    _, loader = parts()
    sampler = DistributedSampler(loader.dataset, 1, 0, shuffle=True)
    seen = []
    set_epoch = sampler.set_epoch
    sampler.set_epoch = lambda epoch: (seen.append(epoch), set_epoch(epoch))
    model, _ = parts()
    fit(model, DataLoader(loader.dataset, 8, sampler=sampler), "3ep")
    assert seen == [0, 1, 2]


def test_a_trainer_that_is_done_does_no_more():
    model, loader = parts()
    trainer = Trainer(model, loader, "1ep")
    assert trainer.fit()["steps"] == 5
    assert trainer.fit()["steps"] == 5


def test_an_evaluation_without_data_is_no_perfect_one():
    model, loader = parts()
    rows, summary = fit(model, loader, "1ep", eval_dataloader=[])
    assert not any("eval/loss" in row for row in rows)
    assert "eval/loss" not in summary["best"]


def test_rows_before_a_collective_that_fails_are_written():
    def lost(figures):
        raise RuntimeError("peer is gone")

    rows = Rows()
    model, loader = parts()
    trainer = Trainer(model, loader, "1ep", sinks=[rows], log_flush=3)
    trainer.state.meter.mean_over_data = lost
    with pytest.raises(RuntimeError, match="peer is gone"):
        trainer.fit()
    assert [row["train/step"] for row in rows.rows] == [1, 2, 3]


def test_wrong_arguments():
    model, loader = parts()
    with pytest.raises(ValueError, match="one clipping algorithm"):
        Trainer(model, loader, algorithms=[GradientClipping("norm", 1.0)] * 2)
    with pytest.raises(ValueError, match="3 epochs"):
        Trainer(model, loader, "3 epochs")
    with pytest.raises(ValueError, match="no tokens"):
        Trainer(model, loader, "100tok").fit()
    with pytest.raises(ValueError, match="no microbatch"):
        Trainer(model, [], "1ep").fit()


class Named(nn.Module):
    """Reads dictionaries, and has a loss of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, batch):
        return self.head(batch["inputs"])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["targets"])


def named_batches(samples=20):
    _, loader = parts(samples)
    inputs, targets = loader.dataset.tensors
    each = [{"inputs": x, "targets": y} for x, y in zip(inputs, targets, strict=True)]
    return DataLoader(each, 8)


def test_batches_that_are_dictionaries_need_a_model_that_reads_them():
    model, loader = parts(20)
    said = r"forward of Sequential takes input.*a dict.*collate_fn.*loss\("
    with pytest.raises(BatchError, match=said):
        fit(model, named_batches())
    with pytest.raises(BatchError, match="a dict with the keys 'inputs', 'targets'"):
        fit(model, loader, "1ep", eval_dataloader=named_batches())
    model = Named()
    reference = nn.Linear(6, 3)
    reference.load_state_dict(model.head.state_dict())
    options = {"clip": None, "accumulation_steps": 3}
    rows, _ = fit(model, named_batches(), "2ep", eval_dataloader=named_batches(), **options)
    wanted, _ = fit(reference, loader, "2ep", eval_dataloader=loader, **options)
    assert torch.equal(model.head.weight, reference.weight)
    assert rows[-1]["train/samples"] == 40
    assert rows[-1]["eval/loss"] == pytest.approx(wanted[-1]["eval/loss"], rel=1e-6)
    assert rows[-1]["eval/accuracy"] == wanted[-1]["eval/accuracy"]
