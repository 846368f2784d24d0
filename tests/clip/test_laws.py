"""Laws that hold for every mode, whatever it clips by."""

import copy
import math

import pytest
import torch

from runner.clip import build
from runner.config.modes import NAMES
from runner.gradients import Layout
from tests.clip.reference import norm_of, on
from tests.gradients.test_layout import Ranks, one_layout, shards, whole

OPTIONS = {
    "adagc": {"threshold": 1.05, "warmup_steps": 1, "absolute": 100.0},
    "adaptive": {"threshold": 0.1, "exclude": []},
    "chain": {"links": [{"mode": "value", "threshold": 0.3}, 0.5]},
    "groups": {"groups": {"rows": 0.5, "*": {"mode": "value", "threshold": 0.3}}},
    "none": {},
    "norm": {"threshold": 0.5},
    "per_parameter": {"threshold": 0.5},
    "percentile": {"threshold": 50.0, "min_steps": 1},
    "schedule": {"threshold": 0.5, "warmup_steps": 0},
    "spike": {"threshold": 2.0, "min_steps": 0},
    "update": {"threshold": 0.5},
    "value": {"threshold": 0.3},
    "zscore": {"threshold": 0.01, "warmup_steps": 2},
}
UNREACHED = {
    **{name: {"threshold": 1e30} for name in OPTIONS},
    "adagc": {"threshold": 1e30, "absolute": 1e30},
    "chain": {"links": [{"mode": "value", "threshold": 1e30}, 1e30]},
    "groups": {"groups": {"rows": 1e30, "*": {"mode": "value", "threshold": 1e30}}},
    "none": {},
    "percentile": {"threshold": 100.0},
}
"""Options with which a mode limits nothing: no norm is above the largest one so far."""

REMEMBERING = {"adagc", "percentile", "zscore"}
EACH = pytest.mark.parametrize("name", NAMES)


class Clipping:
    """A mode on a layout, and for a mode that needs one an optimizer, which takes steps."""

    def __init__(self, name, layout, **options):
        self.layout = layout
        self.mode = build(name, **{**OPTIONS[name], **options})
        self.mode.bind(layout)
        self.optimizer = None
        if self.mode.info.needs_optimizer:
            self.optimizer = torch.optim.AdamW([shard.param for shard in layout.shards])
            self.mode.bind_optimizers([self.optimizer], layout)

    def clip(self):
        return self.mode.clip(self.layout)

    def step(self, gradients):
        """Take a step with these gradients of the shards; return the decision."""
        self.give(gradients)
        decision = self.clip()
        if self.optimizer is not None:
            self.optimizer.step()
        return decision

    def give(self, gradients):
        for shard, gradient in zip(self.layout.shards, gradients, strict=True):
            shard.param.grad = gradient.clone()

    def gradients(self):
        return [shard.param.grad.clone() for shard in self.layout.shards]


def gradients_of(step, scale=1.0):
    return [parameter.grad for parameter in whole(step, scale).values()]


def trained(name, **options):
    """A mode that has seen three steps, so that what it remembers limits the next one."""
    clipping = Clipping(name, one_layout(whole()), **options)
    for number, scale in enumerate((1.0, 0.9, 1.1)):
        clipping.step(gradients_of(number, scale))
    return clipping


def numbers(decision):
    return [metric.item() for metric in decision.metrics]


def norm_is_below(limit):
    return lambda gradients: norm_of(gradients) <= limit * (1 + 1e-12)


def elements_are_below(limit):
    return lambda gradients: max(float(g.abs().max()) for g in gradients) <= limit


def bound_of(name, clipping, decision):
    """Return what the law of a mode says of clipped gradients, in plain arithmetic."""
    if name == "value":
        return elements_are_below(0.3)
    if name == "groups":
        return lambda gradients: (
            norm_is_below(0.5)(gradients[:1]) and elements_are_below(0.3)(gradients[1:])
        )
    if name == "per_parameter":
        return lambda gradients: all(norm_is_below(0.5)([gradient]) for gradient in gradients)
    if name == "adaptive":
        weights = [shard.weight for shard in clipping.layout.shards]
        return lambda gradients: all(
            unit_is_below(0.1, weight, gradient)
            for weight, gradient in zip(weights, gradients, strict=True)
        )
    if name == "spike":
        state = clipping.optimizer.state
        moments = [state[shard.param]["exp_avg_sq"] for shard in clipping.layout.shards]
        return lambda gradients: all(
            bool((gradient.square() <= 2.0 * moment * (1 + 1e-12)).all())
            for moment, gradient in zip(moments, gradients, strict=True)
        )
    return norm_is_below(0.5 if name in ("chain", "norm", "schedule") else decision.threshold)


def unit_is_below(limit, weight, gradient):
    dims = list(range(1 if weight.ndim > 1 else 0, weight.ndim))
    lengths = torch.linalg.vector_norm(weight, 2.0, dims).clamp(min=1e-3)
    return bool((torch.linalg.vector_norm(gradient, 2.0, dims) <= limit * lengths * 1.000001).all())


@pytest.mark.parametrize("name", sorted({*NAMES} - {"none", "adagc", "update"}))
def test_what_is_clipped_is_within_the_bound(name):
    clipping = trained(name)
    clipping.give(gradients_of(7, 3.0))
    decision = clipping.clip()
    assert decision.clipped == 1.0
    assert bound_of(name, clipping, decision)(clipping.gradients())


def test_a_tensor_is_within_the_bound_of_its_own_mean():
    clipping = trained("adagc")
    means = clipping.mode.memory["gamma"].tolist()
    clipping.give(gradients_of(7, 3.0))
    assert clipping.clip().clipped == 1.0
    for mean, gradient in zip(means, clipping.gradients(), strict=True):
        assert norm_of([gradient]) <= 1.05 * mean * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REMEMBERING])
def test_clipping_twice_changes_nothing(name):
    clipping = trained(name)
    clipping.give(gradients_of(7, 3.0))
    clipping.clip()
    once = clipping.gradients()
    clipping.clip()
    for before, after in zip(once, clipping.gradients(), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-15, atol=0)


@pytest.mark.parametrize("kept", [False, True])
@EACH
def test_a_gradient_below_the_bound_is_untouched_to_the_bit(name, kept):
    with on(kept):
        clipping = trained(name, **UNREACHED[name])
        before = gradients_of(7, 3.0)
        clipping.give(before)
        decision = clipping.clip()
    for gradient, wanted in zip(clipping.gradients(), before, strict=True):
        assert torch.equal(gradient, wanted)
    assert float(decision.coef) == 1.0
    assert float(decision.norm_clipped) == float(decision.norm)
    assert float(decision.clipped) == float(decision.fraction) == 0.0


@EACH
def test_a_decision_on_factors_changes_no_gradient(name):
    clipping = trained(name)
    before = gradients_of(7, 3.0)
    clipping.give(before)
    mode = clipping.mode
    norms = mode.measure(clipping.layout)
    if mode.by_factors:
        decision = mode.decide(clipping.layout, norms)
        assert not any(metric.isnan() for metric in decision.metrics[:5])
    for gradient, given in zip(clipping.gradients(), before, strict=True):
        assert torch.equal(gradient, given)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@EACH
def test_the_memory_after_a_skipped_step_is_the_memory_before(name, bad, kept):
    with on(kept):
        clipping = trained(name)
        clipping.give(gradients_of(7, 3.0))
        before = copy.deepcopy(clipping.mode.state_dict())
        clipping.layout.shards[1].param.grad[0, 0] = bad
        decision = clipping.clip()
    assert not bool(decision.finite)
    after = clipping.mode.state_dict()
    if name == "schedule":  # it counts the steps that are skipped too
        before["memory"]["step"] += 1
    assert repr(after) == repr(before)


@EACH
def test_how_a_layout_is_split_changes_nothing(name):
    def body(ranks):
        held = shards(whole(), ranks)
        layout = Layout(held, ranks, parameters=one_layout(whole()).parameters)
        clipping = Clipping(name, layout)
        decisions = []
        for number, scale in enumerate((1.0, 0.9, 3.0)):
            given = [shard.param.grad for shard in shards(whole(number, scale), ranks)]
            decisions.append(clipping.step(given))
        return decisions, clipping.gradients()

    of_one = Clipping(name, one_layout(whole()))
    decisions = [of_one.step(gradients_of(i, scale)) for i, scale in enumerate((1.0, 0.9, 3.0))]
    (first, mine), (second, other) = Ranks(2).run(body)
    for decision, on_first, on_second in zip(decisions, first, second, strict=True):
        assert repr(numbers(on_first)) == repr(numbers(on_second))
        assert numbers(on_first) == pytest.approx(numbers(decision), rel=1e-12, nan_ok=True)
    wanted = of_one.gradients()
    joined = [torch.cat([mine[i], other[i]], dim) for i, dim in ((0, 0), (1, 1), (2, 0))]
    for gradient, of_whole in zip([*joined, *mine[3:]], wanted, strict=True):
        torch.testing.assert_close(gradient, of_whole, rtol=1e-12, atol=0)
