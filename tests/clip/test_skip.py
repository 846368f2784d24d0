"""The rule that skips steps on spikes: against plain arithmetic, and beside the public rules."""

import math
from collections import deque

import pytest
import torch

from runner import SkipRule
from tests.clip.reference import on, refused, unwaited


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


def by_hand(values, rule, k=None, window=None, decay=None, min_steps=None, accept_after=None):
    """Which of ``values`` are spikes: the description of the rule in plain Python."""
    kept, skipped, found = deque(maxlen=window), [], []
    for value in values:
        if not math.isfinite(value):
            found.append(False)
            continue
        limit = k if rule == "constant" else math.inf
        if rule == "sigma" and len(kept) >= min_steps:
            mean = math.fsum(kept) / len(kept)
            squares = math.fsum((one - mean) ** 2 for one in kept)
            limit = mean + k * math.sqrt(squares / (len(kept) - 1))
        elif rule == "ema" and len(kept) >= min_steps:
            past = [value * decay**age for age, value in enumerate(reversed(kept))]
            limit = k * sum(past) / sum(decay**age for age in range(len(kept)))
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
    {"rule": "constant", "k": 30.0},
]


@pytest.mark.parametrize(
    ("options", "kept"),
    [*((one, False) for one in OPTIONS), (OPTIONS[2], True), (OPTIONS[3], True)],
)
def test_decisions_are_those_of_the_description_also_after_a_resume(options, kept):
    values, wanted = series(), None
    for at in (None,) if kept else (None, 95, 355):
        rule = SkipRule(**options)
        wanted = wanted or by_hand(values, **{"min_steps": rule.min_steps} | options)
        assert any(wanted)
        found = []
        with on(kept), unwaited(kept):
            for number, value in enumerate(values):
                if number == at:
                    state, rule = rule.state_dict(), SkipRule(**options)
                    rule.load_state_dict(state)
                    assert rule.state_dict().keys() == state.keys()
                given = torch.full((), value, dtype=torch.float64) if kept else value
                found.append(rule.is_spike(given))
        assert {(one.dtype, one.shape) for one in found} == {(torch.bool, ())}
        assert [bool(one) for one in found] == wanted


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4]])
def test_a_step_that_one_of_two_values_leaves_out_enters_no_history(options):
    """Against one history in plain Python for each value, of the steps that neither leaves out."""
    norms = series()[:130]
    losses = [loss + 5.0 for loss in series(seed=1)[40:170]]
    rule = SkipRule(of="any", **options)
    alone = {"min_steps": rule.min_steps} | options
    kept = []
    causes = set()
    for step in zip(norms, losses, strict=True):
        spikes = [False, False]
        if all(map(math.isfinite, step)):
            for number in (0, 1):
                values = [*(values[number] for values in kept), step[number]]
                spikes[number] = by_hand(values, **alone)[-1]
            causes.add(tuple(spikes))
            if not any(spikes):
                kept.append(step)
        assert bool(rule.is_spike(*step)) == any(spikes)
    assert {(True, False), (False, True)} <= causes


def test_a_level_of_both_values_is_accepted_after_a_row_of_skips():
    rule = SkipRule("ema", of="any", k=3.0, min_steps=1, accept_after=3)
    steps = [(1.0, 2.0), (1.0, 20.0), (1.5, 20.0), (1.0, 21.0), (1.0, 22.0), (9.0, 22.0)]
    assert [bool(rule.is_spike(*step)) for step in steps] == [False, True, True, True, False, True]


def test_a_history_of_an_earlier_version_goes_on():
    rule = SkipRule("ema", min_steps=1)
    rule.is_spike(1.0)
    state = rule.state_dict()
    history = {name: value.flatten() for name, value in state["history"].items()}
    again = SkipRule("ema", min_steps=1)
    again.load_state_dict({"rule": "ema", "history": history})
    assert again.is_spike(100.0)


def test_the_history_of_another_quantity_begins_anew(ema):
    of_losses = SkipRule("ema", of="loss", min_steps=1)
    of_losses.load_state_dict(ema.state_dict())
    assert not of_losses.is_spike(1e9)


@pytest.fixture
def ema():
    """A rule that has just skipped a spike."""
    rule = SkipRule("ema", min_steps=1)
    for norm in (0.0, 0.0, 5.0):
        assert not rule.is_spike(norm), "a history of zeros limits nothing"
    assert rule.is_spike(1e9)
    return rule


def test_another_rule_begins_anew(ema):
    sigma = SkipRule(min_steps=2)
    sigma.load_state_dict(ema.state_dict())
    assert not sigma.is_spike(1e9)


def test_a_row_of_skips_goes_on_after_a_resume(ema):
    accepting = SkipRule("ema", min_steps=1, accept_after=2)
    accepting.load_state_dict(ema.state_dict())
    assert accepting.is_spike(1e9)
    assert not accepting.is_spike(1e9)


def test_another_window_begins_anew():
    rule = SkipRule(window=7, min_steps=2)
    assert not any(rule.is_spike(norm) for norm in (1.0, 1.1, 1.2))
    longer = SkipRule(window=9, min_steps=2)
    longer.load_state_dict(rule.state_dict())
    assert not longer.is_spike(1e9)
    assert rule.is_spike(1e9)


def test_equal_values_are_no_spikes():
    for value in (0.0, 0.1, 1e-300, 1e200):
        rule = SkipRule("sigma", window=7, min_steps=2)
        assert not any(rule.is_spike(value) for _ in range(30))


def test_options_that_cannot_be_are_refused():
    for options, words in (
        ({"rule": "sigam"}, "did you mean sigma"),
        ({"rule": None}, "sigma, ema or constant"),
        ({"rule": "constant"}, "largest norm that is no spike"),
        ({"rule": "constant", "of": "loss"}, "largest loss that is no spike"),
        ({"rule": "constant", "of": "any", "k": 1.0}, "choose norm, loss or update"),
        ({"of": "losses"}, "did you mean loss"),
        ({"rule": "constant", "k": 1.0, "accept_after": 5}, "no option of the rule constant"),
        ({"k": 0.0}, "greater than 0"),
        ({"decay": 0.9}, "no option of the rule sigma"),
        ({"rule": "ema", "window": 9}, "no option of the rule ema"),
        ({"rule": "ema", "decay": 1.0}, "less than 1"),
        ({"window": 1}, "at least 2"),
        ({"window": 9, "min_steps": 10}, "window of 9"),
        ({"accept_after": 0}, "at least 1"),
    ):
        refused(ValueError, words, SkipRule, **options)
