"""A whole training loop with its record, against the same loop in plain PyTorch.

The bare loop clips by ``torch.nn.utils.clip_grad_norm_(foreach=True)`` and records nothing. Both
loops read the same loader and step the same fused optimizer. Loops alternate in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from runner.bench.pairs import Side, clocked, interleave
from runner.bench.peers import loops, plain_loop
from runner.bench.ranks import on_ranks, slowest
from runner.bench.subjects import of_torchvision, threads
from runner.bench.table import Row, Setting, compared
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
    """What both loops train: a network, samples of one shape, a batch size, a number of steps."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int

    def parts(self, plugin: Plugin | None = None) -> tuple[nn.Module, DataLoader[Any], Optimizer]:
        """Make the network, always with the same weights, its loader and its optimizer."""
        torch.manual_seed(0)
        model, samples = self.make(), self.steps * self.batch
        data = TensorPairs(torch.randn(samples, *self.shape), torch.randint(10, (samples,)))
        if plugin is None:
            loader = DataLoader(data, self.batch, shuffle=True, collate_fn=collate_pairs)
        else:
            loader = plugin.prepare_dataloader(data, self.batch, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        return model, loader, optimizer


def mlp() -> nn.Module:
    """Make a network so small that everything besides it shows."""
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


TINY = Task("tiny MLP", mlp, (64,), 64, 200)
QUICK = Task("tiny MLP", mlp, (64,), 64, 50)
LARGE = Task("resnet18", partial(of_torchvision, "resnet18", num_classes=10), (3, 32, 32), 32, 6)


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table."""
    tiny = QUICK if setting.quick else TINY
    with threads(1), recorded_by_wandb(setting) as wandb:
        yield from single(tiny, wandb, 41, 1.00, setting)
        if not setting.quick:
            yield from single(LARGE, wandb, 15, 1.01, setting)
        if setting.peers:
            theirs = loops(tiny, THRESHOLD)
            times = interleave({"bare": partial(bare, tiny), **theirs}, setting.pairs())
            for name in theirs:
                what = f"{tiny.name}, {name}"
                yield compared(what, times, name, "bare", steps=tiny.steps)
    yield from on_ranks(ddp, 2, setting)


def single(task: Task, wandb: Sink, usual: int, limit: float, setting: Setting) -> Iterator[Row]:
    """Measure one process: with the full record, and a small task with a row for every step."""
    with JsonlSink(setting.folder / f"{task.name}.jsonl") as file:
        sides: dict[str, Side] = {"bare": partial(bare, task)}
        sides["full"] = partial(trained, task, [file, wandb], INTERVAL)
        if task is not LARGE:
            sides["every"] = partial(trained, task, [file], 1)
        times = interleave(sides, setting.pairs(usual))
    what = f"{task.name}, JSONL and wandb offline, log.interval={INTERVAL}"
    yield compared(what, times, "full", "bare", limit, steps=task.steps)
    if "every" in times:
        what = f"{task.name}, JSONL, log.interval=1"
        yield compared(what, times, "every", "bare", steps=task.steps)


def bare(task: Task, plugin: Plugin | None = None) -> float:
    """Train in plain PyTorch, under DDP if there is a plugin; return the seconds."""
    network, loader, optimizer = task.parts(plugin)
    model = network if plugin is None else DistributedDataParallel(network)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), THRESHOLD, foreach=True)

    return plain_loop(model, loader, optimizer, torch.Tensor.backward, clip)


def trained(
    task: Task, sinks: Sequence[Sink], interval: int, plugin: Plugin | None = None
) -> float:
    """Train by :class:`runner.Trainer` with a row each ``interval`` steps; return the seconds."""
    model, loader, optimizer = task.parts(plugin)
    trainer = Trainer(
        model,
        loader,
        f"{len(loader)}ba",
        optimizers=optimizer,
        plugin=plugin,
        sinks=sinks,
        log_interval=interval,
        algorithms=[GradientClipping("norm", THRESHOLD)],
        criterion=nn.CrossEntropyLoss(),
    )
    return clocked(trainer.fit)


def ddp(setting: Setting) -> list[Row]:
    """Measure one rank of several under ``ddp``: the same small network, half a batch each."""
    task, plugin = QUICK if setting.quick else TINY, TorchDDPPlugin()
    file = JsonlSink(setting.folder / f"ddp-{plugin.rank}.jsonl")
    sinks = [] if plugin.rank else [file]
    sides = {"bare": partial(bare, task, plugin)}
    sides["ours"] = partial(trained, task, sinks, INTERVAL, plugin)
    times = interleave({name: slowest(side) for name, side in sides.items()}, setting.pairs())
    what = f"{task.name} under ddp, {plugin.world_size} ranks, JSONL, log.interval={INTERVAL}"
    steps = task.steps // plugin.world_size
    return [compared(what, times, "ours", "bare", 1.10, steps=steps)]


class Continued:
    """Passes the rows of many trainings to one sink, with steps that go on."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._steps = sink, count(1)

    def write(self, row: Metrics) -> None:
        """Take one row of a training."""
        self._sink.write(row | {keys.TRAIN_STEP: next(self._steps)})

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the sink."""
        self._sink.close(summary, exit_code)


@contextmanager
def recorded_by_wandb(setting: Setting) -> Iterator[Sink]:
    """Context with a sink of wandb, offline, whose process has begun to record."""
    run: dict[str, Any] = {"project": "bench", "group": None, "tags": [], "job_type": "bench"}
    run |= {"name": "bench", "run_id": new_run_id(), "config": {}}
    sink = Continued(WandbSink(setting.folder, mode="offline", timeout=60.0, **run))
    until = time.monotonic() + 30.0
    while time.monotonic() < until and not any((setting.folder / files.WANDB).glob("*run-*")):
        time.sleep(0.1)
    try:
        yield sink
    finally:
        sink.close(None, 0)
