"""Query, key and value share one reduction of their gradients, and keep no activation for it."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.parallel import tensor
from runner.parallel.entrance import Entrance
from tests.distributed.by_hand import Loop, assert_one_process
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks


def reductions(shared: bool) -> tuple[int, int]:
    """All-reduces of a forward and of a backward pass."""
    if not shared:
        tensor.entrances = lambda styles: {}  # type: ignore[assignment]
    loop = Loop("tensor", make("gpt", torch.float64))
    calls: list[None] = []
    real = dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return real(*args, **options)

    dist.all_reduce = counted
    inputs, targets = batch_for("gpt", torch.float64)
    outputs = loop.model(inputs)
    forward = len(calls)
    nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
    return forward, len(calls) - forward


def test_a_backward_pass_has_two_reductions_a_block_instead_of_four():
    [shared] = {*run_ranks(reductions, 2, True)}
    [apart] = {*run_ranks(reductions, 2, False)}
    assert shared[0] == apart[0]
    layers = len(make("gpt", torch.float64).blocks)
    assert apart[1] - shared[1] == 2 * layers


@pytest.mark.parametrize("plugin", ["tensor", "sequence"])
def test_gradients_stay_those_of_one_process(plugin):
    assert_one_process(2, [{"model": "gpt", "plugin": plugin, "clip": ("norm", 0.05, 2.0)}])


def doubled(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2


def test_layers_share_an_input_only_while_it_is_the_same():
    entrance = Entrance(2)
    first, second = torch.ones(2, requires_grad=True), torch.ones(2)
    entered = entrance(first, doubled)
    assert entrance(first, doubled) is entered
    assert entrance(first, doubled) is not entered  # a third layer, or the next pass
    assert entrance(second, doubled) is not entrance(first, doubled)
    without = Entrance(2)
    with torch.no_grad():
        without(first, doubled)
    assert without(first, doubled).requires_grad
    changed = Entrance(3)
    before = changed(second, doubled)
    second.add_(1.0)
    assert changed(second, doubled) is not before
    assert float(changed(second, doubled)[0]) == 4.0


def test_nothing_is_kept_once_all_layers_had_their_input():
    entrance = Entrance(2)
    hidden = torch.ones(2)
    held = ref(entrance(hidden, doubled))
    assert held() is not None
    entrance(hidden, doubled)
    gc.collect()
    assert held() is None
