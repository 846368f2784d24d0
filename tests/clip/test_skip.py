"""The rule that skips steps on spikes: against plain arithmetic, and beside the public rules."""

import math
from collections import deque

import pytest
import torch

from runner import SkipRule
from tests.on_device import Waits, kept_on_device


def series(count=500, seed=0):
    """Norms with plateaus, zeros, single spikes, runs of spikes, NaN, inf and a level shift."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = (1.0 + 0.1 * noise).tolist()
    values[20:40] = [0.75] * 20
    values[60] = 0.0
    for at in (90, 150, 151, 152, 260):
        values[at] = 40.0 + at
    for at, bad in ((100, math.nan), (101, math.inf), (151, -math.inf), (200, math.nan)):
        values[at] = bad
    return [value * (30.0 if at >= 350 else 1.0) for at, value in enumerate(values)]


def by_hand(values, rule, k, window, decay, min_steps, accept_after):
    """Which of ``values`` are spikes: the description of the rule in plain Python."""
    kept, skipped, found = deque(maxlen=window), [], []
    for value in values:
        if not math.isfinite(value):
            found.append(False)
            continue
        if rule == "sigma":
            limit = math.inf
            if len(kept) >= min_steps:
                mean = math.fsum(kept) / len(kept)
                squares = math.fsum((one - mean) ** 2 for one in kept)
                limit = mean + k * math.sqrt(squares / (len(kept) - 1))
        else:
            past = [value * decay**age for age, value in enumerate(reversed(kept))]
            weight = sum(decay**age for age in range(len(kept)))
            limit = k * sum(past) / weight if len(kept) >= min_steps else math.inf
        found.append(value > limit)
        if not found[-1]:
            kept.append(value)
            skipped = []
            continue
        skipped.append(value)
        if accept_after is not None and len(skipped) == accept_after:
            kept, skipped = deque(skipped, maxlen=window), []
    return found


OPTIONS = [
    {"rule": "sigma", "k": 6.0, "window": 128, "accept_after": 20},
    {"rule": "sigma", "k": 4.0, "window": 16, "accept_after": None},
    {"rule": "sigma", "k": 5.0, "window": 8, "min_steps": 3, "accept_after": 12},
    {"rule": "ema", "k": 20.0, "decay": 0.9, "accept_after": 5},
    {"rule": "ema", "k": 3.0, "decay": 0.99, "min_steps": 4, "accept_after": None},
    {"rule": "ema", "k": 2.0, "decay": 0.5, "min_steps": 1, "accept_after": 1},
]


@pytest.mark.parametrize(
    ("where", "options"),
    [*(("host", one) for one in OPTIONS), ("device", OPTIONS[2]), ("device", OPTIONS[3])],
)
def test_decisions_are_those_of_the_description(where, options):
    values = series()
    rule = SkipRule(**options)
    if where == "host":
        found = [rule.is_spike(value) for value in values]
        assert all(type(one) is bool for one in found)
    else:
        with kept_on_device(), Waits() as waits:
            tensors = [torch.full((), v, dtype=torch.float64) for v in values]
            given = [rule.is_spike(value) for value in tensors]
        assert not waits.found
        found = [bool(one) for one in given]
    wanted = {"window": None, "decay": None, "k": rule.k, "min_steps": rule.min_steps} | options
    assert found == by_hand(values, **wanted)
    assert any(found)
    assert not any(one for one, value in zip(found, values, strict=True) if math.isnan(value))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("at", [95, 355])
def test_it_goes_on_from_its_state(options, at):
    values = series()
    whole, first, second = (SkipRule(**options) for _ in range(3))
    wanted = [whole.is_spike(value) for value in values]
    found = [first.is_spike(value) for value in values[:at]]
    second.load_state_dict(first.state_dict())
    assert second.state_dict().keys() == first.state_dict().keys()
    assert found + [second.is_spike(value) for value in values[at:]] == wanted
    assert torch.equal(
        second.state_dict()["history"]["kept"], whole.state_dict()["history"]["kept"]
    )


def test_either_of_two_values_is_enough_and_both_must_be_kept():
    rule = SkipRule("sigma", of="either", window=8, min_steps=4, k=3.0)
    for step in range(8):
        assert not rule.is_spike(1.0 + 0.1 * (step % 2), -5.0 + 0.1 * (step % 3))
    assert rule.is_spike(9.0, -5.0)
    assert rule.is_spike(1.0, 9.0)
    assert not rule.is_spike(1.0, -5.0)
    # A loss that is not finite is above every limit, if the gradient is finite.
    assert rule.is_spike(1.0, math.nan)
    assert not rule.is_spike(math.nan, math.nan)
    assert not rule.is_spike(1.0, -5.0)


def test_a_loss_that_is_never_finite_is_no_new_level():
    rule = SkipRule("ema", of="loss", min_steps=1, accept_after=3)
    assert not rule.is_spike(1.0, 1.0)
    assert all(rule.is_spike(1.0, math.inf) for _ in range(10))
    assert not rule.is_spike(1.0, 1.0)


def test_equal_values_are_no_spikes():
    for value in (0.0, 0.1, 1e-300, 1e200):
        rule = SkipRule("sigma", window=7, min_steps=2)
        assert not any(rule.is_spike(value) for _ in range(30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "sigam"}, "did you mean sigma"),
        ({"of": "gradient"}, "norm, loss or either"),
        ({"k": 0.0}, "above 0"),
        ({"decay": 0.9}, "goes with the rule ema"),
        ({"rule": "ema", "window": 9}, "goes with the rule sigma"),
        ({"rule": "ema", "decay": 1.0}, "below 1"),
        ({"window": 1}, "at least 2"),
        ({"window": 9, "min_steps": 10}, "window of 9"),
        ({"accept_after": 0}, "at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SkipRule(**options)
    with pytest.raises(ValueError, match="reads the loss"):
        SkipRule(of="loss").is_spike(1.0)


# -- the public rules, each written anew from its description, with what one bad step does to it


class OfSigma:
    """Skip above mean + 6σ of the last ``n`` values, all of which are remembered."""

    def __init__(self, n=32, multiplies=True):
        self.seen, self.n, self.multiplies = [], n, multiplies

    def step(self, norm, moment):
        before = torch.tensor(self.seen[-self.n :], dtype=torch.float64)
        keeps = len(before) < self.n // 2 or bool(norm - before.mean() <= 6 * before.std())
        self.seen.append(norm)
        if self.multiplies:  # the update, by 0 or 1: 0 · NaN is NaN
            return keeps, moment + 0.1 * (norm * float(keeps))
        return keeps, moment + 0.1 * norm if keeps else moment


class OfAverage:
    """Skip from 20 times the average of kept norms on, or where the norm is not finite."""

    def __init__(self, decay=0.99):
        self.mean, self.count, self.decay = 1.0, 0, decay

    def step(self, norm, moment):
        if not (math.isfinite(norm) and norm < 20 * self.mean):
            return False, moment
        d = self.decay * (1 - self.decay**self.count) / (1 - self.decay ** (self.count + 1))
        self.mean, self.count = d * self.mean + (1 - d) * norm, self.count + 1
        return True, moment + 0.1 * norm


class OfConstant:
    """Skip above a constant."""

    def step(self, norm, moment):
        return (False, moment) if norm > 10.0 else (True, moment + 0.1 * norm)


class Ours:
    """This project's rule, beside ``nonfinite=skip``."""

    def __init__(self, **options):
        self.rule = SkipRule(**options)

    def step(self, norm, moment):
        keeps = not self.rule.is_spike(norm) and math.isfinite(norm)
        return keeps, moment + 0.1 * norm if keeps else moment


PUBLIC = {
    "OLMo-core": OfSigma,
    "Levanter": OfSigma,
    "MaxText": lambda: OfSigma(multiplies=False),
    "axlearn": OfAverage,
    "Megatron": OfConstant,
    "ours, sigma": lambda: Ours(rule="sigma", window=32),
    "ours, ema": lambda: Ours(rule="ema", min_steps=8),
}
FAULTS = {
    # after one NaN: is the moment finite, are ordinary steps taken, is a spike skipped; after a
    # level shift: are steps taken in the end
    "OLMo-core": (False, False, True, True),
    "Levanter": (False, False, True, True),
    "MaxText": (True, False, True, True),
    "axlearn": (True, True, True, False),
    "Megatron": (False, True, True, False),
    "ours, sigma": (True, True, True, True),
    "ours, ema": (True, True, True, True),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_known_faults_of_public_rules_are_not_ours(name):
    ordinary = [1.0 + 0.1 * math.sin(step) for step in range(64)]

    def run(norms):
        rule, moment, kept = PUBLIC[name](), 0.0, []
        for norm in norms:
            keeps, moment = rule.step(norm, moment)
            kept.append(keeps)
        return kept, moment

    after_nan, moment = run([*ordinary, math.nan, *ordinary[:16], 1e6])
    assert all(run(ordinary)[0])
    shifted, _ = run([*ordinary, *(50.0 * norm for norm in ordinary)])
    assert (
        math.isfinite(moment),
        all(after_nan[65:81]),
        not after_nan[-1],
        shifted[-1],
    ) == FAULTS[name]
