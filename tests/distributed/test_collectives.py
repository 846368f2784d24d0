"""Clipping adds a few collectives to a step, whatever the number of parameters, and no waits."""

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.clip import ClipMode, Decision, build
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from tests.distributed.by_hand import Loop, batch_for, cross_entropy, make
from tests.distributed.cases import MODES, SHAPE, Case, trainer
from tests.on_device import Waits, call_kept_on_device
from tests.ranks import run_ranks

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
"""Operators of these namespaces talk to other ranks, whoever calls them."""

LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
"""Of these, the ones that send nothing."""

STATED_MODES = ("none", "L2", "value", "adaptive")

# Model, and collectives of modes norm, value, adaptive. One is the norm; counts take another one.
# Adaptive clipping needs one more for each group of ranks that share units: vectors, rows of a
# transposed convolution under sharding, rows of row-parallel weights under tensor parallelism.
STATED: dict[int, dict[str, tuple[str, int, int, int]]] = {
    2: {
        "ddp": ("gpt", 0, 0, 0),
        "fsdp": ("conv", 1, 2, 3),
        "zero1": ("gpt", 1, 2, 2),
        "zero2": ("gpt", 1, 2, 3),
        "tensor": ("gpt", 1, 2, 3),
        "sequence": ("gpt", 1, 2, 3),
        "1f1b": ("gpt", 1, 2, 2),
        "zero_bubble": ("gpt", 1, 2, 2),
        "moe": ("moe", 1, 2, 2),
    },
    4: {
        "hsdp": ("conv", 1, 2, 3),
        "moe_zero3": ("moe", 1, 2, 4),
        "hybrid_fsdp_tp": ("gpt", 1, 2, 4),
        "hybrid_fsdp_pp": ("gpt", 1, 2, 3),
        "hybrid_ep_tp": ("moe", 1, 2, 3),
    },
}


class Counting(TorchDispatchMode):
    """Counts collectives: those of c10d, of DTensors and of functional collectives alike."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES and not func.__name__.startswith(LOCAL):
            self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def network(model: str, layers: int) -> nn.Module:
    """A model of its kind with so many layers."""
    torch.manual_seed(0)
    shape = SHAPE | {"layers": layers}
    if model == "gpt":
        return GPT(**shape, tied=False, bias=True)
    if model == "moe":
        return MixtureGPT(**shape, tied=False, bias=True, experts=5, top_k=2)
    transposed = [nn.ConvTranspose2d(4, 4, 3, padding=1) for _ in range(layers)]
    return nn.Sequential(nn.Conv2d(1, 4, 3), *transposed, nn.Flatten(), nn.Linear(4 * 36, 10))


def counted(plugin: str, model: str, layers: int) -> dict[str, list[int]]:
    """Of each mode, the collectives of ``optimizer.clip`` in two steps, on final gradients."""
    turns = iter([mode for mode in STATED_MODES for _ in range(2)])
    case = Case(model, "none", steps=2 * len(STATED_MODES), double=False)
    made = trainer(case, plugin, model=network(model, layers))
    clip = made.optimizer.clip
    calls: dict[str, list[int]] = {mode: [] for mode in STATED_MODES}

    def counting(_: ClipMode, **options: bool) -> Decision:
        mode = next(turns)
        kind, of_mode = MODES[mode]
        rule = build(kind, **of_mode)
        rule.bind(made.optimizer.layout)
        # Adding up over ranks is what a step without clipping does as well.
        made.optimizer.unscale()
        with Counting() as counter:
            outcome = clip(rule)
        calls[mode].append(counter.calls.total())
        return outcome

    made.optimizer.clip = counting  # type: ignore[method-assign]
    made.fit()
    return calls


def count_all(plugins: dict[str, Any]) -> list[dict[str, list[int]]]:
    """With 2 layers, and with 6."""
    pairs = product(plugins.items(), (2, 6))
    return [counted(plugin, model, layers) for (plugin, (model, *_)), layers in pairs]


@pytest.mark.parametrize("world", STATED)
def test_clipping_adds_the_stated_collectives(world):
    # The same on every rank, in every step, and whatever the number of parameters.
    expected = []
    for _, norm, value, adaptive in STATED[world].values():
        stated = {"none": norm, "L2": norm, "value": value, "adaptive": adaptive}
        expected += [{mode: [number] * 2 for mode, number in stated.items()}] * 2
    assert run_ranks(count_all, world, STATED[world]) == [expected] * world


# -- what makes the host wait for an accelerator


def waits_of(plugin: str, model: str, mode: str) -> list[str]:
    """What makes the host wait in ``clip`` and ``step``, on final gradients."""
    adamw = partial(torch.optim.AdamW, lr=0.1, fused=True)
    made = trainer(Case(model, mode, steps=2), plugin, optimizer=adamw)
    clip, step, waits = made.optimizer.clip, made.optimizer.step, Waits()

    def clipped(rule: ClipMode, **options: bool) -> Decision:
        made.optimizer.unscale()
        with waits:
            return clip(rule, **options)

    def stepped() -> bool:
        with waits:
            return step()

    made.optimizer.clip, made.optimizer.step = clipped, stepped  # type: ignore[method-assign]
    made.fit()
    return [f"{plugin}, {mode}: {wait}" for wait in waits.found]


def waits_under(plugins: dict[str, Any]) -> list[str]:
    others = ("none", "L1", "inf", "value")
    return [
        wait
        for turn, (plugin, (model, *_)) in enumerate(plugins.items())
        for mode in ("adaptive", others[turn % 4])
        for wait in waits_of(plugin, model, mode)
    ]


@pytest.mark.parametrize("world", STATED)
def test_no_step_waits_for_the_device(world):
    assert run_ranks(call_kept_on_device, world, waits_under, STATED[world]) == [[]] * world


# -- query, key and value share one reduction of their gradients


def reductions() -> int:
    """All-reduces of a backward pass through a tensor-parallel model."""
    loop = Loop("tensor", make("gpt"))
    inputs, targets = batch_for("gpt")
    loss = cross_entropy(loop.model(inputs), targets)
    with Counting() as counter:
        loss.backward()
    return counter.calls.total()


def test_a_backward_pass_has_two_reductions_a_block():
    blocks = len(make("gpt").blocks)
    # One more for the head, whose input every rank has.
    assert run_ranks(reductions, 2) == [2 * blocks + 1] * 2
