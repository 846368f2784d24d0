"""Batch norm under data parallelism: every plugin evaluates and saves what DDP does.

Each data-parallel rank normalises by its own samples, and the running statistics of the first one
count. The reference is plain PyTorch in one process and float64, which runs the ranks' parts one
after the other and keeps the buffers of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.booster import Booster, Plugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tests.ranks import run_ranks

STEPS, MICROBATCHES, SAMPLES = 3, 2, 16
PLAN = {"0": "colwise_rep", "3": "colwise_rep"}

PLUGINS: dict[str, tuple[Callable[[], Plugin], int, int]] = {
    "ddp": (TorchDDPPlugin, 2, 1),
    "fsdp": (TorchFSDPPlugin, 2, 1),
    "zero1": (lambda: LowLevelZeroPlugin(stage=1), 2, 1),
    "zero2": (lambda: LowLevelZeroPlugin(stage=2), 2, 1),
    "zero3": (lambda: LowLevelZeroPlugin(stage=3), 2, 1),
    "moe": (MoeHybridParallelPlugin, 2, 1),
    "hsdp": (lambda: TorchFSDPPlugin(dp_replicate=2), 4, 1),
    "tensor_data": (lambda: TensorParallelPlugin(tp_size=2, tp_plan=PLAN), 2, 1),
    "pipeline_data": (lambda: PipelineParallelPlugin(pp_size=2), 2, 2),
    "pipeline_zero3": (lambda: HybridParallelPlugin(pp_size=2, zero_stage=3), 2, 2),
    "tensor_zero3": (lambda: HybridParallelPlugin(tp_size=2, zero_stage=3, tp_plan=PLAN), 2, 1),
}
"""Of each plugin the data-parallel ranks, and the microbatches of its pipeline."""


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 4),
    ).double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs [16, 5] and targets [16]; parts of it have other means and spreads."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    inputs *= torch.linspace(0.5, 3.0, SAMPLES, dtype=torch.float64).unsqueeze(1)
    inputs += torch.linspace(-1.0, 4.0, SAMPLES, dtype=torch.float64).unsqueeze(1)
    return inputs, torch.randint(4, (SAMPLES,), generator=generator)


def share(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) / MICROBATCHES


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@cache
def plain_torch(parts: int, chunks: int) -> tuple[dict[str, Tensor], Tensor]:
    """Train in one process: the state at the end, and what a batch evaluates to."""
    model = make()
    optimizer = sgd(model)
    for number in range(STEPS * MICROBATCHES):
        whole = batch(number)
        first: dict[str, Tensor] = {}
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for rank in range(parts):
            inputs, targets = (tensor.chunk(parts)[rank] for tensor in whole)
            for x, y in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
                (share(model(x), y) / (parts * chunks)).backward()
            first = first or {name: buffer.clone() for name, buffer in model.named_buffers()}
            model.load_state_dict(before, strict=False)
        model.load_state_dict(first, strict=False)
        if number % MICROBATCHES == MICROBATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return {n: t.clone() for n, t in model.state_dict().items()}, model(batch(99)[0])


def train(name: str) -> dict[str, Any]:
    plugin = PLUGINS[name][0]()
    booster = Booster(plugin=plugin)
    raw = make()
    model, optimizer, *_ = booster.boost(raw, sgd(raw))
    for number in range(STEPS * MICROBATCHES):
        inputs, targets = (t.chunk(plugin.data_size)[plugin.data_rank] for t in batch(number))
        last = number % MICROBATCHES == MICROBATCHES - 1
        with nullcontext() if last else booster.no_sync(model, optimizer):
            if model.pipeline is not None:
                # The outputs take a forward pass of their own, which must leave no trace.
                booster.execute_pipeline(
                    iter([(inputs, targets)]), model, share, optimizer, return_outputs=last
                )
            else:
                booster.backward(share(model(inputs), targets), optimizer)
        if last:
            optimizer.clip_grad_by_norm(1e6)
            optimizer.step()
            optimizer.zero_grad()
    trained = {key: buffer.clone() for key, buffer in raw.named_buffers()}
    state = booster.state_dict(model)
    model.eval()
    inputs, targets = batch(99)
    with torch.no_grad():
        if model.pipeline is not None:
            found = booster.execute_pipeline(
                iter([(inputs, targets)]), model, share, return_outputs=True
            )
            outputs = found["outputs"]
        else:
            outputs = model(inputs)
    evaluated = {key: buffer.clone() for key, buffer in raw.named_buffers()}
    return {"state": state, "outputs": outputs, "trained": trained, "evaluated": evaluated}


def train_all(names: list[str]) -> list[dict[str, Any]]:
    return [train(name) for name in names]


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["ddp", "fsdp", "zero1", "zero2", "zero3", "moe"]),
        (4, ["hsdp", "tensor_data", "pipeline_data", "pipeline_zero3", "tensor_zero3"]),
    ],
)
def test_every_plugin_evaluates_and_saves_what_ddp_does(world, names):
    ranks = run_ranks(train_all, world, names)
    for number, name in enumerate(names):
        _, parts, chunks = PLUGINS[name]
        state, outputs = plain_torch(world if name == "hsdp" else parts, chunks)
        saved = ranks[0][number]["state"]
        assert saved.keys() == state.keys(), name
        for key, wanted in state.items():
            assert torch.allclose(saved[key], wanted, rtol=1e-9, atol=1e-12), (name, key)
        for rank in ranks:
            own = rank[number]
            if own["outputs"] is not None:
                assert torch.allclose(own["outputs"], outputs, rtol=1e-9, atol=1e-12), name
            # DDP itself sends the buffers with the next forward pass.
            after = own["evaluated" if name == "ddp" else "trained"]
            for key, buffer in after.items():
                assert torch.allclose(buffer, state[key], rtol=1e-9, atol=1e-12), (name, key)


def refusals() -> list[str]:
    found = []
    for kind in (
        TorchDDPPlugin,
        TorchFSDPPlugin,
        LowLevelZeroPlugin,
        MoeHybridParallelPlugin,
        PipelineParallelPlugin,
        HybridParallelPlugin,
    ):
        model = make()
        with pytest.raises(ValueError, match="sync_batchnorm") as error:
            Booster(plugin=kind(sync_batchnorm=True)).boost(model, sgd(model))
        found.append(str(error.value))
    plugin = TensorParallelPlugin(tp_plan=PLAN, sync_batchnorm=True)
    with pytest.raises(ValueError, match="sync_batchnorm") as error:
        Booster(plugin=plugin).boost(model, sgd(model))
    return [*found, str(error.value)]


def test_synchronised_batch_norm_is_refused_on_a_cpu():
    for messages in run_ranks(refusals, 2):
        assert len(messages) == 7
        for message in messages:
            assert message.startswith("sync_batchnorm=True needs GPUs")
            assert "use sync_batchnorm=False" in message
