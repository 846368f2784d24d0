"""A whole training loop with its record, against the same loop in plain PyTorch.

The bare loop clips by ``torch.nn.utils.clip_grad_norm_(foreach=True)`` and records nothing. Both
loops read the same loader and step the same fused optimizer. Loops alternate in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from runner.bench import memory
from runner.bench.pairs import Side, interleave, milliseconds, ratio
from runner.bench.ranks import on_ranks, together
from runner.bench.subjects import threads
from runner.bench.table import Row, Setting
from runner.booster import Plugin, TorchDDPPlugin
from runner.clip import GradientClipping
from runner.data.dataset import TensorPairs, collate_pairs
from runner.run_folder import files, keys
from runner.run_folder.rows import JsonlSink
from runner.run_folder.rows import Row as Metrics
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from runner.train.trainer import Trainer

TITLE = (
    "a training loop with clipping and its record, one thread\n"
    "1.00 is a bare PyTorch loop with clip_grad_norm_(foreach=True) and no record"
)

THRESHOLD = 0.25
INTERVAL = 50
"""Steps between rows."""


@dataclass(frozen=True)
class Task:
    """What both loops train.

    Attributes:
        name: name in the table.
        make: makes the network.
        shape: shape of one sample.
        batch: samples of a step.
        steps: number of steps.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int

    def parts(self) -> tuple[nn.Module, DataLoader[Any], Optimizer]:
        """Make the network, its loader and its optimizer."""
        model = self.network()
        loader = DataLoader(self.data(), self.batch, shuffle=True, collate_fn=collate_pairs)
        return model, loader, self.optimizer(model)

    def network(self) -> nn.Module:
        """Make the network, always with the same weights."""
        torch.manual_seed(0)
        return self.make()

    def data(self) -> TensorPairs:
        """Draw the samples."""
        samples = self.steps * self.batch
        return TensorPairs(torch.randn(samples, *self.shape), torch.randint(10, (samples,)))

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def mlp() -> nn.Module:
    """Make a network so small that everything besides it shows."""
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def resnet18() -> nn.Module:
    """Make torchvision's ResNet-18 for ten classes."""
    from torchvision.models import resnet18 as made

    model: nn.Module = made(num_classes=10)
    return model


TINY = Task("tiny MLP", mlp, (64,), 64, 200)
LARGE = Task("resnet18", resnet18, (3, 32, 32), 32, 6)
QUICK = Task("tiny MLP", mlp, (64,), 64, 50)


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table."""
    with threads(1), ExitStack() as open_:
        wandb = open_.enter_context(recorded_by_wandb(setting))
        tiny = QUICK if setting.quick else TINY
        yield from single(tiny, [wandb], 41, 1.00, setting)
        if not setting.quick:
            yield from single(LARGE, [wandb], 15, 1.01, setting)
        if setting.peers:
            yield from _peers(tiny, setting)
    yield from on_ranks(ddp, 2, setting)
    yield from memory.rows(setting)


def single(
    task: Task, trackers: Sequence[Sink], usual: int, limit: float, setting: Setting
) -> Iterator[Row]:
    """Measure one process: with rows in a file at every step, and with the full record."""
    with JsonlSink(setting.folder / f"{task.name}.jsonl") as file:
        sides: dict[str, Side] = {
            "bare": lambda: bare(task),
            "full": lambda: trained(task, [file, *trackers], INTERVAL),
        }
        if task.steps > LARGE.steps:
            sides["every"] = lambda: trained(task, [file], 1)
        times = interleave(sides, setting.pairs(usual))
    medians = {name: ms / task.steps for name, ms in milliseconds(times).items()}
    for name, what, bound in (
        ("full", f"JSONL and wandb offline, log.interval={INTERVAL}", limit),
        ("every", "JSONL, log.interval=1", None),
    ):
        if name in times:
            shown = {"bare": medians["bare"], "ours": medians[name]}
            yield Row(f"{task.name}, {what}", ratio(times[name], times["bare"]), bound, ms=shown)


def bare(task: Task) -> float:
    """Train in plain PyTorch; return the seconds."""
    model, loader, optimizer = task.parts()
    return _bare(model, loader, optimizer)


def _bare(model: nn.Module, loader: DataLoader[Any], optimizer: Optimizer) -> float:
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), THRESHOLD, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def trained(
    task: Task,
    sinks: Sequence[Sink],
    interval: int,
    plugin: Plugin | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> float:
    """Train by :class:`runner.Trainer`; return the seconds of ``fit``.

    Args:
        task: what is trained.
        sinks: where rows go.
        interval: steps between rows.
        plugin: how the model is spread over ranks.
        clock: what the seconds are taken from.
        options: further arguments of the trainer.
    """
    model, loader, optimizer = task.parts()
    if plugin is not None:
        loader = plugin.prepare_dataloader(task.data(), task.batch, shuffle=True)
    steps = len(loader) // int(options.get("accumulation_steps", 1))
    usual: dict[str, Any] = {
        "algorithms": [GradientClipping("norm", THRESHOLD)],
        "criterion": nn.CrossEntropyLoss(),
    }
    trainer = Trainer(
        model,
        loader,
        f"{steps}ba",
        optimizers=optimizer,
        plugin=plugin,
        sinks=sinks,
        log_interval=interval,
        **usual | options,
    )
    started = clock()
    summary = trainer.fit()
    seconds = clock() - started
    if summary["steps"] != steps:
        raise RuntimeError(f"{summary['steps']} steps were taken, not {steps}")
    return seconds


def ddp(setting: Setting) -> list[Row]:
    """Measure one rank of several under ``ddp``: the same small network, half a batch each."""
    task = QUICK if setting.quick else TINY
    plugin = TorchDDPPlugin()
    file = JsonlSink(setting.folder / f"ddp-{plugin.rank}.jsonl")

    def theirs() -> float:
        loader = plugin.prepare_dataloader(task.data(), task.batch, shuffle=True)
        model = DistributedDataParallel(task.network())
        return _bare(model, loader, task.optimizer(model))

    def ours() -> float:
        return trained(task, [] if plugin.rank else [file], INTERVAL, plugin)

    times = interleave({"bare": _slowest(theirs), "ours": _slowest(ours)}, setting.pairs())
    steps = task.steps // plugin.world_size
    medians = {name: ms / steps for name, ms in milliseconds(times).items()}
    what = f"{task.name} under ddp, {plugin.world_size} ranks, JSONL, log.interval={INTERVAL}"
    return [Row(what, ratio(times["ours"], times["bare"]), 1.10, ms=medians)]


def _slowest(side: Side) -> Side:
    """Return a side with the seconds of the slowest rank."""
    kept: list[float] = []
    begin = together(lambda: kept.append(side()))

    def timed() -> float:
        begin()
        slowest = torch.tensor(kept.pop(), dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        return slowest.item()

    return timed


def _peers(task: Task, setting: Setting) -> Iterator[Row]:
    from runner.bench.peers import loops

    sides: dict[str, Side] = {"bare": lambda: bare(task), **loops(task, THRESHOLD)}
    if len(sides) == 1:
        return
    times = interleave(sides, setting.pairs())
    medians = {name: ms / task.steps for name, ms in milliseconds(times).items()}
    for name in list(sides)[1:]:
        shown = {"bare": medians["bare"], "theirs": medians[name]}
        yield Row(f"{task.name}, {name}", ratio(times[name], times["bare"]), ms=shown)


class Continued:
    """Passes the rows of many trainings to one sink, with steps that go on."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._before = self._last = 0

    def write(self, row: Metrics) -> None:
        """Take one row of the training that goes on, or the first one of the next."""
        step = int(row[keys.TRAIN_STEP])
        if self._before + step <= self._last:
            self._before = self._last
        self._last = self._before + step
        self._sink.write(row | {keys.TRAIN_STEP: self._last})

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the sink."""
        self._sink.close(summary, exit_code)


@contextmanager
def recorded_by_wandb(setting: Setting, patience: float = 30.0) -> Iterator[Sink]:
    """Context with a sink of wandb, offline, whose process has begun to record.

    Args:
        setting: where its files go.
        patience: most seconds to wait until it has begun.
    """
    run: dict[str, Any] = {"project": "bench", "group": None, "tags": [], "job_type": "bench"}
    run |= {"name": "bench", "run_id": new_run_id(), "config": {}}
    sink = Continued(WandbSink(setting.folder, mode="offline", timeout=60.0, **run))
    until = time.monotonic() + patience
    while time.monotonic() < until and not any((setting.folder / files.WANDB).glob("*run-*")):
        time.sleep(0.1)
    try:
        yield sink
    finally:
        sink.close(None, 0)
