"""Made-up gradients of five tensors, and what float64 arithmetic on lists makes of them."""

import math
import random

import pytest
import torch
from torch import nn

from runner.clip import Layout, ParamShard, Units
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
    parts = {}
    for name, values in each.items():
        parts.setdefault(block[name], []).append(length(values, p))
    size = {name: length(parts[block[name]], p) for name in each}
    return multiplied(each, {n: min(1.0, limit / s) if s else 1.0 for n, s in size.items()})


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
