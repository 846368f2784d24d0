"""Modes that limit tensors, against float64 arithmetic on lists of made-up gradients."""

import math
import random
from functools import partial

import pytest
import torch
from torch import nn

from runner.clip import build
from runner.clip.per_parameter import block_of
from runner.gradients import Layout, ParamShard, Units
from tests.clip.reference import on, unwaited

SIZES = {"blocks.0.a": 6, "blocks.0.b": 4, "blocks.1.a": 5, "head.weight": 8, "late.weight": 2}


def recorded(steps=300, seed=0):
    """Gradients of each step by name: None where absent, and one step in fifty holds a NaN."""
    draw = random.Random(seed)
    found = []
    for step in range(steps):
        level = 10.0 if step >= 200 else 1.0
        each = {}
        for name, size in SIZES.items():
            spike = 80.0 if draw.random() < 0.04 else 1.0
            plateau = 150 <= step < 180
            values = [level * spike * (1.0 if plateau else draw.gauss(0, 1)) for _ in range(size)]
            if draw.random() < 0.05 or (name == "late.weight" and step < 120):
                each[name] = None
            else:
                each[name] = [0.0] * size if draw.random() < 0.05 else values
        if step % 50 == 37:
            each["head.weight"] = [math.nan] * SIZES["head.weight"]
        found.append(each)
    return found


def length(values, p=2.0):
    if values is None:
        return 0.0
    if any(map(math.isnan, values)):
        return math.nan
    if math.isinf(p):
        return max(map(abs, values), default=0.0)
    return math.fsum(abs(x) ** p for x in values) ** (1 / p)


def together(each, p=2.0):
    """The norm of the whole gradient of a step."""
    return length([length(values, p) for values in each.values()], p)


def multiplied(each, factors):
    return {n: None if v is None else [factors[n] * x for x in v] for n, v in each.items()}


def limited(each, limit, p=2.0):
    norm = together(each, p)
    return multiplied(each, dict.fromkeys(each, min(1.0, limit / norm) if norm else 1.0))


def clamped(each, limit):
    return {n: v and [max(-limit, min(limit, x)) for x in v] for n, v in each.items()}


def per_parameter(each, limit, p=2.0, block=None):
    block = block or {name: name for name in each}
    for one in set(block.values()):
        each = each | limited({n: v for n, v in each.items() if block[n] == one}, limit, p)
    return each


class AdaGC:
    """The published rule, but a norm of zero does not enter the history."""

    def __init__(self, limit=1.05, absolute=1.0, beta=0.98, warm=100, p=2.0, history="clipped"):
        self.limit, self.absolute, self.beta, self.warm = limit, absolute, beta, warm
        self.p, self.history = p, history
        self.gamma, self.t = {}, 0

    def __call__(self, each):
        norms, factors = {n: length(v, self.p) for n, v in each.items()}, {}
        whole = together(each, self.p)
        for name, norm in norms.items():
            if self.t < self.warm:
                factors[name] = min(1.0, self.absolute / whole) if whole else 1.0
            elif name in self.gamma and norm:
                factors[name] = min(1.0, self.limit * self.gamma[name] / norm)
            else:
                factors[name] = 1.0
            if each[name] is None or not norm:
                continue
            entering = norm if self.history == "raw" else factors[name] * norm
            if name not in self.gamma:
                self.gamma[name] = entering
            elif self.t < self.warm:
                self.gamma[name] = min(self.gamma[name], entering)
            else:
                self.gamma[name] = self.beta * self.gamma[name] + (1 - self.beta) * entering
        self.t += 1
        return multiplied(each, factors)


def parameters():
    return {name: nn.Parameter(torch.zeros(n, dtype=torch.float64)) for name, n in SIZES.items()}


def layout_of(made):
    return Layout([ParamShard(name, p, Units((0,))) for name, p in made.items()])


def give(made, each):
    for name, parameter in made.items():
        values = each[name]
        parameter.grad = None if values is None else torch.tensor(values, dtype=torch.float64)


def steps_of(mode, steps, rules, p=2.0, kept=False):
    """Check that each step of a mode is that of one rule after the other; yield its decision.

    On an accelerator the host does not wait.
    """
    made = parameters()
    layout = layout_of(made)
    seen = set()
    with on(kept):
        mode.bind(layout)
        for each in steps:
            give(made, each)
            with unwaited(kept):
                decision = mode.clip(layout)
            before = together(each, p)
            assert bool(decision.finite) == math.isfinite(before)
            if not math.isfinite(before):
                assert math.isnan(float(decision.coef))
                continue
            stages = [each]
            for rule in rules:
                stages.append(rule(stages[-1]))
            after = together(stages[-1], p)
            wanted = [before, after, after / before if before else 1.0]
            assert [float(x) for x in decision.metrics[:3]] == pytest.approx(wanted, rel=1e-10)
            assert float(decision.clipped) == float(stages[-1] != each)
            seen.add(stages[-1] != each)
            for name, values in stages[-1].items():
                if values is not None:
                    assert made[name].grad.tolist() == pytest.approx(values, rel=1e-10), name
            yield decision, stages
    assert True in seen


BLOCKS = {n: "blocks." + n[7] if n[0] == "b" else n.split(".")[0] for n in SIZES}
ADAGC = [(1.0, "raw", False), (2.0, "clipped", False), (2.0, "clipped", True)]
ADAGC += [(2.0, "raw", True), (math.inf, "clipped", False)]
PER_PARAMETER = [(2.0, "tensor", False), (2.0, "block", True), (3.0, "block", False)]
PER_PARAMETER += [(math.inf, "block", False), (math.inf, "tensor", True)]


@pytest.mark.parametrize(("p", "history", "kept"), ADAGC)
def test_adagc_is_the_reference(p, history, kept):
    options = {"absolute": 8.0, "beta": 0.9, "warmup_steps": 60}
    mode = build("adagc", threshold=1.5, norm_type=p, history=history, **options)
    list(steps_of(mode, recorded(), [AdaGC(1.5, 8.0, 0.9, 60, p, history)], p, kept))


def test_the_defaults_of_adagc_are_the_papers():
    list(steps_of(build("adagc", threshold=1.05), recorded(seed=3), [AdaGC()]))


@pytest.mark.parametrize(("p", "by", "kept"), PER_PARAMETER)
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


@pytest.fixture
def layout_with_sizes():
    """A layout whose tensors have gradients of norm 3, 4, 1 and 0, and one tensor without."""
    params = parameters()
    sizes = {"blocks.0.a": 3.0, "blocks.0.b": 4.0, "blocks.1.a": 1.0, "head.weight": 0.0}
    gradients = {name: [size] + [0.0] * (SIZES[name] - 1) for name, size in sizes.items()}
    give(params, gradients | {"late.weight": None})
    return layout_of(params)


def test_per_parameter_counts_tensors_with_a_gradient(layout_with_sizes):
    decision = build("per_parameter", threshold=2.0, by="tensor").clip(layout_with_sizes)
    assert (decision.clipped, decision.fraction) == (1.0, 0.5)
    assert (decision.max_stat, decision.threshold) == (4.0, 2.0)


def test_per_parameter_by_block_counts_blocks(layout_with_sizes):
    decision = build("per_parameter", threshold=2.0, by="block").clip(layout_with_sizes)
    assert decision.fraction == 1 / 3
    assert (decision.max_stat, decision.threshold) == (5.0, 2.0)
