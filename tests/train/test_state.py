"""A training that continues from a state takes the same steps, to the bit, as one never stopped."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from runner import Trainer
from runner.booster import LossScale, SinglePlugin
from runner.booster.step_order import StepOrderError
from runner.clip import build
from runner.optim.schedulers import LinearWarmupCosineLR
from tests.clip.reference import refused
from tests.distributed.training import Rows
from tests.on_device import kept_on_device
from tests.trainers import fitted, trainer_of

SAMPLES, BATCH = 44, 4
"""Eleven microbatches an epoch: with windows of two, the last one is short."""

TIMES = ("time/step_s", "throughput/samples_per_s")


class Jittered(Dataset):
    """Samples that change at random whenever they are read, by all three global generators."""

    def __init__(self, bad: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.targets = torch.randint(3, (SAMPLES,), generator=generator)
        if bad is not None:
            self.inputs[bad] = math.inf

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1) + torch.randn(6) * 0.1
        return self.inputs[index] + noise, self.targets[index]


class Streamed(IterableDataset):
    """The same, of unknown length."""

    def __init__(self) -> None:
        self.data = Jittered()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.data[index] for index in range(SAMPLES))


def partitioned(bad: int | None = None) -> Any:
    return SinglePlugin().prepare_dataloader(Jittered(bad), BATCH, shuffle=True, seed=3)


LOADERS: dict[str, Callable[[], Any]] = {
    "partitioned": partitioned,
    "shuffled": lambda: DataLoader(Jittered(), BATCH, shuffle=True),
    "a generator of its own": lambda: DataLoader(
        Jittered(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "a stream": lambda: DataLoader(Streamed(), BATCH),
    "a stateful loader": lambda: StatefulDataLoader(Jittered(), BATCH, shuffle=True),
}


class Saving(Trainer):
    """Keeps a copy of weights and training state after one step."""

    saves_after = -1
    saved: tuple[dict[str, Any], dict[str, Any]]

    def _step(self, *args: Any) -> None:
        super()._step(*args)
        if self.state.progress.step == self.saves_after:
            self.saved = copy.deepcopy((self.model.unwrap().state_dict(), self.state.state_dict()))


def trainer(rows: Rows, loader: Callable[[], Any], **options: Any) -> Saving:
    """A training with dropout, momentum and a schedule; its global generators are seeded."""
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    settings: dict[str, Any] = {
        "algorithms": build("norm", threshold=0.4),
        "optimizers": optimizer,
        "schedulers": LinearWarmupCosineLR(optimizer, 20, warmup_fraction=0.2),
        "accumulation_steps": 2,
        "eval_dataloader": partitioned(),
        "eval_interval": "7ba",
        "log_interval": 4,
        "log_flush": 3,
        "what_if": [0.2, 0.9],
        "per_layer": True,
    } | options
    return trainer_of(model, loader(), "15ba", sinks=[rows], kind=Saving, **settings)


def timeless(value: Any) -> Any:
    """The same without times, and comparable where it holds NaN."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return repr(value)


def assert_goes_on(loader: Callable[[], Any], step: int, **options: Any) -> list[dict[str, Any]]:
    """Assert that a training saved after ``step`` goes on as one never stopped; return its rows."""

    def training(rows: Rows) -> Saving:
        return trainer(rows, loader, **{key: value() for key, value in options.items()})

    unsaved = Rows()
    whole = Rows()
    resumed = Rows()
    plain = training(unsaved)
    summary = plain.fit()
    first = training(whole)
    first.saves_after = step
    assert timeless(first.fit()) == timeless(summary)
    weights, state = first.saved

    second = training(resumed)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    second.model.unwrap().load_state_dict(weights)
    second.state.load_state_dict(state)
    assert second.state.progress.step == step
    assert timeless(second.fit()) == timeless(summary)

    later = [row for row in unsaved.rows if row["train/step"] > step]
    assert list(map(timeless, whole.rows)) == list(map(timeless, unsaved.rows))
    assert list(map(timeless, resumed.rows)) == list(map(timeless, later))
    assert all(map(torch.equal, second.model.parameters(), plain.model.parameters()))
    assert timeless(second.state.state_dict()) == timeless(plain.state.state_dict())

    kinds = {type(leaf) for leaf in tree_leaves(state)}
    assert kinds <= {Tensor, bool, int, float, str, type(None)}
    return unsaved.rows


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("step", [2, 6, 9])
def test_a_training_goes_on_after_any_step_of_an_epoch(loader, step):
    # Six windows an epoch: steps 2 and 9 are inside of one, step 6 ends one.
    rows = assert_goes_on(LOADERS[loader], step)
    assert [row["train/step"] for row in rows] == [4, 7, 8, 12, 14, 15]


@pytest.mark.parametrize(("loader", "step"), [("shuffled", 4), ("partitioned", 6), ("a stream", 8)])
def test_a_training_whose_steps_grow_goes_on_inside_a_phase(loader, step):
    phases = {0: 1, "8sp": 2, "60sp": 4}
    rows = assert_goes_on(LOADERS[loader], step, accumulation_steps=lambda: phases)
    assert [row["train/step_samples"] for row in rows] == [8, 4, 8, 16, 12, 16]


FP16 = {"precision": lambda: "fp16", "loss_scale": lambda: LossScale(2.0**10, 2)}
ZSCORE = {
    "optimizers": lambda: None,
    "schedulers": lambda: None,
    "what_if": list,
    "algorithms": lambda: build("zscore", threshold=0.5, warmup_steps=3),
}


@pytest.mark.parametrize("where", [nullcontext, kept_on_device])
@pytest.mark.parametrize(
    ("step", "options"),
    [
        pytest.param(8, {}, id="skipped steps"),
        pytest.param(8, FP16, id="loss scale"),
        pytest.param(9, ZSCORE, id="history of a mode"),
    ],
)
def test_a_training_with_a_sample_that_is_inf_goes_on(where, step, options):
    """The steps of the sample are skipped, the scale falls, and the schedule waits."""
    with where():
        rows = assert_goes_on(partial(partitioned, 17), step, **options)
    assert rows[-1]["grad/nonfinite"] > 0
    if options is ZSCORE:
        assert {row["clip/clipped"] for row in rows} == {0, 1}


@cache
def rows_in_backward(clips):
    """The rows of a training that goes on, and that clips, or clips and steps, in backward."""
    mode = {"mode": "adagc", "threshold": 1.02, "warmup_steps": 3, "absolute": 0.5}
    return assert_goes_on(
        partitioned,
        8,
        in_backward=lambda: clips,
        nonfinite=lambda: "error",
        algorithms=lambda: build(**mode),
        what_if=list,
    )


@pytest.mark.parametrize("clips", ["", "clip", "step"])
def test_a_training_that_clips_in_the_backward_pass_goes_on(clips):
    assert any(row["clip/clipped"] for row in rows_in_backward(clips))


@pytest.mark.parametrize("clips", ["clip", "step"])
def test_clipping_in_the_backward_pass_keeps_the_steps(clips):
    for row, expected in zip(rows_in_backward(clips), rows_in_backward(""), strict=True):
        ours = {key: value for key, value in row.items() if key not in TIMES}
        theirs = {key: value for key, value in expected.items() if key not in TIMES}
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7, nan_ok=True)


def scaled():
    return trainer(Rows(), partitioned, precision="fp16", loss_scale=LossScale(2.0**10, 2))


def test_the_state_has_all_parts():
    state = fitted(scaled()).state.state_dict()
    assert state["loss_scale"] == {"scale": 2.0**17, "finite_steps": 1}
    parts = {"progress", "meter", "clip", "optimizer", "loss_scale", "schedulers", "random"}
    assert state.keys() == parts | {"skips", "microbatch", "callbacks", "loss"}


@pytest.mark.parametrize(("keep", "searches"), [((), 5), ({"metrics"}, 0)])
def test_a_branch_counts_its_own_steps_alone(keep, searches):
    state = fitted(scaled()).state.state_dict()
    branch = scaled()
    branch.state.load_state_dict(state | {"skips": state["skips"] | {"searches": 5}}, keep)
    assert branch.skipped_steps.searches == searches


def test_the_state_is_read_between_steps_alone():
    trained = fitted(scaled())
    trained.optimizer.backward(trained.model(torch.ones(2, 6)).sum())
    refused(StepOrderError, "between optimizer steps only", trained.state.state_dict)


def test_a_rank_that_the_state_does_not_know_draws_numbers_of_its_own():
    training = trainer(Rows(), partitioned)
    state = training.state.state_dict()
    drawn = []
    for rank in (0, 1, 1, 2):
        training.state.rank = rank
        training.state.load_state_dict(state)
        drawn.append(torch.rand(1).item())
    assert drawn[1] == drawn[2]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("part", ["schedulers", "optimizer"])
def test_the_state_of_another_training_is_refused_before_it_changes_anything(part):
    trained = trainer(Rows(), partitioned)
    fresh = trainer(Rows(), partitioned)
    trained.fit()
    state = trained.state.state_dict()
    before = timeless(copy.deepcopy(fresh.state.state_dict()))
    section = state[part][0] if part == "schedulers" else state[part]
    refused(ValueError, part, fresh.state.load_state_dict, state | {part: [section, section]})
    assert timeless(fresh.state.state_dict()) == before
