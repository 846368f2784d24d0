"""A parameter that took no part in a step has no gradient, whatever the plugin.

AdamW with weight decay moves a parameter whose gradient is zero, and leaves one alone whose
gradient is None. The reference is one process in float64 that sees the parts of all ranks one
after the other, with plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.booster import Booster, Plugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.clip import build
from tests.ranks import run_ranks

STEPS, MICROBATCHES, SAMPLES = 5, 2, 8
THRESHOLD = 0.01

TURNS = [(0, 0), (1, 1), (0, 1), (1, 0), (0, 0)]
"""For each step and microbatch, which of two heads is used. In the third step the first head is
used in an earlier microbatch alone."""

BRANCHES = [((1, -1), (1, 1)), ((1, 1), (1, 1)), ((-1, -1), (-1, 1)), ((1, 1),) * 2, ((-1, 1),) * 2]
"""For each step, microbatch and half of the batch, which of two branches is used: both, one rank's
alone, or one that no rank uses."""


class Turns(nn.Module):
    """Two layers used in turn. As elements of a ModuleList they are sharded each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.turn = 0

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.heads[self.turn](hidden)
        return out


class Branches(nn.Module):
    """One of two layers, by the batch; a third that is never used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(6, 6) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.left if float(hidden.detach()[:, 0].sum()) > 0 else self.right
        out: Tensor = self.frozen(branch(hidden)).tanh()
        return out


class Sign(nn.Module):
    """A layer that keeps the first feature, which tells the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs[:, :1], self.layer(inputs[:, 1:])], dim=1)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Sign(), Branches(), Turns(), nn.Linear(6, 4)).double()


def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks; the first half and the second choose a branch each."""
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    signs = torch.tensor(BRANCHES[step][microbatch]).repeat_interleave(SAMPLES // 2)
    inputs[:, 0] = inputs[:, 0].abs() * signs
    return inputs, torch.randint(4, (SAMPLES,), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def plain_torch(to_none: bool) -> dict[str, Any]:
    """Train in one process: norms, shares of clipped elements, names with gradients, weights."""
    model = make()
    optimizer = adamw(model)
    norms, fractions, present = [], [], []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            inputs, targets = batch(step, microbatch)
            model[2].turn = TURNS[step][microbatch]
            for half in (slice(None, SAMPLES // 2), slice(SAMPLES // 2, None)):
                loss = F.cross_entropy(model(inputs[half]), targets[half])
                (loss / (2 * MICROBATCHES)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        norms.append(float(flat.norm()))
        fractions.append(float((flat.abs() > THRESHOLD).sum()) / flat.numel())
        present.append(sorted(n for n, p in model.named_parameters() if p.grad is not None))
        torch.nn.utils.clip_grad_value_(model.parameters(), THRESHOLD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"norms": norms, "fractions": fractions, "present": present, "weights": weights}


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "fsdp": TorchFSDPPlugin,
    "hsdp": lambda: TorchFSDPPlugin(dp_replicate=2),
    "zero1": lambda: LowLevelZeroPlugin(stage=1),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "zero3": lambda: LowLevelZeroPlugin(stage=3),
    "data": HybridParallelPlugin,
    "tensor_zero3": lambda: HybridParallelPlugin(
        tp_size=2, zero_stage=3, tp_plan={"0.layer": "colwise_rep", "1.*": "colwise_rep"}
    ),
    "pipeline_data": lambda: HybridParallelPlugin(pp_size=2),
    "pipeline_zero2": lambda: HybridParallelPlugin(pp_size=2, zero_stage=2),
    "zero_bubble_zero3": lambda: HybridParallelPlugin(
        pp_size=2, zero_stage=3, schedule="zero_bubble"
    ),
}


def train(name: str, to_none: bool) -> dict[str, Any]:
    """The same under a plugin, in a loop written by hand."""
    plugin = PLUGINS[name]()
    booster = Booster(plugin=plugin)
    raw = make()
    turns = raw[2]
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    mode = build("value", threshold=THRESHOLD)
    mode.bind(optimizer.layout)

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) / MICROBATCHES

    norms, fractions, present = [], [], []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            pair = [
                half.chunk(plugin.data_size)[plugin.data_rank] for half in batch(step, microbatch)
            ]
            turns.turn = TURNS[step][microbatch]
            last = microbatch == MICROBATCHES - 1
            with nullcontext() if last else booster.no_sync(model, optimizer):
                if model.pipeline is not None:
                    booster.execute_pipeline(iter([pair]), model, criterion, optimizer)
                else:
                    booster.backward(criterion(model(pair[0]), pair[1]), optimizer)
        outcome = optimizer.clip(mode)
        norms.append(float(outcome.norm))
        fractions.append(float(outcome.fraction))
        present.append([p.name for p in optimizer.layout.shards if p.param.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    weights = booster.state_dict(model)
    return {"norms": norms, "fractions": fractions, "present": present, "weights": weights}


def train_all(names: list[str]) -> list[dict[str, Any]]:
    return [train(name, to_none) for name in names for to_none in (True, False)]


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["ddp", "fsdp", "zero1", "zero2", "zero3", "data"]),
        (4, ["hsdp", "tensor_zero3", "pipeline_data", "pipeline_zero2", "zero_bubble_zero3"]),
    ],
)
@pytest.mark.product(every=2)
def test_unused_parameters_have_no_gradient(world, names):
    ranks = run_ranks(train_all, world, names)
    cases = [(name, to_none) for name in names for to_none in (True, False)]
    for number, (name, to_none) in enumerate(cases):
        wanted = plain_torch(to_none)
        if to_none:
            # The test is about these: never used, used by no rank in a step, used in turn.
            assert not any("never" in given for given in wanted["present"][0])
            assert "2.heads.1.weight" not in wanted["present"][0]
            assert "1.right.weight" not in wanted["present"][1]
        for step in range(STEPS):
            found = {own for rank in ranks for own in rank[number]["present"][step]}
            assert sorted(found) == wanted["present"][step], (name, to_none, step)
        for rank in ranks:
            assert rank[number]["norms"] == pytest.approx(wanted["norms"], rel=1e-10), name
            assert rank[number]["fractions"] == pytest.approx(wanted["fractions"], rel=1e-12), name
        weights = ranks[0][number]["weights"]
        assert weights.keys() == wanted["weights"].keys()
        for key, tensor in wanted["weights"].items():
            off = float((weights[key] - tensor).norm() / tensor.norm())
            assert off < 1e-8, (name, to_none, key, off)
