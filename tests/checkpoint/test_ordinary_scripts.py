"""What ordinary scripts hold besides model and optimizer is saved, or refused before a step."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from runner import CheckpointSaver, Trainer
from runner.checkpoint import folder as checkpoints
from runner.clip import build

SAMPLES = 20
"""Five steps an epoch."""


class Drawn(Sampler):
    """Draws an order from a generator of its own."""

    def __init__(self, generator):
        self.source = generator

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        draw = self.source.random
        return iter(sorted(range(SAMPLES), key=lambda _: draw()))


SAMPLERS = {
    "torch": lambda: RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(1)),
    "weighted": lambda: WeightedRandomSampler(
        [1.0] * SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(1)
    ),
    "numpy": lambda: Drawn(np.random.default_rng(1)),
    "old numpy": lambda: Drawn(np.random.RandomState(1)),
    "python": lambda: Drawn(random.Random(1)),
}
SCHEDULERS = {
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 9]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        [4],
    ),
    "NumPy's numbers": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, lambda step: np.cos(step / 30)
    ),
}


def trainer(steps=12, *, sampler="torch", schedule=None, lr=0.05, kind=torch.optim.AdamW, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)))
    optimizer = kind(model.parameters(), lr=lr)
    return Trainer(
        model,
        DataLoader(data, 4, sampler=SAMPLERS[sampler]()),
        f"{steps}ba",
        optimizers=optimizer,
        schedulers=schedule(optimizer) if schedule else None,
        **more,
    )


def same(one, other):
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def assert_continues(tmp_path, **options):
    whole = trainer(12, **options)
    whole.fit()
    first = trainer(7, **options)
    first.fit()
    path = first.save(tmp_path)
    later = trainer(12, **options)
    later.load(path)
    later.fit()
    assert same(later, whole)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_generator_of_a_sampler_continues(tmp_path, sampler):
    assert_continues(tmp_path, sampler=sampler)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedules_continue(tmp_path, name):
    assert_continues(tmp_path, schedule=SCHEDULERS[name])


class Factor:
    """A factor of the rate."""

    def __call__(self, step):
        return 0.5


class Stateless:
    """A schedule with nothing but a step."""

    def __init__(self, optimizer):
        pass

    def step(self):
        pass


class Odd(lr_scheduler.ConstantLR):
    """Has an object in its state that only its own code can make."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.factor_of = Factor()


def test_a_state_that_cannot_be_loaded_again_is_refused_before_a_step(tmp_path):
    made = trainer(schedule=Odd, saver=CheckpointSaver(tmp_path, "5ba"))
    with pytest.raises(ValueError, match=r"schedulers cannot be saved: .* holds .*Factor$"):
        made.fit()
    assert made.state.progress.step == 0
    with pytest.raises(ValueError, match="schedulers cannot be saved"):
        made.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    made = trainer(schedule=Stateless, saver=CheckpointSaver(tmp_path, "5ba"))
    with pytest.raises(ValueError, match="Stateless has no state_dict"):
        made.fit()
    trainer(schedule=Odd).fit()  # without checkpoints it is no fault


def test_a_second_training_does_not_remove_the_checkpoints_of_the_first(tmp_path):
    trainer(saver=CheckpointSaver(tmp_path, "5ba")).fit()
    before = sorted(tmp_path.rglob("*"))
    again = trainer(saver=CheckpointSaver(tmp_path, "2ba"))
    with pytest.raises(ValueError, match="holds step_000000010 of an earlier training"):
        again.fit()
    assert again.state.progress.step == 0
    assert sorted(tmp_path.rglob("*")) == before
    again.load(tmp_path / "step_000000010")
    again.fit()


def test_a_checkpoint_that_is_removed_vanishes_at_once(tmp_path, monkeypatch):
    def killed(path, **options):
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer(saver=CheckpointSaver(tmp_path, "2ba", keep=1)).fit()
    assert [one.name for one in checkpoints.found(tmp_path)] == ["step_000000004"]
    monkeypatch.undo()
    checkpoints.prune(tmp_path, 1, None, False)
    assert [one.name for one in tmp_path.iterdir()] == ["step_000000004"]


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path):
    made = trainer(3)
    made.fit()
    path = made.save(tmp_path)
    path.rename(tmp_path / f".{path.name}.former.part")  # the moment between two renames
    (tmp_path / f".{path.name}.part").mkdir()
    checkpoints.prune(tmp_path, 2, None, False)
    assert checkpoints.found(tmp_path) == [path]
    checkpoints.require_whole(path)


def half(optimizer):
    return lr_scheduler.StepLR(optimizer, 5, 0.5)


def test_settings_that_are_kept_are_those_of_the_trainer(tmp_path):
    first = trainer(7, schedule=half, algorithms=build("norm", threshold=2.0))
    first.fit()
    path = first.save(tmp_path)
    for keep, rate, threshold in [((), 0.025, 2.0), (("lr", "threshold"), 0.15, 0.5)]:
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
    assert later.optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": torch.optim.SGD}, "the state is that of AdamW, not of SGD"),
        ({"schedule": half}, "that of 0 schedulers, this run has 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path, options, message):
    first = trainer(7)
    first.fit()
    path = first.save(tmp_path)
    other, untouched = trainer(**options), trainer(**options)
    with pytest.raises(ValueError, match=message):
        other.load(path)
    assert same(other, untouched)
    assert not any(each.state for each in other.optimizer.optimizers)
    for one in (other, untouched):
        torch.manual_seed(1)
        one.fit()
    assert same(other, untouched)
