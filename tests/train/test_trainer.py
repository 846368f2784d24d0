"""The loop: windows, rows, skipped steps, schedules, evaluation, and what it prints."""

import logging
import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from runner import Booster, GradientClipping, Log, Trainer
from runner.booster import NonFiniteGradient
from runner.config.accumulation import AccumulationSteps
from runner.config.notation import Duration
from runner.train.callbacks import Probe
from runner.train.progress import Progress, length
from runner.train.stop import Stopped
from tests.clip.reference import refused
from tests.distributed.training import Rows
from tests.trainers import trainer_of

ONE_MICROBATCH = AccumulationSteps.of(1)


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
    summary = trainer_of(model, loader, duration, algorithms, sinks=[rows], **options).fit()
    return rows.rows, summary


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        *(("3ep", 9), ("7ba", 7), ("77sp", 3), ("78sp", 4), ("154sp", 6), ("186sp", 7)),
        ("1540tok", 6),
    ],
)
def test_total_steps_agree_with_counting(duration, expected):
    duration = Duration.parse(duration)
    progress = Progress()
    assert length(duration, 77, 32, 10, ONE_MICROBATCH).steps == expected
    while not progress.reached(duration):
        k = progress.step % 3
        samples = min(32, 77 - 32 * k)
        progress = progress.after(1, samples, 10 * samples, end_of_epoch=k == 2)
    assert progress.step == expected
    assert length(Duration.parse("10tok"), 77, 32, None, ONE_MICROBATCH) is None


def windows_one_by_one(duration, accumulation):
    """Steps and microbatches of 77 samples in microbatches of 8, of 10 tokens each."""
    progress = Progress()
    microbatches = 0
    while not progress.reached(duration):
        count = min(accumulation.at(progress.of), 10 - progress.batch)
        samples = min(8 * count, 77 - 8 * progress.batch)
        microbatches += count
        ends = progress.batch + count == 10
        progress = progress.after(count, samples, 10 * samples, ends)
    return progress.step, microbatches


@pytest.mark.parametrize("end", ["7ep", "41ba", "500sp", "5001tok"])
@pytest.mark.parametrize("starts", ["2ep 3ep", "3ba 17ba", "50sp 231sp", "500tok 2310tok"])
@pytest.mark.parametrize("counts", [(1, 2, 4), (3, 16, 1)])
def test_the_length_of_a_training_in_phases_agrees_with_counting(end, starts, counts):
    first, second = starts.split()
    accumulation = AccumulationSteps.of(dict(zip([0, first, second], counts, strict=True)))
    duration = Duration.parse(end)
    counted = windows_one_by_one(duration, accumulation)
    assert length(duration, 77, 8, 10, accumulation) == counted


def test_phases_in_tokens_of_data_without_any_are_refused():
    trainer = Trainer(*parts(), "3ba", accumulation_steps={0: 1, "10tok": 2})
    refused(ValueError, "this data has no tokens", trainer.fit)


@pytest.mark.parametrize(("duration", "steps"), [("1ep", 5), ("7ba", 7), ("17sp", 3), ("48sp", 6)])
def test_a_training_lasts_as_long_as_asked(duration, steps):
    assert Trainer(*parts(), duration).fit()["steps"] == steps


def test_a_training_that_has_ended_does_no_more():
    trainer = Trainer(*parts(), "7ba")
    assert trainer.fit()["steps"] == trainer.fit()["steps"] == 7


def test_a_training_whose_bar_is_off_prints_nothing(capfd):
    Trainer(*parts(), "1ep", log=Log(bar=False)).fit()
    assert capfd.readouterr() == ("", "")


class Interrupts:
    def on_start(self, trainer):
        raise KeyboardInterrupt


@pytest.mark.parametrize(("ranks", "every"), [(1, 1), (2, 50)])
def test_only_a_single_watched_rank_flushes_each_step(ranks, every, monkeypatch):
    """Ranks flush together, and the first one alone is watched."""
    monkeypatch.setattr("runner.train.recording.is_watched", lambda stream: True)
    trainer = Trainer(*parts(), callbacks=[Interrupts()])
    count = patch.object(type(trainer.plugin), "world_size", ranks)
    with count, pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.state.meter.flush_every == every


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_watched_script_says_that_it_was_interrupted(ranks, capfd, monkeypatch):
    monkeypatch.setattr("runner.train.recording.is_watched", lambda stream: True)
    trainer = Trainer(*parts(), callbacks=[Interrupts()])
    count = patch.object(type(trainer.plugin), "world_size", ranks)
    with count, pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert capfd.readouterr().err == "training: interrupted\n"


def test_a_watched_script_says_after_how_many_steps_it_was_terminated(capfd, monkeypatch):
    monkeypatch.setattr("runner.train.recording.is_watched", lambda stream: True)
    model, loader = parts()
    trainer = Trainer(model, (batch for batch in loader), "3ba")  # a stream has no length
    trainer.stop = lambda: 15
    refused(Stopped, "", trainer.fit)
    assert "training: terminated after 1 of 3 steps" in capfd.readouterr().err


@pytest.mark.parametrize("why", ["a bad gradient", "a lost rank"])
def test_a_run_that_breaks_off_leaves_the_rows_before_it(why):
    def lost(values):
        raise RuntimeError("peer is gone")

    rows = Rows()
    model, loader = parts(bad=30 if why == "a bad gradient" else None)
    options = {"booster": Booster(nonfinite="error"), "log": Log([rows], flush=3)}
    trainer = Trainer(model, loader, "1ep", **options)
    if why == "a lost rank":
        trainer.state.meter.mean_over_data = lost
    if why == "a bad gradient":
        refused(NonFiniteGradient, "norm is nan", trainer.fit)
    else:
        refused(RuntimeError, "peer is gone", trainer.fit)
    assert [row["train/step"] for row in rows.rows] == [1, 2, 3]


EVERY_FLUSH = pytest.mark.parametrize(("flush", "interval"), [(1, 1), (5, 4), (50, 1), (50, 4)])


def evaluated(flush, interval):
    """The model, the data, the rows and the summary of 12 steps with evaluations."""
    model, loader = parts()
    options = {"eval_interval": "5ba", "log_flush": flush, "log_interval": interval}
    rows, summary = fit(model, loader, "12ba", eval_dataloader=loader, **options)
    return model, loader.dataset.tensors, rows, summary


@EVERY_FLUSH
def test_the_last_step_is_evaluated_as_each_interval_is(flush, interval):
    _, _, rows, _ = evaluated(flush, interval)
    assert [row["train/step"] for row in rows if "eval/loss" in row] == [5, 10, 12]


@EVERY_FLUSH
def test_an_evaluation_is_that_of_the_whole_data(flush, interval):
    model, (inputs, targets), rows, _ = evaluated(flush, interval)
    with torch.no_grad():
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets).item()
    assert rows[-1]["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert rows[-1]["eval/accuracy"] == (outputs.argmax(-1) == targets).double().mean().item()


@EVERY_FLUSH
def test_the_summary_has_the_best_evaluation(flush, interval):
    _, _, rows, summary = evaluated(flush, interval)
    assert summary["best"]["eval/accuracy"] == max(r.get("eval/accuracy", 0) for r in rows)


def test_the_probe_prints_weights_that_move_on_the_last_microbatch():
    lines = []
    fit(*parts(), "2ba", accumulation_steps=4, callbacks=[Probe(3, lines.append)])
    assert len(lines) == 5  # four microbatches, and the one that is left of the epoch
    values = [line.split(": ")[1] for line in lines]
    assert values[0] == values[1] == values[2] != values[3]
    assert "step 1 microbatch 4/4" in lines[3]
    assert "step 2 microbatch 1/1" in lines[4]


def test_batch_norm_of_one_sample_names_what_leaves_a_short_microbatch_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    batches = [(torch.randn(1, 3), torch.randint(4, (1,)))]
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        Trainer(model, batches, "1ba").fit()
    assert "data.drop_last=true" in " ".join(raised.value.__notes__)


def test_batch_norm_under_accumulation_is_warned_of(caplog):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    with caplog.at_level(logging.WARNING):
        Trainer(model, parts()[1], accumulation_steps=2)
    assert "batch norm sees one microbatch" in caplog.text


def test_a_sampler_of_the_users_is_given_the_epoch():
    model, loader = parts()
    sampler = DistributedSampler(loader.dataset, 1, 0, shuffle=True)
    seen = []
    set_epoch = sampler.set_epoch
    sampler.set_epoch = lambda epoch: (seen.append(epoch), set_epoch(epoch))
    fit(model, DataLoader(loader.dataset, 8, sampler=sampler), "3ep")
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithms": [GradientClipping("norm", 1.0)] * 2}, "one clipping algorithm"),
        ({"max_duration": "3 epochs"}, "3 epochs"),
        ({"max_duration": "100tok"}, "no tokens"),
        ({"train_dataloader": []}, "no microbatch"),
    ],
)
def test_wrong_arguments(options, message):
    model, loader = parts()
    arguments = {"train_dataloader": loader} | options
    refused(ValueError, message, lambda: Trainer(model, **arguments).fit())


@pytest.mark.parametrize(
    "criterion",
    [nn.MSELoss(), nn.HuberLoss(reduction="sum"), partial(functional.poisson_nll_loss, full=True)],
)
def test_targets_that_a_criterion_would_broadcast_are_refused(criterion):
    data = TensorDataset(torch.randn(8, 6), torch.rand(8))
    trainer = trainer_of(nn.Linear(6, 1), DataLoader(data, 4), "1ep", [], criterion=criterion)
    message = r"compares outputs [B, 1] with targets [B], which would be broadcast"
    refused(TypeError, message, trainer.fit)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_function_that_compares_each_output_with_all_targets_is_refused(accumulation):
    data = TensorDataset(torch.randn(8, 6), torch.rand(8))
    trainer = trainer_of(
        nn.Linear(6, 1),
        DataLoader(data, 4),
        "1ep",
        [],
        criterion=lambda outputs, targets: ((outputs - targets) ** 2).mean(),
        accumulation_steps=accumulation,
    )
    message = "outputs [B, 1] with targets [B], so each output with all targets: give both the same"
    refused((TypeError, ValueError), message, trainer.fit)


class Worsens:
    """Makes the losses of all later steps large."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if metrics.step == self.step:
            with torch.no_grad():
                for weight in trainer.model.unwrap().parameters():
                    weight.mul_(-30)


def test_the_summary_has_the_step_from_which_the_loss_was_lost():
    _, summary = fit(*parts(), "40ba", ("norm", 1.0))
    assert summary["diverged"] is None
    _, summary = fit(*parts(), "40ba", ("norm", 1.0), callbacks=[Worsens(25)])
    assert summary["diverged"] == 26
