"""Adaptive clipping leaves out the weights of every head, wherever they lie.

Beside each model is the same training in plain PyTorch, in one process, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from runner import GradientClipping
from runner.booster import Booster
from runner.booster.plugin import PipelineParallelPlugin
from tests.distributed.cases import PLUGINS
from tests.ranks import run_ranks

THRESHOLD, EPS, STEPS = 0.01, 1e-3, 4


class Distilled(nn.Module):
    """Two heads beside each other, as a distilled DeiT has them."""

    tp_plan = {"up": "colwise", "down": "rowwise", "head_dist": "colwise_rep"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 5)
        self.head = nn.Linear(5, 4)
        self.head_dist = nn.Linear(5, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.down(self.up(inputs).tanh())
        logits: Tensor = (self.head(hidden) + self.head_dist(hidden)) / 2
        return logits


class Named(Distilled):
    """Names its heads in a tuple, as timm's models do."""

    tp_plan = {"up": "colwise", "down": "rowwise", "second": "colwise_rep"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.head, self.head_dist
        del self.head, self.head_dist

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.first, self.second

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.down(self.up(inputs).tanh())
        logits: Tensor = (self.first(hidden) + self.second(hidden)) / 2
        return logits


class Channels(nn.Module):
    """Takes each input for a channel of one position."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(-1)


def squeezed() -> nn.Module:
    """A convolution for a head, as SqueezeNet has it."""
    body = [Channels(), nn.Conv1d(6, 8, 1), nn.Tanh(), nn.Conv1d(8, 5, 1), nn.Tanh()]
    return nn.Sequential(*body, nn.Conv1d(5, 4, 1), nn.Flatten())


MODELS = {
    "distilled": (Distilled, ("head.weight", "head_dist.weight")),
    "named": (Named, ("first.weight", "second.weight")),
    "squeezed": (squeezed, ("5.weight",)),
}


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = 3 * torch.randn(STEPS, 8, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (STEPS, 8), generator=generator)
    return list(zip(inputs, targets, strict=True))


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def plain(kind: str) -> dict[str, Any]:
    """PyTorch alone."""
    model = network(kind)
    optimizer = optimizer_of(model)
    norms, fractions = [], []
    for inputs, targets in batches():
        F.cross_entropy(model(inputs), targets).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        clipped = units = 0
        for name, parameter in model.named_parameters():
            if name in MODELS[kind][1]:
                continue
            dims = list(range(parameter.ndim > 1, parameter.ndim))
            w = parameter.detach().pow(2).sum(dims, keepdim=True).sqrt()
            g = parameter.grad.pow(2).sum(dims, keepdim=True).sqrt()
            most = THRESHOLD * w.clamp(min=EPS)
            clipped, units = clipped + int((g > most).sum()), units + g.numel()
            parameter.grad = parameter.grad * torch.where(g > most, most / g, 1.0)
        fractions.append(clipped / units)
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "fractions": fractions, "weights": model.state_dict()}


def boosted(kind: str, plugin: str | None) -> dict[str, Any]:
    """The same under a plugin, on this rank."""
    model = network(kind)
    spread = PLUGINS[plugin]() if plugin else None
    if plugin == "1f1b":
        spread = PipelineParallelPlugin(split=["3"])
    booster = Booster(plugin=spread)
    wrapped, optimizer, *_ = booster.boost(model, optimizer_of(model))
    mode = GradientClipping("adaptive", THRESHOLD).mode()
    mode.bind(optimizer.layout)
    size, part = booster.plugin.data_size, booster.plugin.data_rank
    norms, fractions = [], []
    for inputs, targets in batches():
        pair = inputs.chunk(size)[part], targets.chunk(size)[part]
        if wrapped.pipeline is not None:
            booster.execute_pipeline(iter([pair]), wrapped, F.cross_entropy, optimizer)
        else:
            booster.backward(F.cross_entropy(wrapped(pair[0]), pair[1]), optimizer)
        outcome = optimizer.clip(mode)
        norms.append(outcome.norm)
        fractions.append(outcome.fraction)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "norms": norms,
        "fractions": fractions,
        "weights": booster.state_dict(wrapped),
        "heads": optimizer.layout.heads,
    }


def several(asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [boosted(kind, plugin) for kind, plugin in asked]


def assert_same(ours: dict[str, Any], kind: str) -> None:
    wanted = plain(kind)
    assert max(wanted["fractions"]) > 0.5
    assert ours["fractions"] == pytest.approx(wanted["fractions"], rel=1e-12)
    assert ours["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", MODELS)
def test_no_head_is_clipped(kind):
    assert_same(boosted(kind, None), kind)


def test_no_head_is_clipped_wherever_it_lies():
    asked = [
        (kind, plugin) for kind in MODELS for plugin in ("ddp", "fsdp", "zero1", "zero3", "tensor")
    ]
    asked = [each for each in asked if each != ("squeezed", "tensor")] + [("squeezed", "1f1b")]
    ranks = run_ranks(several, 2, asked)
    for number, (kind, plugin) in enumerate(asked):
        assert_same(ranks[0][number], kind)
        for rank in ranks:
            assert rank[number]["heads"] == MODELS[kind][1], (kind, plugin)
            for key in ("norms", "fractions"):
                assert rank[number][key] == ranks[0][number][key], (kind, plugin)
