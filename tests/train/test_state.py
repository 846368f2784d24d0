"""A training that continues from a state takes the same steps, to the bit, as one never stopped."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
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
from tests.trainers import trainer_of

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
        return {key: timeless(each) for key, each in value.items() if key not in TIMES}
    return repr(value)


def assert_goes_on(loader: Callable[[], Any], step: int, **options: Any) -> list[dict[str, Any]]:
    """Assert that a training saved after ``step`` goes on as one never stopped; return its rows."""

    def made(rows: Rows) -> Saving:
        return trainer(rows, loader, **{key: value() for key, value in options.items()})

    unsaved, whole, resumed = Rows(), Rows(), Rows()
    plain = made(unsaved)
    summary = plain.fit()
    first = made(whole)
    first.saves_after = step
    assert timeless(first.fit()) == timeless(summary)
    weights, state = first.saved

    second = made(resumed)
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
def test_a_training_goes_on_inside_and_between_epochs(loader, step):
    # Six windows an epoch: steps 2 and 9 are inside of one, step 6 ends one.
    rows = assert_goes_on(LOADERS[loader], step)
    assert [row["train/step"] for row in rows] == [4, 7, 8, 12, 14, 15]


@pytest.mark.parametrize("where", [nullcontext, kept_on_device])
def test_skipped_steps_the_loss_scale_and_the_history_of_a_mode_go_on(where):
    """One sample is inf: its steps are skipped, the scale falls, and the schedule waits."""

    fp16 = {"precision": lambda: "fp16", "loss_scale": lambda: LossScale(2.0**10, 2)}
    mode = {"optimizers": lambda: None, "schedulers": lambda: None, "what_if": list}
    mode["algorithms"] = lambda: build("zscore", threshold=0.5, warmup_steps=3)
    with where():
        for step, options in ((8, {}), (8, fp16), (9, mode)):
            rows = assert_goes_on(partial(partitioned, 17), step, **options)
            assert rows[-1]["grad/nonfinite"] > 0
    assert {row["clip/clipped"] for row in rows} == {0, 1}


def test_clipping_and_stepping_in_the_backward_pass_keep_the_steps_and_go_on():
    mode, found = {"mode": "adagc", "threshold": 1.02, "warmup_steps": 3, "absolute": 0.5}, []
    for clips in ("", "clip", "step"):
        options = {"in_backward": clips, "nonfinite": "error"}
        made = {key: lambda value=value: value for key, value in options.items()}
        made |= {"algorithms": lambda: build(**mode), "what_if": list}
        rows = assert_goes_on(partitioned, 8, **made)
        found.append([{k: v for k, v in row.items() if k not in TIMES} for row in rows])
    assert any(row["clip/clipped"] for row in found[0])
    for rows in found[1:]:
        for mine, theirs in zip(rows, found[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-7, nan_ok=True)


def test_the_state_has_all_parts_and_is_read_between_steps_alone():
    made = trainer(Rows(), partitioned, precision="fp16", loss_scale=LossScale(2.0**10, 2))
    made.fit()
    state = made.state.state_dict()
    assert state["loss_scale"] == {"scale": 2.0**17, "finite_steps": 1}
    wanted = {"progress", "meter", "clip", "optimizer", "loss_scale", "schedulers", "random"}
    assert state.keys() == wanted | {"skips", "microbatch", "callbacks", "loss"}
    for keep, searches in (((), 5), ({"metrics"}, 0)):  # a branch counts its own steps alone
        other = trainer(Rows(), partitioned, precision="fp16", loss_scale=LossScale(2.0**10, 2))
        other.state.load_state_dict(state | {"skips": state["skips"] | {"searches": 5}}, keep)
        assert other.skipped_steps.searches == searches
    made.optimizer.backward(made.model(torch.ones(2, 6)).sum())
    refused(StepOrderError, "between optimizer steps only", made.state.state_dict)


def test_a_rank_that_the_state_does_not_know_draws_numbers_of_its_own():
    made = trainer(Rows(), partitioned)
    state, drawn = made.state.state_dict(), []
    for rank in (0, 1, 1, 2):
        made.state.rank = rank
        made.state.load_state_dict(state)
        drawn.append(torch.rand(1).item())
    assert drawn[1] == drawn[2]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("part", ["schedulers", "optimizer"])
def test_the_state_of_another_training_is_refused_and_changes_nothing(part):
    made, other = trainer(Rows(), partitioned), trainer(Rows(), partitioned)
    made.fit()
    state = made.state.state_dict()
    before = timeless(copy.deepcopy(other.state.state_dict()))
    one = state[part][0] if part == "schedulers" else state[part]
    refused(ValueError, part, other.state.load_state_dict, state | {part: [one, one]})
    assert timeless(other.state.state_dict()) == before
