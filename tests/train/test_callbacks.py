"""Callbacks: what they are called with, how they end a training, and early stopping."""

import json
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runner import Trainer
from runner.booster import TorchDDPPlugin
from runner.cli.main import main
from runner.train.callbacks import Callback, CallbackError
from runner.train.early_stopping import EarlyStopping
from tests.ranks import run_ranks
from tests.train.callbacks import Notes

SMALL = ["tracker=none", "device=cpu", "data.batch_size=64", "model.width=4", "checkpoint=none"]


class Losses(Callback):
    """Remembers the losses of evaluations."""

    def __init__(self):
        self.seen = []

    def on_evaluate(self, trainer, metrics):
        self.seen.append((trainer.state.progress.step, metrics["eval/loss"]))


def make(*callbacks, lr=0.1, duration="20ba", plugin=None, rank=0, world=1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))
    loader = DataLoader(torch.utils.data.Subset(data, range(rank, 16, world)), 4 // world)
    return Trainer(
        model,
        loader,
        duration,
        eval_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        eval_interval="2ba",
        plugin=plugin,
        callbacks=callbacks,
    )


def test_calls_in_their_order(tmp_path):
    file = tmp_path / "notes"
    summary = make(Notes(str(file)), duration="3ba").fit()
    notes = list(map(json.loads, file.read_text().splitlines()))
    assert [note[:2] for note in notes] == [
        ["on_start", 0],
        ["on_step", 1],
        ["on_step", 2],
        ["on_evaluate", 2],
        ["on_step", 3],
        ["on_evaluate", 3],
        ["on_end", 3],
    ]
    assert notes[5][2] == summary["final"]["eval/loss"]
    assert notes[4][2:] == [3, summary["final"]["grad/norm"]]
    assert "ended_early" not in summary


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_evaluate", "on_end"])
def test_an_error_names_the_callback_and_the_method(tmp_path, hook):
    with pytest.raises(CallbackError, match=rf"tests.train.callbacks.Notes failed in {hook}: KeyE"):
        make(Notes(str(tmp_path / "notes"), hook)).fit()


def test_what_is_no_callback_is_refused():
    with pytest.raises(
        TypeError, match=r"builtins\.list is no callback: it has none of the methods"
    ):
        make([])


def test_a_callback_ends_the_training_after_its_step_with_an_evaluation(tmp_path):
    losses = Losses()
    trainer = make(Notes(str(tmp_path / "notes"), end_at=3), losses)
    summary = trainer.fit()
    assert (summary["steps"], summary["ended_early"]) == (3, "planted end")
    assert [step for step, _ in losses.seen] == [2, 3]
    assert summary["final"]["eval/loss"] == losses.seen[-1][1]
    whole = make(duration="3ba")
    whole.fit()
    for one, other in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


# -- early stopping


def expected_end(losses, patience, min_delta=0.0):
    """Step of the evaluation after which to end, of (step, loss) pairs; None for none."""
    best, waited = math.inf, 0
    for step, loss in losses:
        if best - loss > 0 and best - loss >= min_delta:
            best, waited = loss, 0
        else:
            waited += 1
        if waited == patience:
            return step
    return None


@pytest.mark.parametrize(("patience", "min_delta"), [(1, 0.02), (3, 0.02), (2, 0.5), (1, 0.0)])
def test_it_ends_when_the_loss_does_not_improve(patience, min_delta):
    losses = Losses()
    make(losses, duration="60ba").fit()
    wanted = expected_end(losses.seen, patience, min_delta)
    summary = make(EarlyStopping(patience, min_delta=min_delta), duration="60ba").fit()
    assert summary["steps"] == (wanted or 60)
    assert ("ended_early" in summary) == (wanted is not None)
    assert (wanted is None) == (min_delta == 0)


def test_the_direction_is_that_of_the_metric():
    for metric, values, waited in [
        ("eval/loss", (3, 2, 1), 0),
        ("eval/accuracy", (1, 2, 3), 0),
        ("eval/accuracy", (3, 2, 1), 2),
        ("eval/loss", (3, math.nan, math.inf), 2),
        ("eval/loss", (math.nan, 3), 0),
    ]:
        stopping, trainer = EarlyStopping(9, metric), make()
        for value in values:
            stopping.on_evaluate(trainer, {metric: float(value)})
        assert stopping.waited == waited
    stopping = EarlyStopping(9, "eval/loss", direction="maximize")
    for value in (1.0, 2.0):
        stopping.on_evaluate(trainer, {"eval/loss": value})
    assert stopping.waited == 0
    with pytest.raises(ValueError, match="there is no eval/f1; evaluations have eval/loss"):
        EarlyStopping(1, "eval/f1").on_evaluate(trainer, {"eval/loss": 1.0})
    with pytest.raises(ValueError, match="patience must be at least 1"):
        EarlyStopping(0)


def test_a_run_that_continues_ends_at_the_same_step(tmp_path):
    def stopping():
        return EarlyStopping(3, min_delta=0.02)

    whole = make(stopping(), duration="60ba")
    wanted = whole.fit()
    assert wanted["steps"] > 8
    first = make(stopping(), duration=f"{wanted['steps'] - 2}ba")
    first.fit()
    path = first.save(tmp_path / "checkpoints")
    second = make(stopping(), duration="60ba")
    second.load(path)
    assert second.fit()["ended_early"] == wanted["ended_early"]
    assert second.state.progress.step == wanted["steps"]
    # Saved after the evaluation that ended it: no further step.
    again = make(stopping(), duration="60ba")
    again.load(whole.save(tmp_path / "checkpoints"))
    assert again.fit()["ended_early"] == wanted["ended_early"]
    assert again.state.progress.step == wanted["steps"]


def on_two_ranks():
    rank = dist.get_rank()

    class Asks:
        def on_step(self, trainer, metrics):
            if rank == 1 and metrics.step == 5:
                trainer.end_early("rank 1 asks")

    ended = make(Asks(), plugin=TorchDDPPlugin(), rank=rank, world=2).fit()
    stopped = make(
        EarlyStopping(2, min_delta=0.02), plugin=TorchDDPPlugin(), rank=rank, world=2
    ).fit()
    return [
        (one["steps"], one["ended_early"], one["final"]["eval/loss"]) for one in (ended, stopped)
    ]


def test_all_ranks_end_after_the_same_step():
    first, second = run_ranks(on_two_ranks, 2)
    assert first == second
    assert first[0][:2] == (5, "rank 1 asks")
    alone = make(EarlyStopping(2, min_delta=0.02)).fit()
    assert first[1][0] == alone["steps"]
    assert first[1][2] == pytest.approx(alone["final"]["eval/loss"], rel=1e-5)


# -- from the command


def test_the_command_calls_them_and_records_why_it_ended(outputs, tmp_path, capsys):
    target = f"callbacks=[{{_target_:tests.train.callbacks.Notes,file:{tmp_path / 'notes'}}}]"
    words = ["early_stopping.patience=2", "early_stopping.min_delta=100", "eval.interval=3ba"]
    folder = outputs / "run"
    assert main([*SMALL, target, *words, f"hydra.run.dir={folder}"]) == 0
    status = json.loads((folder / "status.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    why = "eval/loss did not improve by 100 in 2 evaluations (best "
    assert status["ended_early"] == summary["ended_early"]
    assert status["ended_early"].startswith(why)
    assert (status["state"], status["step"], summary["steps"]) == ("finished", 9, 9)
    assert f"clip-runner: ended early: {why}" in capsys.readouterr().err
    assert (tmp_path / "notes").read_text().count("on_step") == 9


def test_the_command_names_a_callback_that_fails(outputs, tmp_path):
    notes = f"file:{tmp_path / 'notes'},fails_in:on_step"
    target = f"callbacks=[{{_target_:tests.train.callbacks.Notes,{notes}}}]"
    folder = outputs / "run"
    assert main([*SMALL, target, f"hydra.run.dir={folder}"]) == 1
    error = json.loads((folder / "status.json").read_text())["error"]
    last = error.splitlines()[-1]
    assert "callback tests.train.callbacks.Notes failed in on_step: KeyError: 'planted'" in last


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("callbacks=[{_target_:tests.train.callbacks.Note}]", "tests.train.callbacks.Note"),
        ("callbacks=[{_target_:tests.train.callbacks.Notes}]", "file"),
        ("callbacks=[{_target_:collections.Counter}]", "is no callback"),
        ("callbacks=[3]", "must be a list such as [{_target_:"),
        ("early_stopping.patience=0", "must be an integer of at least 1, or null"),
        ("early_stopping.patients=1", "did you mean early_stopping.patience?"),
    ],
)
def test_a_wrong_request_is_refused(outputs, capsys, word, message):
    assert main([*SMALL, word]) == 2
    assert message in capsys.readouterr().err
    assert not outputs.exists()


def test_a_metric_that_evaluations_lack_is_refused(outputs, capsys):
    words = ["early_stopping.patience=1", "early_stopping.metric=eval/acuracy"]
    assert main([*SMALL, *words]) == 2
    assert "did you mean eval/accuracy?" in capsys.readouterr().err
    assert not os.path.exists(outputs)
