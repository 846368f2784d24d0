"""Modes that limit tensors, against float64 arithmetic on lists."""

import math
from functools import partial

import pytest
import torch

from runner.clip import Layout, build
from runner.clip.per_parameter import block_of
from tests.clip.tensor_steps import (
    SIZES,
    AdaGC,
    give,
    layout_of,
    parameters,
    per_parameter,
    recorded,
    steps_of,
)

BLOCKS = {n: "blocks." + n[7] if n[0] == "b" else n.split(".")[0] for n in SIZES}


@pytest.mark.parametrize(
    ("p", "history", "kept"),
    [
        (1.0, "raw", False),
        (2.0, "clipped", False),
        (2.0, "clipped", True),
        (2.0, "raw", True),
        (math.inf, "clipped", False),
    ],
)
def test_adagc_is_the_reference(p, history, kept):
    options = {"absolute": 8.0, "beta": 0.9, "warmup_steps": 60}
    mode = build("adagc", threshold=1.5, norm_type=p, history=history, **options)
    list(steps_of(mode, recorded(), [AdaGC(1.5, 8.0, 0.9, 60, p, history)], p, kept))


def test_the_defaults_of_adagc_are_the_papers():
    list(steps_of(build("adagc", threshold=1.05), recorded(seed=3), [AdaGC()]))


@pytest.mark.parametrize(
    ("p", "by", "kept"),
    [
        (2.0, "tensor", False),
        (2.0, "block", True),
        (3.0, "block", False),
        (math.inf, "block", False),
        (math.inf, "tensor", True),
    ],
)
def test_per_parameter_is_the_reference(p, by, kept):
    rule = partial(per_parameter, limit=12.0, p=p, block=BLOCKS if by == "block" else None)
    mode = build("per_parameter", threshold=12.0, norm_type=p, by=by)
    list(steps_of(mode, recorded(), [rule], p, kept))


def test_blocks_of_names():
    for name, block in {
        "blocks.3.attn.weight": "blocks.3",
        "layer1.0.conv1.weight": "layer1.0",
        "0.weight": "0",
        "encoder.layers.11.2.bias": "encoder.layers.11",
        "conv1.weight": "conv1",
        "token": "",
        "weights.0": "weights",
    }.items():
        assert block_of(name) == block


def test_what_per_parameter_counts_and_compares():
    made = parameters()
    sizes = {"blocks.0.a": 3.0, "blocks.0.b": 4.0, "blocks.1.a": 1.0, "head.weight": 0.0}
    each = {name: [size] + [0.0] * (SIZES[name] - 1) for name, size in sizes.items()}
    give(made, each | {"late.weight": None})
    layout = layout_of(made)
    tensor, block = (build("per_parameter", threshold=2.0, by=by) for by in ("tensor", "block"))
    assert block.decide(layout, block.measure(layout)).metrics[4:] == (1 / 3, 5.0, 2.0)
    assert tensor.clip(layout).metrics[3:] == (1.0, 0.5, 4.0, 2.0)


def test_the_history_goes_on_to_the_bit_in_any_order_of_names():
    steps, options = recorded(100, seed=2), {"threshold": 1.2, "warmup_steps": 30, "beta": 0.9}
    made, whole, resumed = parameters(), build("adagc", **options), build("adagc", **options)
    layout = layout_of(made)
    turned = Layout([*reversed(layout.shards)])
    whole.bind(layout)
    resumed.bind(turned)
    for number, each in enumerate(steps):
        give(made, each)
        if number == 50:
            resumed.load_state_dict(whole.state_dict())
        ours = resumed.decide(turned, resumed.measure(turned)) if number >= 50 else None
        wanted = whole.decide(layout, whole.measure(layout))
        if ours is not None and wanted.scales is not None:
            assert torch.equal(ours.scales.flip(0), wanted.scales)
    ours, theirs = resumed.state_dict()["history"], whole.state_dict()["history"]
    assert torch.equal(ours["gamma"].flip(0), theirs["gamma"])
    assert ours["step"] == theirs["step"] == 98
