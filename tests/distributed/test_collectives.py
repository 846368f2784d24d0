"""Clipping adds a few collectives to a step, whatever the number of parameters."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from runner.clip import ClipMode, Decision, build
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from tests.distributed.cases import MODES, SHAPE, Case, trainer
from tests.ranks import run_ranks

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
"""Operators of these namespaces talk to other ranks, whoever calls them."""

LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
"""Of these, the ones that send nothing."""

STATED_MODES = ("none", "L2", "inf", "value", "adaptive")

# Plugin, ranks, model: collectives of modes norm, value, adaptive. One is the norm; counts take
# another one. Adaptive clipping needs one more for vectors that lie on several ranks, and one for
# each group of ranks over which rows are cut: those of a transposed convolution under sharding,
# those of row-parallel weights under tensor parallelism.
STATED: dict[tuple[str, int, str], tuple[int, int, int]] = {
    ("ddp", 2, "gpt"): (0, 0, 0),
    ("fsdp", 2, "gpt"): (1, 2, 3),
    ("fsdp", 2, "conv"): (1, 2, 4),
    ("fsdp_gathered", 2, "gpt"): (1, 2, 3),
    ("hsdp", 4, "gpt"): (1, 2, 3),
    ("hsdp", 4, "conv"): (1, 2, 4),
    ("zero1", 2, "gpt"): (1, 2, 2),
    ("zero2", 2, "gpt"): (1, 2, 3),
    ("zero3", 2, "gpt"): (1, 2, 3),
    ("tensor", 2, "gpt"): (1, 2, 4),
    ("tensor_dp", 4, "gpt"): (1, 2, 4),
    ("sequence", 2, "gpt"): (1, 2, 4),
    ("gpipe", 2, "gpt"): (1, 2, 2),
    ("1f1b", 2, "gpt"): (1, 2, 2),
    ("interleaved", 2, "gpt"): (1, 2, 2),
    ("zero_bubble", 2, "gpt"): (1, 2, 2),
    ("moe", 2, "moe"): (1, 2, 2),
    ("moe_zero1", 4, "moe"): (1, 2, 2),
    ("moe_zero3", 4, "moe"): (1, 2, 3),
    ("hybrid", 4, "gpt"): (1, 2, 4),
    ("hybrid_fsdp_tp", 4, "gpt"): (1, 2, 4),
    ("hybrid_fsdp_pp", 4, "gpt"): (1, 2, 3),
    ("hybrid_ep_tp", 4, "moe"): (1, 2, 4),
    ("hybrid_ep_pp", 4, "moe"): (1, 2, 2),
    ("hybrid_sequence", 8, "gpt"): (1, 2, 4),
    ("hybrid_ep_all", 8, "moe"): (1, 2, 4),
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
        name, threshold, norm_type = MODES[mode]
        rule = build(name, threshold=threshold, norm_type=norm_type)
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


def count_all(plugin: str, model: str) -> list[dict[str, list[int]]]:
    """With 2 layers, and with 6."""
    return [counted(plugin, model, layers) for layers in (2, 6)]


@pytest.mark.parametrize(("plugin", "world", "model"), STATED)
@pytest.mark.product(every=4)
def test_clipping_adds_the_stated_collectives(plugin, world, model):
    # The same on every rank, in every step, and whatever the number of parameters.
    norm, value, adaptive = STATED[plugin, world, model]
    stated = {"none": norm, "L2": norm, "inf": norm, "value": value, "adaptive": adaptive}
    expected = {mode: [stated[mode]] * 2 for mode in STATED_MODES}
    assert run_ranks(count_all, world, plugin, model) == [[expected, expected]] * world


def test_no_mode_takes_more_than_a_handful():
    for norm, value, adaptive in STATED.values():
        assert norm <= 3
        assert value <= 2
        assert adaptive <= 4


def ways_to_talk() -> int:
    """Three collectives, by three interfaces."""
    tensor, mesh = torch.ones(2), init_device_mesh("cpu", (2,))
    with Counting() as counter:
        dist.all_reduce(tensor)
        functional.all_reduce(tensor, "sum", dist.group.WORLD).sum()
        DTensor.from_local(tensor, mesh, [Shard(0)]).full_tensor()
    return counter.calls.total()


def test_a_collective_is_counted_however_it_is_called():
    assert run_ranks(ways_to_talk, 2) == [3, 3]
