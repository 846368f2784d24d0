"""Whole optimizer steps under each plugin against the same steps by torch's own tools.

Both sides live in one process group and take their steps in turn, with the same weights, samples,
optimizer and clipping. Their first steps are compared, so that they do the same work.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from runner.bench import torch_steps
from runner.bench.parallel import on_ranks, slowest
from runner.bench.timing import Row, Setting, Times, clocked, compared, interleave, row
from runner.bench.torch_steps import MICROBATCHES, Batch, Step
from runner.booster import Booster
from runner.booster.plugin import PLUGINS
from runner.clip import build
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from runner.parallel.recompute import checkpoint_activations

RANKS = 2
THRESHOLD = 0.25  # of the norm
LIMIT = 1.03
LESS_MEMORY = 0.7  # of steps that recompute activations, which are most of the memory of LONG
WARM_UP = 2  # steps of each side before it is measured
MEMORY_ROUNDS = 3  # what a shard gathers is freed at moments that vary
TOLERANCE = 1e-3  # of the norms of the first steps, in float32


@dataclass(frozen=True)
class Subject:
    """What both sides train: a network, a batch of a rank, a loss, an optimizer."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    new_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]

    def model(self) -> nn.Module:
        """Make the network, always with the same weights."""
        torch.manual_seed(0)
        return self.make()

    def batch_of(self, number: int) -> Batch:
        """Make batch ``number``, always the same."""
        return self.batch(torch.Generator().manual_seed(number))


class Rival(NamedTuple):
    """What a plugin is compared with."""

    plugin: str
    options: dict[str, Any]  # of the plugin
    against: str
    new_step: Callable[..., Step]
    splits_samples: bool = True  # whether each rank reads samples of its own
    limit: float | None = LIMIT


class Shape(NamedTuple):
    """Sizes of a transformer and of its batch on each rank."""

    layers: int
    width: int
    heads: int
    samples: int
    context: int
    vocabulary: int = 256


RIVALS = {
    "ddp": Rival("ddp", {}, "DDP", torch_steps.data_parallel),
    "zero 1": Rival("zero", {"stage": 1}, "ZeroRedundancyOptimizer", torch_steps.redundant),
    "zero 2": Rival(
        "zero",
        {"stage": 2},
        "fully_shard, not resharded after forward",
        partial(torch_steps.sharded, reshard_after_forward=False),
    ),
    "fsdp": Rival("fsdp", {}, "fully_shard", torch_steps.sharded),
    "tensor": Rival(
        "tensor", {}, "parallelize_module", torch_steps.tensor_parallel, splits_samples=False
    ),
    "pipeline": Rival(
        "pipeline",
        {"num_microbatches": MICROBATCHES},
        "Schedule1F1B",
        torch_steps.pipelined,
        splits_samples=False,
        limit=None,
    ),
    "moe": Rival("moe", {}, "plain all-to-all", torch_steps.spread_experts, limit=None),
}
"""Ways to split a model; zero 3 is fsdp."""

FULL = Shape(layers=12, width=256, heads=4, samples=4, context=64)
TINY = Shape(layers=2, width=16, heads=2, samples=4, context=8)
LONG = Shape(layers=12, width=256, heads=4, samples=16, context=128)
LONG_TINY = Shape(layers=4, width=16, heads=2, samples=16, context=64)


def resnet18(samples: int, size: int) -> Subject:
    """Return a ResNet-18 with SGD, on images of ``size`` pixels squared."""

    def batch(draw: torch.Generator) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=draw)
        return images, torch.randint(10, (samples,), generator=draw)

    return Subject(
        name="resnet18",
        make=lambda: torchvision.models.resnet18(num_classes=10),
        batch=batch,
        loss=F.cross_entropy,
        new_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )


def gpt(shape: Shape, experts: int = 0) -> Subject:
    """Return a GPT with fused AdamW; with ``experts`` one of a mixture for each MLP."""
    sizes: dict[str, Any] = {
        "vocabulary": shape.vocabulary,
        "context": shape.context,
        "layers": shape.layers,
        "heads": shape.heads,
        "width": shape.width,
        "tied": False,
        "bias": True,
        "dropout": 0.0,
    }

    def make() -> nn.Module:
        return MixtureGPT(experts=experts, top_k=2, **sizes) if experts else GPT(**sizes)

    def batch(draw: torch.Generator) -> Batch:
        both = (shape.samples, shape.context)
        inputs = torch.randint(shape.vocabulary, both, generator=draw)
        return inputs, torch.randint(shape.vocabulary, both, generator=draw)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    kind = f"{experts} experts, " if experts else ""
    return Subject(
        name=f"{kind}gpt {shape.layers}x{shape.width}",
        make=make,
        batch=batch,
        loss=loss,
        new_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    )


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "resnet18": lambda quick: resnet18(4, 64) if quick else resnet18(16, 32),
    "gpt": lambda quick: gpt(TINY if quick else FULL),
    "experts": lambda quick: gpt(TINY if quick else FULL, experts=4),
}
CONTESTS = {
    "resnet18": ("ddp", "zero 1", "fsdp"),
    "gpt": ("ddp", "zero 1", "zero 2", "fsdp", "tensor", "pipeline"),
    "experts": ("moe",),
}
"""What each subject is trained under."""


def rows(setting: Setting) -> Iterator[Row]:
    """Whole optimizer steps with clipping, on 2 ranks (gloo, one thread each).

    1.00 is the same step by the tool of torch that a row names; below it the peak memory of steps.
    The last rows compare steps that recompute the activations of blocks with those that keep them
    """
    for subject, names in CONTESTS.items():
        for name in names:
            yield from on_ranks(partial(contest, subject, name), RANKS, setting)
    yield from on_ranks(recomputed, RANKS, setting)


def contest(subject_name: str, name: str, setting: Setting) -> list[Row]:
    """Measure time and memory of one way to split one subject; every rank calls it."""
    subject = SUBJECTS[subject_name](setting.quick)
    rival = RIVALS[name]
    number = dist.get_rank() if rival.splits_samples else 0
    batch = subject.batch_of(number)
    makers: dict[str, Callable[[], Step]] = {
        "torch": lambda: torchs_step(subject, rival, batch),
        "ours": lambda: our_step(subject, rival, batch),
    }
    what = f"{subject.name}, {name} over {rival.against}"
    times, memory = measured(what, makers, setting)
    return [
        compared(what, times, "ours", "torch", rival.limit),
        row(f"{what}, memory", memory, rival.limit),
    ]


def recomputed(setting: Setting) -> list[Row]:
    """Measure what ``activation_checkpointing=blocks`` costs and saves; every rank calls it."""
    subject = gpt(LONG_TINY if setting.quick else LONG)
    batch = subject.batch_of(dist.get_rank())
    rival = RIVALS["fsdp"]
    makers: dict[str, Callable[[], Step]] = {
        "kept": lambda: our_step(subject, rival, batch),
        "recomputed": lambda: our_step(subject, rival, batch, recomputes=True),
    }
    what = f"{subject.name}, fsdp, activations of blocks recomputed over kept"
    times, memory = measured(what, makers, setting)
    return [
        compared(what, times, "recomputed", "kept"),
        row(f"{what}, memory", memory, LESS_MEMORY),
    ]


def measured(
    what: str, makers: Mapping[str, Callable[[], Step]], setting: Setting
) -> tuple[Times, list[float]]:
    """Return the times of two sides, and the peak memory of the second over that of the first."""
    memory = []
    for _ in range(1 if setting.quick else MEMORY_ROUNDS):
        base, side = (peak_memory(make, setting.folder) for make in makers.values())
        memory.append(side / base)
    steps = {side: make() for side, make in makers.items()}
    require_equal(what, [[float(step()) for step in steps.values()] for _ in range(WARM_UP)])
    sides = {side: slowest(_clocked(step)) for side, step in steps.items()}
    return interleave(sides, setting.pairs(31)), memory


def _clocked(step: Step) -> Callable[[], float]:
    return lambda: clocked(step)


def require_equal(what: str, norms: Iterable[Iterable[float]]) -> None:
    """Check that both sides have measured the same norm in each of their first steps."""
    for theirs, ours in norms:
        if not abs(ours - theirs) <= TOLERANCE * theirs:
            raise RuntimeError(f"{what}: both sides take other steps, norms {ours} and {theirs}")


def torchs_step(subject: Subject, rival: Rival, batch: Batch) -> Step:
    return rival.new_step(
        subject.model(), batch, subject.loss, subject.new_optimizer, threshold=THRESHOLD
    )


def our_step(subject: Subject, rival: Rival, batch: Batch, recomputes: bool = False) -> Step:
    """Boost the subject, and return what takes a step of it and returns the norm."""
    network = subject.model()
    if recomputes:
        checkpoint_activations(network)
    booster = Booster(plugin=PLUGINS[rival.plugin](**rival.options))
    model, optimizer, *_ = booster.boost(network, subject.new_optimizer(network.parameters()))
    mode = build("norm", threshold=THRESHOLD)
    optimizer.bind(mode)
    inputs, targets = batch

    def step() -> Tensor:
        if rival.plugin == "pipeline":
            booster.execute_pipeline(iter([batch]), model, subject.loss, optimizer)
        else:
            booster.backward(subject.loss(model(inputs), targets), optimizer)
        norm: Tensor = optimizer.clip_and_step(mode).norm
        optimizer.zero_grad()
        return norm

    return step


def peak_memory(make: Callable[[], Step], folder: Path) -> float:
    """Return the most bytes of tensors on a rank during steps, by torch's profiler.

    It counts what lives while steps run, also parameters and the state of the optimizer.
    """
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints its own messages
    steps_from = f"steps {secrets.token_hex(3)}"
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step = make()
        step()
        with torch.profiler.record_function(steps_from):
            for _ in range(WARM_UP):
                step()
    file = folder / f"trace-{secrets.token_hex(3)}.json"
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    file.unlink()
    [began] = [event["ts"] for event in events if event.get("name") == steps_from]
    memory = [event for event in events if event.get("name") == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    # The count goes on from profile to profile.
    first = memory[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    peak_bytes = max(e["args"]["Total Allocated"] - before for e in memory if e["ts"] >= began)
    peak = torch.tensor(float(peak_bytes), dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()
