"""Clipping adds a few collectives to a step, whatever the number of parameters, and no waits."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.clip import ClipMode, Decision, build
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from runner.parallel.collectives import buckets
from tests.distributed.by_hand import Loop, batch_for, cross_entropy, make
from tests.distributed.cases import MODES, SHAPE, Case, trainer
from tests.on_device import Waits, call_kept_on_device
from tests.ranks import run_ranks

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
"""Operators of these namespaces talk to other ranks, whoever calls them."""

LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
"""Of these, the ones that send nothing."""

NORMS = ("none", "inf", "L2")

TURNS = (*NORMS, "value", "adaptive", "adaptive")
"""The mode of each step: as many collectives are added in a later one."""

# Model, and collectives of a norm, value, adaptive. One is the norm; counts take another one.
# Adaptive clipping needs one more for each group of ranks that share units: vectors, rows of a
# transposed convolution under sharding, rows of row-parallel weights under tensor parallelism.
STATED: dict[int, dict[str, tuple[str, int, int, int]]] = {
    2: {
        "ddp": ("gpt", 0, 0, 0),
        "fsdp": ("conv", 1, 2, 3),
        "zero1": ("gpt", 1, 2, 2),
        "zero2": ("gpt", 1, 2, 3),
        "tensor": ("gpt", 1, 2, 3),
        "1f1b": ("gpt", 1, 2, 2),
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


def counted(plugin: str, model: str, layers: int) -> tuple[list[int], list[str]]:
    """Of each step, the collectives of ``optimizer.clip``, on final gradients; and what makes the
    host wait in it and in ``step``.
    """
    turns = iter(TURNS)
    case = Case(model, "none", steps=len(TURNS), double=False, optimizer="adamw")
    training = trainer(case, plugin, model=network(model, layers), eval_dataloader=None)
    clip = training.optimizer.clip
    step = training.optimizer.step
    waits = Waits()
    calls: list[int] = []

    def clipped(_: ClipMode, **options: bool) -> Decision:
        kind, of_mode = MODES[next(turns)]
        rule = build(kind, **of_mode)
        rule.bind(training.optimizer.layout)
        # Adding up over ranks is what a step without clipping does as well.
        training.optimizer.unscale()
        with Counting() as counter, waits:
            outcome = clip(rule, **options)
        calls.append(counter.calls.total())
        return outcome

    def stepped() -> bool:
        with waits:
            return step()

    training.optimizer.clip, training.optimizer.step = clipped, stepped  # type: ignore[method-assign]
    training.fit()
    return calls, waits.found


def count_all(plugins: dict[str, Any], layers: int) -> list[Any]:
    return [counted(plugin, model, layers) for plugin, (model, *_) in plugins.items()]


@cache
def counted_on_device(world):
    """What each rank counts while metrics stay on a device: calls, and waits for the device."""
    return run_ranks(call_kept_on_device, world, count_all, STATED[world], 3)


def stated_calls(world):
    """The same on every rank, in every step, and whatever the number of parameters."""
    calls = []
    for _, norm, value, adaptive in STATED[world].values():
        stated = {**dict.fromkeys(NORMS, norm), "value": value, "adaptive": adaptive}
        calls.append([stated[mode] for mode in TURNS])
    return calls


@pytest.mark.xdist_group("collectives")
@pytest.mark.parametrize("world", STATED)
def test_clipping_adds_the_stated_collectives(world):
    for rank in counted_on_device(world):
        assert [calls for calls, _ in rank] == stated_calls(world)


@pytest.mark.xdist_group("collectives")
@pytest.mark.parametrize("world", STATED)
def test_clipping_over_ranks_waits_for_no_device(world):
    for rank in counted_on_device(world):
        assert [waits for _, waits in rank] == [[]] * len(STATED[world])


def test_coefficients_that_the_host_reads_take_no_further_collectives():
    few = dict([*STATED[2].items()][::2])
    for rank in run_ranks(count_all, 2, few, 2):
        assert [calls for calls, _ in rank] == stated_calls(2)[::2]


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


def test_tensors_of_alternating_dtypes_travel_in_one_buffer_for_each_dtype():
    norms = [nn.BatchNorm1d(2) for _ in range(3)]
    statistics = [buffer for norm in norms for buffer in norm.buffers()]
    numbers = [[tensor.dtype for tensor in bucket] for bucket in buckets(statistics)]
    assert numbers == [[torch.float32] * 6, [torch.int64] * 3]
