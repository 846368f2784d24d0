"""A whole training loop with its record against the same loop in plain PyTorch, and whole commands.

The bare loop clips by ``torch.nn.utils.clip_grad_norm_(foreach=True)`` and records nothing. Both
loops read the same loader and step the same fused optimizer. Loops alternate in one process. What
other libraries do is written as their documentation shows it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from runner.bench.parallel import on_ranks, slowest
from runner.bench.timing import Row, Setting, Side, clocked, compared, interleave, row
from runner.booster import Booster, Plugin, TorchDDPPlugin
from runner.run_folder import files, keys
from runner.run_folder.strict_json import JsonlSink, read_rows
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from runner.train.options import GradientClipping, Log
from runner.train.trainer import Trainer

THRESHOLD = 0.25  # of the norm
INTERVAL = 50  # steps between rows
# Arguments, and the exit code of each command.
ANSWERS = {"--help": 0, "--cfg job": 0, "clip.treshold=1 accumulation.steps=0": 2, "plan": 0}


class Samples(TensorDataset):
    """Samples in memory, read a batch at a time."""

    draws_nothing = True

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices)]  # type: ignore[no-any-return]


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
        model = self.make()
        samples = self.steps * self.batch
        data = Samples(torch.randn(samples, *self.shape), torch.randint(10, (samples,)))
        make: Any = DataLoader if plugin is None else plugin.prepare_dataloader
        loader = make(data, self.batch, shuffle=True, collate_fn=tuple)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        return model, loader, optimizer


def mlp() -> nn.Module:
    """Make a network so small that everything besides it shows."""
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def tiny(setting: Setting) -> Task:
    """Return the task of the tiny network: an MLP on batches of 64 vectors."""
    return Task(
        name="tiny MLP",
        make=mlp,
        shape=(64,),
        batch=64,
        steps=50 if setting.quick else 200,
    )


LARGE = Task(
    name="resnet18",
    make=lambda: torchvision.models.resnet18(num_classes=10),
    shape=(3, 32, 32),
    batch=32,
    steps=6,
)


def rows(setting: Setting) -> Iterator[Row]:
    """A training loop with clipping and its record, one thread.

    1.00 is a bare PyTorch loop with clip_grad_norm_(foreach=True) and no record
    """
    small = tiny(setting)
    with recorded(setting) as sinks:
        yield _against_bare(setting, small, sinks, pairs=41, limit=1.00)
        if not setting.quick:
            yield _against_bare(setting, LARGE, sinks, pairs=15, limit=1.01)
    if setting.peers:
        yield from _peers(setting, small)
    yield from on_ranks(ddp, 2, setting)


def _against_bare(
    setting: Setting, task: Task, sinks: Sequence[Sink], pairs: int, limit: float
) -> Row:
    sides = {"bare": lambda: bare(task), "full": lambda: trained(task, sinks)}
    times = interleave(sides, setting.pairs(pairs))
    what = f"{task.name}, JSONL and wandb offline, log.interval={INTERVAL}"
    return compared(what, times, "full", "bare", limit, steps=task.steps)


def _peers(setting: Setting, task: Task) -> Iterator[Row]:
    """Measure the same loop in the libraries that are installed."""
    sides: dict[str, Side] = {"bare": lambda: bare(task)}
    if find_spec("lightning"):
        sides["lightning"] = lambda: _fabric(task)
    if find_spec("accelerate"):
        sides["accelerate"] = lambda: _accelerate(task)
    with warnings.catch_warnings(action="ignore"):  # of libraries, about missing arguments
        times = interleave(sides, setting.pairs())
    for name in list(sides)[1:]:
        yield compared(f"{task.name}, {name}", times, name, "bare", steps=task.steps)


def ddp(setting: Setting) -> list[Row]:
    """Measure one rank of several under ``ddp``: the same small network, half a batch each."""
    task = tiny(setting)
    plugin = TorchDDPPlugin()
    sinks = [] if plugin.rank else [JsonlSink(setting.folder / "ddp.jsonl")]
    sides = {
        "bare": slowest(lambda: bare(task, plugin)),
        "ours": slowest(lambda: trained(task, sinks, plugin)),
    }
    times = interleave(sides, setting.pairs())
    what = f"{task.name} under ddp, {plugin.world_size} ranks, JSONL, log.interval={INTERVAL}"
    steps = task.steps // plugin.world_size
    return [compared(what, times, "ours", "bare", 1.10, steps=steps)]


def bare(task: Task, plugin: Plugin | None = None) -> float:
    """Train in plain PyTorch, under DDP if there is a plugin; return the seconds."""
    network, loader, optimizer = task.parts(plugin)
    model = network if plugin is None else DistributedDataParallel(network)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), THRESHOLD, foreach=True)

    return plain_loop(model, loader, optimizer, torch.Tensor.backward, clip)


def trained(task: Task, sinks: Sequence[Sink], plugin: Plugin | None = None) -> float:
    """Return the seconds that a Trainer takes for one epoch of a task."""
    model, loader, optimizer = task.parts(plugin)
    trainer = Trainer(
        model,
        loader,
        f"{len(loader)}ba",
        optimizers=optimizer,
        booster=Booster(plugin=plugin),
        log=Log(sinks, INTERVAL, bar=False),
        algorithms=[GradientClipping("norm", THRESHOLD)],
        criterion=nn.CrossEntropyLoss(),
    )
    return clocked(trainer.fit)


class Continued(WandbSink):
    """wandb with the rows of many trainings, whose steps go on."""

    _steps = count(1)

    def write(self, row: dict[str, Any]) -> None:
        super().write(row | {keys.TRAIN_STEP: next(self._steps)})


@contextmanager
def recorded(setting: Setting) -> Iterator[list[Sink]]:
    """Context with the sinks of a run: a file of rows, and wandb offline."""
    wandb = Continued(
        setting.folder,
        mode="offline",
        timeout=60.0,
        project="bench",
        name="bench",
        job_type="bench",
        group=None,
        tags=[],
        run_id=new_run_id(),
        config={},
    )
    try:
        with JsonlSink(setting.folder / "rows.jsonl") as file:
            yield [file, wandb]
    finally:
        wandb.close(None, 0)


def plain_loop(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer,
    backward: Callable[[Tensor], object],
    clip: Callable[[], object],
) -> float:
    """Train for an epoch in plain PyTorch; return the seconds."""
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for inputs, targets in loader:
        backward(criterion(model(inputs), targets))
        clip()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def _fabric(task: Task) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    network, loader, optimizer = task.parts()
    model, fabric_optimizer = fabric.setup(network, optimizer)
    fabric_loader = fabric.setup_dataloaders(loader)

    def clip() -> None:
        fabric.clip_gradients(model, fabric_optimizer, max_norm=THRESHOLD)

    return plain_loop(model, fabric_loader, fabric_optimizer, fabric.backward, clip)


def _accelerate(task: Task) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader, optimizer = accelerator.prepare(*task.parts())
    parameters = list(model.parameters())

    def clip() -> None:
        accelerator.clip_grad_norm_(parameters, THRESHOLD)

    return plain_loop(model, loader, optimizer, accelerator.backward, clip)


def start(setting: Setting) -> Iterator[Row]:
    """Commands in fresh processes.

    1.00 is python -c 'import torch'; in s: what a run takes besides its training and that import
    """
    sides: dict[str, Side] = {"import": lambda: _run(setting, "-c 'import torch'")}
    answers = list(ANSWERS)[: 1 if setting.quick else None]
    for arguments in answers:
        sides[arguments] = _command(setting, arguments)

    def outside() -> float:
        folder = setting.folder / f"run-{new_run_id()}"
        seconds = _run(setting, f"-m runner train.max_duration=1ba hydra.run.dir={folder}")
        return seconds - sum(float(row[keys.TIME_STEP]) for row in read_rows(folder / files.ROWS))

    sides["run"] = outside
    times = interleave(sides, 1 if setting.quick else setting.pairs(7), 0 if setting.quick else 1)
    for arguments in answers:
        yield compared(f"python -m runner {arguments}", times, arguments, "import", 0.45)
    more = [run - imports for run, imports in zip(times["run"], times["import"], strict=True)]
    what = "a run of one step, beyond that step and import torch"
    yield row(what, more, 4.0, "s")


def _command(setting: Setting, arguments: str) -> Side:
    return lambda: _run(setting, f"-m runner {arguments}", ANSWERS[arguments])


def _run(setting: Setting, words: str, code: int = 0) -> float:
    """Run a command in a process of its own; return the seconds."""
    started = time.perf_counter()
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "RUNNER_OUTPUTS": str(setting.folder / "outputs"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ended = subprocess.run(
        [sys.executable, *shlex.split(words)],
        env=environment,
        cwd=setting.folder,
        capture_output=True,
        timeout=300,
        check=False,
        text=True,
    )
    if ended.returncode != code:
        why = f"ended with {ended.returncode}, not {code}:\n{ended.stderr[-2000:]}"
        raise RuntimeError(f"python {words} {why}")
    return time.perf_counter() - started
