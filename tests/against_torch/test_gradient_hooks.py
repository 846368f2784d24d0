"""Gradient hooks that the user registered before `boost` run under every plugin, or are refused.

The reference is plain PyTorch in one process and float64: each data-parallel rank is a copy of the
model with the same hooks, whose gradients are averaged afterwards, as under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.booster import Booster, Plugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineParallelPlugin,
    TorchFSDPPlugin,
)
from tests.against_torch import plain
from tests.ranks import run_ranks

STEPS, MICROBATCHES, MAX_NORM = 4, 2, 0.5


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02)


def mask(gradient: Tensor) -> Tensor:
    """Needs the whole gradient as a plain tensor, and the right rows of it."""
    kept = torch.zeros(gradient.shape, dtype=gradient.dtype)
    kept[1::2, ::2] = 1.0
    return gradient * kept


def register(model: nn.Module) -> list[Any]:
    """Register hooks on weights, a bias, and one that is to be removed after `boost`."""
    named = dict(model.named_parameters())
    named["0.weight"].register_hook(clamp)
    named["0.weight"].register_hook(lambda gradient: 3.0 * gradient)
    named["2.weight"].register_hook(mask)
    named["2.bias"].register_hook(lambda gradient: gradient * torch.arange(4.0).double())
    named["4.bias"].register_hook(lambda gradient: None)
    return [named["4.weight"].register_hook(torch.zeros_like)]


def halve(model: nn.Module) -> list[Any]:
    """Halve what has accumulated, after each backward pass."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.get_parameter("2.weight").register_post_accumulate_grad_hook(hook)
    return []


Register = Callable[[nn.Module], list[Any]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


@cache
def plain_torch(
    register: Register, parts: int, chunks: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process: norms before clipping, and the weights at the end."""
    model = plain.network()
    optimizer = adamw(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(parts):
            copy = plain.network()
            copy.load_state_dict(model.state_dict())
            for handle in register(copy):
                handle.remove()
            for microbatch in range(MICROBATCHES):
                inputs, targets = (
                    whole.chunk(parts)[rank]
                    for whole in plain.batch(step * MICROBATCHES + microbatch)
                )
                for x, y in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
                    (plain.mean_square(copy(x), y) / (chunks * MICROBATCHES)).backward()
            for parameter, own in zip(model.parameters(), copy.parameters(), strict=True):
                assert own.grad is not None
                share = own.grad / parts
                parameter.grad = share if parameter.grad is None else parameter.grad + share
        norms.append(plain.clip(model, MAX_NORM))
        optimizer.step()
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


PLUGINS: dict[str, Callable[[], Plugin]] = {
    **plain.PLUGINS,
    "hsdp": lambda: TorchFSDPPlugin(dp_replicate=2),
    "zero_bubble": lambda: PipelineParallelPlugin(schedule="zero_bubble", pp_size=2),
    "tensor_zero3": lambda: HybridParallelPlugin(tp_size=2, zero_stage=3, tp_plan=plain.TP_PLAN),
    "pipeline_zero2": lambda: HybridParallelPlugin(pp_size=2, zero_stage=2),
}


def train(name: str, register: Register) -> tuple[list[float], dict[str, Tensor]]:
    plugin = PLUGINS[name]()
    booster = Booster(plugin=plugin)
    raw = plain.network()
    handles = register(raw)
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    for handle in handles:
        handle.remove()
    norms = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            number = step * MICROBATCHES + microbatch
            inputs, targets = (plain.part(plugin, whole) for whole in plain.batch(number))
            with nullcontext() if last else booster.no_sync(model, optimizer):
                if model.pipeline is not None:
                    share = _Share(MICROBATCHES)
                    booster.execute_pipeline(iter([(inputs, targets)]), model, share, optimizer)
                else:
                    loss = plain.mean_square(model(inputs), targets) / MICROBATCHES
                    booster.backward(loss, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, booster.state_dict(model)


class _Share:
    """The mean square error of one of several microbatches of a window."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return plain.mean_square(outputs, targets) / self.microbatches


def train_all(names: list[str], register: Register) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(name, register) for name in names]


DIVISIONS = {
    "ddp": (2, 1),
    "fsdp": (2, 1),
    "zero1": (2, 1),
    "zero2": (2, 1),
    "zero3": (2, 1),
    "tensor": (1, 1),
    "pipeline": (1, 2),
    "zero_bubble": (1, 4),
    "hsdp": (4, 1),
    "tensor_data": (2, 1),
    "tensor_zero3": (2, 1),
    "pipeline_data": (2, 2),
    "pipeline_zero2": (2, 2),
    "hybrid": (1, 2),
}
"""For each plugin the data-parallel ranks, and the microbatches of a pipeline."""


def assert_plain_torch(world: int, names: list[str], register: Register) -> None:
    ranks = run_ranks(train_all, world, names, register)
    for number, name in enumerate(names):
        norms, weights = plain_torch(register, *DIVISIONS[name])
        for rank in ranks:
            assert rank[number][0] == pytest.approx(norms, rel=1e-6), name  # returned in float32
        assert plain.off(ranks[0][number][1], weights) < 1e-9, name


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ["ddp", "fsdp", "zero1", "zero2", "zero3", "tensor", "pipeline", "zero_bubble"]),
        (4, ["hsdp", "tensor_data", "tensor_zero3", "pipeline_data", "pipeline_zero2", "hybrid"]),
    ],
)
def test_hooks_on_gradients_are_carried_over(world, names):
    assert_plain_torch(world, names, register)


def test_post_accumulate_hooks_run_once_a_backward_pass_where_parameters_are_kept():
    # Through a pipeline a batch is two microbatches, each with a backward pass.
    assert_plain_torch(2, ["ddp", "zero1", "pipeline"], halve)


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self[2].weight = self[0].weight


def refusals() -> list[str]:
    found = []
    for plugin, model in (
        (TorchFSDPPlugin(), plain.network()),
        (LowLevelZeroPlugin(stage=2), plain.network()),
        (LowLevelZeroPlugin(stage=3), plain.network()),
        (plain.PLUGINS["tensor"](), plain.network()),
        (PipelineParallelPlugin(schedule="zero_bubble"), plain.network()),
        (PipelineParallelPlugin(split=["2"]), Tied()),
    ):
        model[2].bias.register_hook(lambda gradient: None)
        model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(ValueError, match="register_post_accumulate_grad_hook") as error:
            Booster(plugin=plugin).boost(model, adamw(model))
        found.append(str(error.value))
    return found


def test_post_accumulate_hooks_are_refused_where_parameters_are_replaced():
    for messages in run_ranks(refusals, 2):
        *replaced, tied = messages
        assert all(message.startswith("2.weight: a hook of") for message in replaced)
        assert tied.startswith("0.weight: a hook of")
        for message, words in zip(
            messages,
            ["fsdp", "zero_stage=2", "zero_stage=3", "tensor", "zero_bubble", "several stages"],
            strict=True,
        ):
            assert words in message
            assert "use register_hook" in message


def registered_after_boost() -> str:
    raw = plain.network()
    booster = Booster(plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    raw[2].bias.register_hook(clamp)
    plain.backward(booster, model, optimizer, 0)
    with pytest.raises(ValueError, match="after boost") as error:
        optimizer.step()
    return str(error.value)


def test_a_hook_registered_on_a_shard_after_boost_is_refused():
    for message in run_ranks(registered_after_boost, 2):
        assert message.startswith("2.bias: a hook was registered after boost")
        assert "register it on the model before boost" in message


def frozen_for_a_step() -> list[float]:
    """Sizes of the gradient of a parameter that is unfrozen after `boost`."""
    found = []
    for name in ("fsdp", "tensor"):
        raw = plain.network()
        raw[0].weight.register_hook(torch.zeros_like)
        raw[0].weight.requires_grad_(False)
        booster = Booster(plugin=plain.PLUGINS[name]())
        model, optimizer, *_ = booster.boost(raw, adamw(raw))
        plain.backward(booster, model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        assert raw[0].weight.grad is None
        raw[0].weight.requires_grad_()
        plain.backward(booster, model, optimizer, 1)
        optimizer.clip_grad_by_norm(1.0)
        found.append(float(raw[0].weight.grad.full_tensor().abs().max()))
    return found


def test_a_parameter_that_is_unfrozen_keeps_its_hook():
    assert run_ranks(frozen_for_a_step, 2) == [[0.0, 0.0]] * 2
