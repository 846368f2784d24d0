"""A training that continues from a state takes the same steps, to the bit, as one never stopped."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from runner import Trainer
from runner.booster import LossScale, SinglePlugin
from runner.booster.optimizer import StepOrderError
from runner.clip import ClipMode, Decision, GradStats, Layout, build, limit_norm
from runner.optim.schedulers import LinearWarmupCosineLR
from tests.distributed.training import Rows
from tests.on_device import kept_on_device

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


class Estimated(Sampler):
    """Batches in a random order whose number is only estimated."""

    def __len__(self) -> int:
        return 99

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[at : at + BATCH] for at in range(0, SAMPLES, BATCH)])


def partitioned(dataset: Any = None, **options: Any) -> Any:
    data = Jittered() if dataset is None else dataset
    return SinglePlugin().prepare_dataloader(data, BATCH, shuffle=True, seed=3, **options)


def stateful(**options: Any) -> Any:
    return StatefulDataLoader(Jittered(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "partitioned": partitioned,
    "drop_last": lambda: partitioned(drop_last=True),
    "shuffled": lambda: DataLoader(Jittered(), BATCH, shuffle=True),
    "a generator of its own": lambda: DataLoader(
        Jittered(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "an estimated length": lambda: DataLoader(Jittered(), batch_sampler=Estimated()),
    "a stream": lambda: DataLoader(Streamed(), BATCH),
    "a stateful loader": lambda: stateful(batch_size=BATCH, shuffle=True),
    "a stateful loader in order": lambda: stateful(batch_sampler=partitioned().batch_sampler),
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
    return Saving(model, loader(), "15ba", sinks=[rows], **settings)


def timeless(value: Any) -> Any:
    """The same without times, and comparable where it holds NaN."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in TIMES}
    return repr(value)


def assert_goes_on(loader: Callable[[], Any], step: int, **options: Any) -> list[dict[str, Any]]:
    """That a training saved after ``step`` goes on as if nothing had happened.

    Returns:
        The rows of the whole training.
    """

    def made(rows: Rows) -> Saving:
        each = {key: value() for key, value in options.items()}
        return trainer(rows, loader, **each)

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
    wanted = plain.model.unwrap().state_dict()
    for name, tensor in second.model.unwrap().state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert timeless(second.state.state_dict()) == timeless(plain.state.state_dict())
    return unsaved.rows


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("step", [2, 6, 9])
def test_a_training_goes_on_inside_and_between_epochs(loader, step):
    # Six windows an epoch: steps 2 and 9 are inside of one, step 6 ends one.
    rows = assert_goes_on(LOADERS[loader], step)
    assert [row["train/step"] for row in rows] == [4, 7, 8, 12, 14, 15]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_worker_processes_read_the_same_order(kind):
    def loader():
        data = TensorDataset(Jittered().inputs, Jittered().targets)
        return kind(data, BATCH, shuffle=True, num_workers=1)

    assert_goes_on(loader, 9)


class Counted(TensorDataset):
    """Counts the samples that are read."""

    read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.read += 1
        return super().__getitem__(index)


def test_a_stateful_loader_reads_nothing_again():
    data = Counted(Jittered().inputs, Jittered().targets)
    first = trainer(Rows(), lambda: StatefulDataLoader(data, BATCH, shuffle=True))
    first.saves_after = 3
    first.fit()
    second = trainer(Rows(), lambda: StatefulDataLoader(data, BATCH, shuffle=True))
    second.model.unwrap().load_state_dict(first.saved[0])
    second.state.load_state_dict(first.saved[1])
    data.read = 0
    second.fit()
    assert data.read == 44 - 3 * 2 * BATCH + 44 + 3 * 2 * BATCH + 2 * BATCH  # the last read ahead


@pytest.mark.parametrize("kept", [False, True])
def test_skipped_steps_and_the_loss_scale_go_on(kept):
    """One sample is inf: its steps are skipped, the scale falls, and the schedule waits."""

    def loader():
        return partitioned(Jittered(bad=17))

    options = {"precision": lambda: "fp16", "loss_scale": lambda: LossScale(2.0**10, 2)}
    for more in ({}, options):
        if kept:
            with kept_on_device():
                rows = assert_goes_on(loader, 8, **more)
        else:
            rows = assert_goes_on(loader, 8, **more)
        assert rows[-1]["grad/nonfinite"] > 0


class RelativeToMean(ClipMode):
    """Limits ‖G‖ to λ times its running mean over earlier finite steps."""

    initial_history: ClassVar = {"mean": 0.5}

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        mean = self.history["mean"]
        self.history["mean"] = 0.8 * mean + 0.2 * stats.norm
        return limit_norm(stats.norm, self.limit * mean)


@pytest.mark.parametrize("kept", [False, True])
def test_a_clipping_mode_goes_on_with_its_history(kept):
    def loader():
        return partitioned(Jittered(bad=17))

    options = {"algorithms": lambda: RelativeToMean(0.9), "optimizers": lambda: None}
    options["schedulers"] = lambda: None
    if kept:
        with kept_on_device():
            rows = assert_goes_on(loader, 9, **options)
    else:
        rows = assert_goes_on(loader, 9, **options)
    limits = {row["clip/threshold"] for row in rows}
    assert len(limits) == len(rows)
    assert {row["clip/clipped"] for row in rows} == {0, 1}


def test_the_loss_scale_is_part_of_the_state():
    made = trainer(Rows(), partitioned, precision="fp16", loss_scale=LossScale(2.0**10, 2))
    made.fit()
    assert made.state.state_dict()["loss_scale"] == {"scale": 2.0**17, "finite_steps": 1}


def test_several_optimizers_and_schedulers_go_on():
    def model():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    runs = []
    for saved in (None, 5):
        net, rows = model(), Rows()
        both = [
            torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(net[3].parameters(), lr=0.01),
        ]
        rates = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in both]
        options = {"optimizers": both, "schedulers": rates, "sinks": [rows]}
        made = Saving(net, partitioned(), "12ba", **options)
        if saved is None:
            made.saves_after = 5
            made.fit()
            weights, state = made.saved
            runs.append((net, rows.rows[5:]))
        else:
            net.load_state_dict(weights)
            made.state.load_state_dict(state)
            made.fit()
            runs.append((net, rows.rows))
    (wanted, rows), (got, later) = runs
    assert list(map(timeless, later)) == list(map(timeless, rows))
    assert all(map(torch.equal, got.parameters(), wanted.parameters()))


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        assert all(isinstance(key, str | int) for key in value)
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


@pytest.mark.parametrize("loader", LOADERS)
def test_the_state_is_plain(loader):
    made = trainer(Rows(), LOADERS[loader])
    made.saves_after = 8
    made.fit()
    _, state = made.saved
    wanted = {"progress", "meter", "clip", "optimizer", "loss_scale", "schedulers", "random"}
    wanted |= {"skips", "microbatch", "callbacks"}
    assert state.keys() == wanted
    plain = (Tensor, bool, int, float, str, type(None))
    assert {type(leaf) for leaf in leaves(state)} <= set(plain)


def test_the_state_is_read_between_steps_alone():
    made = trainer(Rows(), partitioned)
    made.optimizer.backward(made.model(torch.ones(2, 6)).sum())
    with pytest.raises(StepOrderError, match="between optimizer steps only"):
        made.state.state_dict()


def test_a_rank_that_the_state_does_not_know_draws_numbers_of_its_own():
    made = trainer(Rows(), partitioned)
    state = made.state.state_dict()
    drawn = []
    for rank in (0, 1, 1, 2):
        made.state.rank = rank
        made.state.load_state_dict(state)
        drawn.append(torch.rand(1).item())
    assert drawn[1] == drawn[2]
    assert len(set(drawn)) == 3


def test_a_state_without_random_numbers_is_refused():
    made = trainer(Rows(), partitioned)
    with pytest.raises(ValueError, match="no random state of rank0"):
        made.state.load_state_dict(made.state.state_dict() | {"random": {}})


@pytest.mark.parametrize("part", ["schedulers", "optimizer"])
def test_the_state_of_another_number_of_schedulers_or_optimizers_changes_nothing(part):
    made = trainer(Rows(), partitioned)
    made.fit()
    state, other = made.state.state_dict(), trainer(Rows(), partitioned)
    before = timeless(copy.deepcopy(other.state.state_dict()))
    one = state[part][0] if part == "schedulers" else state[part]
    with pytest.raises(ValueError, match=part):
        other.state.load_state_dict(state | {part: [one, one]})
    assert timeless(other.state.state_dict()) == before


def test_a_run_that_is_made_longer_goes_on_inside_the_epoch():
    whole, parts = Rows(), Rows()
    plain = trainer(whole, partitioned, eval_dataloader=None, log_interval=1)
    plain.fit()
    made = trainer(parts, partitioned, eval_dataloader=None, log_interval=1)
    longest, made.max_duration = made.max_duration, type(made.max_duration)(8, "ba")
    made.fit()
    made.max_duration = longest
    made.fit()
    assert list(map(timeless, parts.rows)) == list(map(timeless, whole.rows))
