"""Tensor parallelism by ``torch.distributed.tensor.parallel``: what it cannot do, what it costs.

    python -m tests.bench.tensor_styles [--pairs 41]

Trains the GPT of ``conf/model/gpt.yaml`` on 2 ranks (gloo, one thread each) by the styles of
``runner.parallel.tensor``, and by torch's. Steps (forward, backward, clip, AdamW) alternate in one
process group; printed is the median of the ratios of adjacent steps, torch's to ours, in wall time
and in CPU time. Then a width is split that 4 ranks do not divide, and an embedding gets a token
outside its vocabulary.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import runner.booster.plugin.hybrid as hybrid
from runner.booster import Booster, TensorParallelPlugin
from runner.models.gpt import GPT
from runner.parallel.tensor import parallelize
from tests.ranks import run_ranks

BATCH, LENGTH, VOCABULARY = 8, 128, 256
WARM_UP = 5


def torchs(style: str, sequence: bool) -> ParallelStyle | None:
    """Return torch's style for one of ours; None where it has none."""
    between = Shard(1) if sequence else Replicate()
    match style:
        case "colwise":
            return ColwiseParallel(input_layouts=between)
        case "colwise_rep":
            return ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel(output_layouts=between)
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "sequence_parallel" if sequence:
            return SequenceParallel(use_local_output=True)
        case "split_sequence" if sequence:
            return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    return None


def by_torch(
    model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh, *, sequence: bool
) -> None:
    """Split a model by torch's styles; parameters that they leave alone are replicated by ours."""
    before = dict(model.named_parameters(remove_duplicate=False))
    plan = {name: made for name, each in styles.items() if (made := torchs(each, sequence))}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in before.items():
        owner, _, key = name.rpartition(".")
        parameters = model.get_submodule(owner)._parameters
        if (new := parameters[key]) is not old:
            parameters[key] = tied.setdefault(old, new)  # torch unties weights
            if tied[old] is new:
                new.register_hook(partial(as_parameter, new.placements))
    for name, module in model.named_modules():
        if name not in plan and next(module.children(), None) is None:
            parallelize(module, {}, mesh, sequence=sequence)


def as_parameter(placements: Sequence[Placement], gradient: Any) -> Any:
    """Shard a gradient like its parameter: that of a sharded embedding comes out replicated."""
    replicated = all(placement.is_replicate() for placement in gradient.placements)
    return gradient.redistribute(placements=placements) if replicated else gradient


def boosted(split: Callable[..., None], model: nn.Module, sequence: bool = False) -> Any:
    """Return the booster, the model and its optimizer under tensor parallelism."""
    booster = Booster(plugin=TensorParallelPlugin(sequence_parallel=sequence))
    optimizer = torch.optim.AdamW(model.parameters())
    with patch.object(hybrid, "parallelize", split):
        made, wrapped, *_ = booster.boost(model, optimizer)
    return booster, made, wrapped


def stepper(split: Callable[..., None], sequence: bool) -> Callable[[], tuple[float, float, float]]:
    """Return a function that takes a step, and returns wall time, CPU time and the loss."""
    torch.manual_seed(0)
    shape = {"vocabulary": VOCABULARY, "context": LENGTH, "layers": 4, "heads": 4, "width": 128}
    model = GPT(**shape, tied=True, bias=True, dropout=0.0)
    booster, model, optimizer = boosted(split, model, sequence)
    drawn = torch.Generator().manual_seed(1)

    def step() -> tuple[float, float, float]:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=drawn)
        dist.barrier()
        started = time.perf_counter(), time.process_time()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.25)
        optimizer.step()
        optimizer.zero_grad()
        wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
        return wall, cpu, loss.item()

    return step


def compared(pairs: int) -> list[str]:
    """Return a line with the ratios for activations that are whole, and for sharded ones."""
    lines = []
    for sequence in (False, True):
        ours, theirs = stepper(parallelize, sequence), stepper(by_torch, sequence)
        for _ in range(WARM_UP):
            first, other = ours()[2], theirs()[2]
        assert abs(first - other) < 1e-5, (first, other)
        rows = []
        for turn in range(pairs):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            made = {step: step() for step in order}
            rows.append([t / o for t, o in zip(made[theirs], made[ours], strict=True)])
        wall, cpu, _ = (statistics.median(column) for column in zip(*rows, strict=True))
        kind = "sequence_parallel" if sequence else "tensor"
        lines.append(f"{kind}: a step by torch's styles takes {wall:.2f} x (CPU {cpu:.2f} x)")
    return lines


class Gated(nn.Module):
    """An embedding and an MLP."""

    tp_plan: ClassVar = {"words": "embedding_rowwise", "up": "colwise", "down": "rowwise"}

    def __init__(self, words: int, inner: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16)
        self.up, self.down = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.words(tokens)).relu())


def refused() -> list[str]:
    """Return what torch's styles do where ours are right."""
    logging.disable()
    lines = []
    for what, words, inner, token in (
        ("inner width 26", 8, 26, 1),
        ("token 8 of a vocabulary of 8", 8, 32, 8),
    ):
        said = []
        for split in (parallelize, by_torch):
            torch.manual_seed(0)
            try:
                outputs = boosted(split, Gated(words, inner))[1](torch.tensor([[0, token]]))
                said.append(f"outputs of norm {outputs.norm().item():.3f}")
            except Exception as error:
                said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        lines.append(f"{what}, 4 ranks: ours: {said[0]}; torch's: {said[1]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=41)
    pairs = parser.parse_args().pairs
    print(*run_ranks(compared, 2, pairs, timeout=600)[0], *run_ranks(refused, 4)[0], sep="\n")


if __name__ == "__main__":
    main()
