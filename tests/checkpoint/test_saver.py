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
    return sorted(path.name for path in folder.iterdir())


def steps_of(folder):
    return [checkpoints.step_of(path) for path in reversed(checkpoints.checkpoints_in(folder))]


def weights(training):
    return {
        name: tensor.clone() for name, tensor in training.booster.state_dict(training.model).items()
    }


def same(one, other):
    ours = weights(one)
    theirs = weights(other)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.fixture(scope="module", params=[(1, False), (2, True), (9, False), (1, True)], ids=str)
def saved(request, tmp_path_factory):
    """A training that saved every 5 of 23 steps, and its held-out losses by step."""
    keep, asynchronous = request.param
    folder = tmp_path_factory.mktemp("saved")
    options = {"keep": keep, "best": "eval/loss", "asynchronous": asynchronous, "about": {"a": 1}}
    rows = Rows()
    training = trainer(saver=CheckpointSaver(folder, "5ba", **options), sinks=[rows])
    training.fit()
    losses = {row["train/step"]: row["eval/loss"] for row in rows.rows if "eval/loss" in row}
    return SimpleNamespace(folder=folder, keep=keep, training=training, losses=losses)


def last_losses(losses):
    """The loss of the last evaluation at each step that was saved."""
    last = {}
    for saved_step in (5, 10, 15, 20):
        last[saved_step] = losses[max(step for step in losses if step <= saved_step)]
    return last


def test_the_best_is_kept_beside_the_newest(saved):
    losses = last_losses(saved.losses)
    best = min(losses, key=lambda step: (losses[step], step))
    assert steps_of(saved.folder) == sorted({*list(losses)[-saved.keep :], best})
    assert names(saved.folder)[0] == "final"
    assert len(names(saved.folder)) == len(steps_of(saved.folder)) + 1, "something is unfinished"


def test_a_manifest_says_what_its_checkpoint_is(saved):
    losses = last_losses(saved.losses)
    for step in steps_of(saved.folder):
        manifest = checkpoints.require_whole(saved.folder / f"step_{step:09d}")
        assert manifest["metrics"]["eval/loss"] == losses[step]
        assert (manifest["a"], manifest["step"], manifest["world_size"]) == (1, step, 1)
    final = checkpoints.require_whole(saved.folder / "final")
    assert (final["step"], final["metrics"]["eval/loss"]) == (23, saved.losses[23])


def test_the_final_weights_are_those_of_the_training(saved):
    [file] = (saved.folder / "final").glob("*.safetensors")
    written = load_file(file)
    expected = weights(saved.training)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_a_training_does_not_continue_from_weights_alone(saved):
    refused(ValueError, "weights alone", lambda: trainer().load(saved.folder / "final"))


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


def asked_to_stop(step, **options):
    """A training that is asked to stop once it has taken so many steps."""
    training = trainer(stop=lambda: 10 if training.state.progress.step >= step else 0, **options)
    return training


def test_a_training_that_is_asked_to_stop_in_its_last_step_ends(tmp_path):
    training = asked_to_stop(22, saver=CheckpointSaver(tmp_path, None))
    assert training.fit()["steps"] == 23
    assert names(tmp_path) == ["final"]


def test_a_training_without_a_saver_stops_after_its_step():
    training = asked_to_stop(0)
    refused(Stopped, "", training.fit)
    assert training.state.progress.step == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_that_was_asked_to_stop_continues_later(tmp_path, asynchronous):
    saver = CheckpointSaver(tmp_path, "9ba", asynchronous=asynchronous)
    training = asked_to_stop(12, saver=saver)
    assert refused(Stopped, "", training.fit).signal == 10
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
    owner, name, after = MOMENTS[moment]
    begun = []
    begin = checkpoints.begin
    real = getattr(owner, name)

    def dying(*args, **options):
        if len(begun) == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    checkpoints.begin = lambda *args: (begun.append(args), begin(*args))[1]
    setattr(owner, name, dying)
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


@pytest.mark.parametrize("draws", [np.random.default_rng, np.random.RandomState, random.Random])
def test_the_generator_of_a_sampler_continues(tmp_path, draws):
    def training(steps):
        return trainer(steps, eval_dataloader=None, sampler=Drawn(draws(1)))

    later = fitted(training(18), fitted(training(13)).save(tmp_path))
    assert same(later, fitted(training(18)))


@pytest.mark.parametrize("schedule", [by_numpy, sequential])
def test_a_schedule_of_torch_continues(tmp_path, schedule):
    def training(steps):
        return trainer(steps, eval_dataloader=None, schedule=schedule)

    later = fitted(training(18), fitted(training(13)).save(tmp_path))
    assert same(later, fitted(training(18)))


class Odd(lr_scheduler.ConstantLR):
    """Has an object in its state that only its own code can make."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.path = SimpleNamespace()


def test_a_state_that_cannot_be_loaded_again_is_refused_before_a_step(tmp_path):
    training = trainer(schedule=Odd, saver=CheckpointSaver(tmp_path, "5ba"))
    for save in (training.fit, lambda: training.save(tmp_path)):
        refused(ValueError, "SimpleNamespace", save)
    assert training.state.progress.step == 0
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
        assert group["lr"] == pytest.approx(rate), threshold
        assert later.state.mode.threshold == threshold, threshold
        later.fit()
        assert group["lr"] == pytest.approx(rate / 2), threshold
    later = trainer(12, schedule=half)
    later.optimizer.param_groups[0]["weight_decay"] = 0.7
    later.load(path, keep=["weight_decay"])
    assert later.optimizer.param_groups[0]["weight_decay"] == 0.7
    assert later.optimizer.param_groups[0]["lr"] == 0.05
