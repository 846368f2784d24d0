"""A training saves the right checkpoints at the right steps, keeps them, and continues exactly."""

import multiprocessing
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Sampler

from runner import CheckpointSaver
from runner.booster import SinglePlugin
from runner.checkpoint import folder as checkpoints
from runner.clip import build
from runner.data.dataset import TensorPairs, collate_pairs
from runner.train.stop import Stopped
from tests.clip.reference import refused
from tests.distributed.training import Rows
from tests.ranks import PRELOAD
from tests.trainers import fitted, trainer_of

SAMPLES, BATCH = 40, 4
"""Ten steps an epoch."""


def trainer(
    steps=23, *, width=8, sampler=None, schedule=None, lr=0.1, kind=torch.optim.AdamW, **more
):
    """A small training; with a ``sampler`` its loader is torch's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
    data = TensorPairs(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)))
    optimizer = kind(model.parameters(), lr=lr)
    settings = {
        "optimizers": optimizer,
        "schedulers": schedule(optimizer) if schedule else None,
        "eval_dataloader": SinglePlugin().prepare_dataloader(data, BATCH),
        "eval_interval": "3ba",
        "stop": lambda: 0,
    }
    if sampler is None:
        loader = SinglePlugin().prepare_dataloader(data, BATCH, shuffle=True, seed=3)
    else:
        loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=collate_pairs)
    return trainer_of(model, loader, f"{steps}ba", **settings | more)


def names(folder):
    return sorted(one.name for one in folder.iterdir())


def steps_of(folder):
    return [checkpoints.step_of(one) for one in reversed(checkpoints.checkpoints_in(folder))]


def weights(one):
    return {name: tensor.clone() for name, tensor in one.booster.state_dict(one.model).items()}


def same(one, other):
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(("keep", "asynchronous"), [(1, False), (2, True), (9, False), (1, True)])
def test_the_newest_and_the_best_are_kept(tmp_path, keep, asynchronous):
    rows = Rows()
    options = {"keep": keep, "best": "eval/loss", "asynchronous": asynchronous, "about": {"a": 1}}
    made = trainer(saver=CheckpointSaver(tmp_path, "5ba", **options), sinks=[rows])
    made.fit()
    evaluated = {row["train/step"]: row["eval/loss"] for row in rows.rows if "eval/loss" in row}
    last = {
        step: min((step - at, loss) for at, loss in evaluated.items() if at <= step)[1]
        for step in (5, 10, 15, 20)
    }
    best = min(last, key=lambda step: (last[step], step))
    assert steps_of(tmp_path) == sorted({*list(last)[-keep:], best})
    assert names(tmp_path)[0] == "final"
    assert len(names(tmp_path)) == len(steps_of(tmp_path)) + 1  # nothing unfinished
    for step in steps_of(tmp_path):
        manifest = checkpoints.require_whole(tmp_path / f"step_{step:09d}")
        assert manifest["metrics"]["eval/loss"] == last[step]
        assert (manifest["a"], manifest["step"], manifest["world_size"]) == (1, step, 1)
    final = checkpoints.require_whole(tmp_path / "final")
    assert (final["step"], final["metrics"]["eval/loss"]) == (23, evaluated[23])
    [file] = (tmp_path / "final").glob("*.safetensors")
    held, wanted = load_file(file), weights(made)
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
    refused(ValueError, "weights alone", lambda: trainer().load(tmp_path / "final"))


@pytest.mark.parametrize(
    ("interval", "steps"),
    [("1ep", [10, 20]), ("32sp", [8, 16]), ("7ba", [7, 14, 21]), (None, []), ("600min", [])],
)
def test_any_unit_counts(tmp_path, interval, steps):
    trainer(saver=CheckpointSaver(tmp_path, interval, keep=9)).fit()
    assert steps_of(tmp_path) == steps
    assert (tmp_path / "final").is_dir()
    trainer(saver=CheckpointSaver(tmp_path / "none", "5ba", keep=0, save_final=False)).fit()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_that_is_asked_to_stop_saves_and_continues_later(tmp_path, asynchronous):
    def asked(step, **options):
        made = trainer(stop=lambda: 10 if made.state.progress.step >= step else 0, **options)
        return made

    assert asked(22, saver=CheckpointSaver(tmp_path / "ended", None)).fit()["steps"] == 23
    assert names(tmp_path / "ended") == ["final"]
    without = asked(0)
    refused(Stopped, "", without.fit)
    assert without.state.progress.step == 1
    saving = asked(12, saver=CheckpointSaver(tmp_path, "9ba", asynchronous=asynchronous))
    assert refused(Stopped, "", saving.fit).signal == 10
    assert steps_of(tmp_path) == [9, 13]
    again = fitted(trainer(), tmp_path / "step_000000013")
    assert same(again, fitted(trainer()))


def test_checkpoints_of_another_course(tmp_path):
    """Those of an earlier training stay; those after the step to go on from are replaced."""
    trainer(20, saver=CheckpointSaver(tmp_path, "5ba", keep=9)).fit()
    before = sorted(tmp_path.rglob("*"))
    again = trainer(12, saver=CheckpointSaver(tmp_path, "1ba", keep=2))
    refused(ValueError, "holds step_000000020 of an earlier training", again.fit)
    assert again.state.progress.step == 0
    assert sorted(tmp_path.rglob("*")) == before
    fitted(again, tmp_path / "step_000000010")
    assert steps_of(tmp_path) == [11, 12]


# -- a process that is killed while it writes

MOMENTS = {
    "inside tensors": (filesystem, "_write_item", False),
    "before manifest": (checkpoints, "complete", False),
    "before rename": (Path, "rename", False),
    "after rename": (Path, "rename", True),
}


def killed_at_the_second_checkpoint(moment, folder, asynchronous):
    of, name, after = MOMENTS[moment]
    begun, begin, real = [], checkpoints.begin, getattr(of, name)

    def dying(*args, **options):
        if len(begun) == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    checkpoints.begin = lambda *args: (begun.append(args), begin(*args))[1]
    setattr(of, name, dying)
    trainer(saver=CheckpointSaver(folder, "5ba", keep=1, asynchronous=asynchronous)).fit()


@pytest.mark.parametrize(("number", "moment"), [*enumerate(MOMENTS)])
def test_a_write_that_is_killed_leaves_the_checkpoint_before_it(tmp_path, number, moment):
    multiprocessing.set_forkserver_preload(PRELOAD)
    process = multiprocessing.get_context("forkserver").Process(
        target=killed_at_the_second_checkpoint, args=(moment, tmp_path, number % 2 == 1)
    )
    process.start()
    process.join(170)
    assert process.exitcode == -signal.SIGKILL
    newest, _ = next(checkpoints.whole(tmp_path))
    assert newest.name == ("step_000000010" if moment == "after rename" else "step_000000005")
    again = fitted(trainer(saver=CheckpointSaver(tmp_path, "5ba", keep=1)), newest)
    assert same(again, fitted(trainer()))
    assert names(tmp_path) == ["final", "step_000000020"]


class Drawn(Sampler):
    """Draws an order from a generator of its own."""

    def __init__(self, generator):
        self.source = generator

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        draw = self.source.random
        return iter(sorted(range(SAMPLES), key=lambda _: draw()))


def by_numpy(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 30))


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


@pytest.mark.parametrize(
    ("draws", "schedule"),
    [(np.random.default_rng, by_numpy), (np.random.RandomState, None), (random.Random, sequential)],
)
def test_generators_of_samplers_and_torchs_schedules_continue(tmp_path, draws, schedule):
    def made(steps):
        options = {"sampler": Drawn(draws(1)), "schedule": schedule}
        return trainer(steps, eval_dataloader=None, **options)

    later = fitted(made(18), fitted(made(13)).save(tmp_path))
    assert same(later, fitted(made(18)))


class Odd(lr_scheduler.ConstantLR):
    """Has an object in its state that only its own code can make."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.path = SimpleNamespace()


def test_a_state_that_cannot_be_loaded_again_is_refused_before_a_step(tmp_path):
    made = trainer(schedule=Odd, saver=CheckpointSaver(tmp_path, "5ba"))
    for save in (made.fit, lambda: made.save(tmp_path)):
        refused(ValueError, "SimpleNamespace", save)
    assert made.state.progress.step == 0
    assert list(tmp_path.iterdir()) == []
    trainer(3, schedule=Odd).fit()  # without checkpoints it is no fault


def half(optimizer):
    return lr_scheduler.StepLR(optimizer, 5, 0.5)


def test_settings_that_are_kept_are_those_of_the_trainer(tmp_path):
    first = trainer(7, schedule=half, algorithms=build("norm", threshold=2.0))
    path = fitted(first).save(tmp_path)
    for keep, rate, threshold in [((), 0.05, 2.0), (("lr", "threshold"), 0.15, 0.5)]:
        later = trainer(12, schedule=half, lr=0.3, algorithms=build("norm", threshold=0.5))
        later.load(path, keep=keep)
        [group] = later.optimizer.param_groups
        assert group["lr"] == pytest.approx(rate)
        assert later.state.mode.threshold == threshold
        later.fit()
        assert group["lr"] == pytest.approx(rate / 2)
    later = trainer(12, schedule=half)
    later.optimizer.param_groups[0]["weight_decay"] = 0.7
    later.load(path, keep=["weight_decay"])
    assert later.optimizer.param_groups[0]["weight_decay"] == 0.7
    assert later.optimizer.param_groups[0]["lr"] == 0.05
