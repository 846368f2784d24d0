"""Callbacks: what they are called with, how they end a training, and early stopping."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from runner import Booster, Evaluate, Trainer
from runner.booster import TorchDDPPlugin
from runner.train.callbacks import EarlyStopping
from tests.clip.reference import refused
from tests.process import run_here
from tests.ranks import run_ranks
from tests.trainers import fitted

SMALL = ["tracker=none", "device=cpu", "data.batch_size=64", "model.width=4", "checkpoint=none"]


class Notes:
    """Writes the names of its calls to a file."""

    def __init__(self, file, end_at=0):

        self.file = Path(file)
        self.end_at = end_at
        self.on_microbatch = None  # None is no hook

    def _note(self, name, trainer, values):
        step = trainer.state.progress.step
        with self.file.open("a") as file:
            print(json.dumps([name, step, *values]), file=file)

    def on_start(self, trainer):
        self._note("on_start", trainer, [])

    def on_step(self, trainer, metrics):
        self._note("on_step", trainer, [metrics.step, float(metrics.decision.norm)])
        if metrics.step == self.end_at:
            trainer.end_early("planted end")

    def on_evaluate(self, trainer, metrics):
        self._note("on_evaluate", trainer, [metrics["eval/loss"]])

    def on_end(self, trainer, summary):
        self._note("on_end", trainer, [summary["steps"]])


def make(*callbacks, duration="60ba", plugin=None, rank=0, world=1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))
    loader = DataLoader(Subset(data, range(rank, 16, world)), 4 // world)
    options = {"booster": Booster(plugin=plugin), "callbacks": callbacks}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, loader, duration, (), Evaluate(loader, (), "2ba"), sgd, **options)


def test_calls_in_their_order_until_a_callback_ends_the_training(tmp_path):
    file = tmp_path / "notes"
    whole = make(duration="3ba")
    assert "ended_early" not in whole.fit()
    trainer = make(Notes(str(file), end_at=3))
    summary = trainer.fit()
    notes = list(map(json.loads, file.read_text().splitlines()))
    assert [tuple(note[:2]) for note in notes] == [
        *(("on_start", 0), ("on_step", 1), ("on_step", 2), ("on_evaluate", 2)),
        *(("on_step", 3), ("on_evaluate", 3), ("on_end", 3)),
    ]
    assert notes[5][2] == summary["final"]["eval/loss"]
    assert notes[4][2:] == [3, summary["final"]["grad/norm"]]
    assert (summary["steps"], summary["ended_early"]) == (3, "planted end")
    assert all(map(torch.equal, trainer.model.parameters(), whole.model.parameters()))
    refused(TypeError, "builtins.list is no callback", make, [])


def test_evaluations_without_a_better_value_are_counted():
    """By the direction of the metric; a gain below ``min_delta`` is none."""
    for metric, values, options, waited in [
        *(("eval/loss", (3, 2, 1), {}, 0), ("eval/accuracy", (1, 2, 3), {}, 0)),
        *(("eval/accuracy", (3, 2, 1), {}, 2), ("eval/loss", (3, math.nan, math.inf), {}, 2)),
        *(("eval/loss", (math.nan, 3), {}, 0), ("eval/loss", (3, 3), {}, 1)),
        ("eval/loss", (3, 2.5, 2.25), {"min_delta": 0.75}, 0),
        ("eval/loss", (3, 2.5, 2.25, 2, 1.5), {"min_delta": 1.0}, 1),
        ("eval/loss", (1, 2), {"direction": "maximize"}, 0),
    ]:
        stopping = EarlyStopping(9, metric, **options)
        trainer = make()
        for value in values:
            stopping.on_evaluate(trainer, {metric: float(value)})
        assert stopping.waited == waited


def test_a_run_that_continues_ends_at_the_same_step(tmp_path):
    def stopping():
        return EarlyStopping(3, min_delta=0.02)

    whole = make(stopping())
    summary = whole.fit()
    assert summary["steps"] > 8
    first = make(stopping(), duration=f"{summary['steps'] - 2}ba")
    # The second one was saved after the evaluation that ended it: no further step.
    for saved in (fitted(first), whole):
        again = make(stopping())
        again.load(saved.save(tmp_path))
        assert again.fit()["ended_early"] == summary["ended_early"]
        assert again.state.progress.step == summary["steps"]


class Asks:
    """Rank 1 asks to end."""

    def on_step(self, trainer, metrics):
        if dist.get_rank() == 1 and metrics.step == 5:
            trainer.end_early("rank 1 asks")


class Losses:
    """Notes the loss of each step, and the part of this rank."""

    def __init__(self):
        self.steps = []
        self.parts = []

    def on_step(self, trainer, metrics):
        self.steps.append(trainer.loss_of(metrics))
        self.parts.append(metrics.local_loss)


def on_two_ranks():
    losses = Losses()
    make(losses, duration="4ba", plugin=TorchDDPPlugin(), rank=dist.get_rank(), world=2).fit()
    ends = []
    for callback in (Asks(), EarlyStopping(2, min_delta=0.02)):
        summary = make(callback, plugin=TorchDDPPlugin(), rank=dist.get_rank(), world=2).fit()
        ends.append((summary["steps"], summary["ended_early"], summary["final"]["eval/loss"]))
    return ends, losses.steps, losses.parts


@cache
def two_ranks():
    return run_ranks(on_two_ranks, 2)


def in_one_process():
    losses = Losses()
    make(losses, duration="4ba").fit()
    return losses


def test_a_callback_asks_for_the_loss_of_the_step():
    (_, first, _), (_, second, _) = two_ranks()
    assert first == second == pytest.approx(in_one_process().steps, rel=1e-6)


def test_a_callback_gets_its_ranks_part_of_the_loss():
    (_, losses, first_parts), (_, _, second_parts) = two_ranks()
    for loss, *parts in zip(losses, first_parts, second_parts, strict=True):
        assert sum(parts) / 2 == pytest.approx(loss, rel=1e-6)
        assert abs(parts[0] - loss) > 1e-3 * loss
    single = in_one_process()
    assert single.parts == single.steps


def test_all_ranks_end_after_the_same_step():
    (first, *_), (second, *_) = two_ranks()
    assert first == second
    assert first[0][:2] == (5, "rank 1 asks")
    single = make(EarlyStopping(2, min_delta=0.02)).fit()
    assert first[1][0] == single["steps"]
    assert first[1][2] == pytest.approx(single["final"]["eval/loss"], rel=1e-5)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The folder of a run with callbacks that ended early, and what it printed to stderr."""
    folder = tmp_path_factory.mktemp("command")
    target = f"callbacks=[{{_target_:tests.train.test_callbacks.Notes,file:{folder / 'notes'}}}]"
    words = ["early_stopping.patience=2", "early_stopping.min_delta=100", "eval.interval=3ba"]
    _, printed = run_here(*SMALL, target, *words, f"hydra.run.dir={folder / 'run'}")
    return folder, printed


@pytest.mark.xdist_group("callbacks")  # it runs once
def test_the_command_calls_them(command):
    folder, _ = command
    assert (folder / "notes").read_text().count("on_step") == 9


@pytest.mark.xdist_group("callbacks")
def test_the_command_records_why_it_ended(command):
    folder, printed = command
    files = (folder / "run" / "status.json", folder / "run" / "summary.json")
    status, summary = (json.loads(file.read_text()) for file in files)
    why = "eval/loss did not improve by 100 in 2 evaluations (best "
    assert status["ended_early"] == summary["ended_early"]
    assert status["ended_early"].startswith(why)
    assert (status["state"], status["step"], summary["steps"]) == ("finished", 9, 9)
    assert why in printed
