"""Skipped spikes leave weights and moments as a run without those steps has them, bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn

from runner import Booster, SkipRule
from runner.booster import LossScale, NonFiniteGradient, StepOrderError
from runner.clip import build
from tests.on_device import Waits, kept_on_device

OPTIMIZERS = {
    "momentum": lambda p, fused: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=fused),
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=fused),
}
LIST = {"rule": "sigma", "k": 4.0, "window": 6, "min_steps": 4, "accept_after": None}
SPIKES = {7: 900.0, 9: 500.0, 10: 700.0, 13: math.nan, 14: 300.0, 15: math.inf}
"""Factor of the loss of a step: single spikes, a row of them, and steps that are not finite."""


def boosted(kind="adamw", fused=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    booster = Booster(**options)
    made, optimizer, *_ = booster.boost(model, OPTIMIZERS[kind](model.parameters(), fused))
    return booster, made, optimizer


def inputs(number):
    return torch.arange(12.0).view(3, 4).sin() + 0.02 * math.sin(number)


def train(numbers, spikes, *, parts=1, clip=True, fold=False, mode=None, start=None, **made):
    """Take steps; return which were taken, the decisions, and the optimizer with its model."""
    booster, model, optimizer = made.pop("of", None) or boosted(**made)
    mode = mode or build("norm", threshold=0.5)
    mode.bind(optimizer.layout)
    taken, decisions = [], []
    for number in numbers:
        for part in range(parts):
            loss = model(inputs(number)[part::parts]).square().sum() / 10
            loss = loss * spikes.get(number, 1.0)
            if part < parts - 1:
                with booster.no_sync(model, optimizer):
                    booster.backward(loss, optimizer)
            else:
                booster.backward(loss, optimizer)
        if clip:
            decisions.append(optimizer.clip(mode, fold=fold))
        optimizer.step()
        taken.append(optimizer.was_taken())
        optimizer.zero_grad()
    return taken, decisions, optimizer, [p.detach().clone() for p in model.unwrap().parameters()]


def moments(optimizer):
    return [
        value.clone()
        for each in optimizer.unwrap().state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]


def require_same(ours, wanted):
    for one, other in zip(ours[3], wanted[3], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(moments(ours[2]), moments(wanted[2]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("of", ["norm", "loss", "either"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_spike_changes_neither_weights_nor_moments(kind, fused, parts, of):
    steps, made = range(1, 19), {"kind": kind, "fused": fused, "parts": parts}
    kept = [number for number in steps if number not in SPIKES]
    wanted = train(kept, {}, **made)
    for clip in (True, False):
        if not clip:
            wanted = train(kept, {}, clip=False, **made)
        ours = train(steps, SPIKES, clip=clip, skip=SkipRule(of=of, **LIST), **made)
        assert ours[0] == [number not in SPIKES for number in steps]
        require_same(ours, wanted)


@pytest.mark.parametrize("of", ["norm", "either"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_accelerator_decides_as_the_host_does(kind, of):
    """The host waits once: fused SGD must not begin its momentum with a skipped step."""
    steps, rule = range(1, 19), SkipRule(of=of, **LIST)
    wanted = train([n for n in steps if n not in SPIKES], {}, kind=kind)
    with kept_on_device():
        made = boosted(kind, skip=rule)
        train(steps[:1], SPIKES, of=made)
        with Waits() as waits:
            booster, model, optimizer = made
            mode = build("norm", threshold=0.5)
            mode.bind(optimizer.layout)
            decisions = []
            for number in steps[1:]:
                loss = model(inputs(number)).square().sum() / 10 * SPIKES.get(number, 1.0)
                booster.backward(loss, optimizer)
                decisions.append(optimizer.clip(mode))
                optimizer.step()
                optimizer.zero_grad()
        assert not waits.found
    found = [float(one.spike) for one in decisions]
    assert found == [float(math.isfinite(SPIKES.get(n, math.nan))) for n in steps[1:]]
    assert [bool(one.finite) for one in decisions] == [n not in SPIKES for n in steps[1:]]
    assert float(decisions[5].coef) != float(decisions[5].coef)
    assert float(decisions[5].clipped) == 0.0
    parameters = [p.detach().clone() for p in model.unwrap().parameters()]
    require_same(((), (), optimizer, parameters), wanted)


def test_a_spike_does_not_lower_the_loss_scale():
    made = {"mixed_precision": "fp16", "loss_scale": LossScale(2.0, 10**6), "fused": False}
    taken, _, optimizer, _ = train(range(1, 9), {7: 500.0}, skip=SkipRule(**LIST), **made)
    assert taken == [number != 7 for number in range(1, 9)]
    assert optimizer.loss_scale.state_dict() == {"scale": 2.0, "finite_steps": 8}


def test_an_error_is_for_gradients_that_are_not_finite_alone():
    made = {"skip": SkipRule(**LIST), "nonfinite": "error"}
    assert train(range(1, 9), {7: 500.0}, **made)[0][6] is False
    with pytest.raises(NonFiniteGradient):
        train(range(1, 9), {7: math.nan}, **made)


def test_a_rule_of_the_loss_needs_the_boosters_backward():
    _, model, optimizer = boosted(skip=SkipRule(of="loss"))
    model(inputs(1)).square().sum().backward()
    with pytest.raises(StepOrderError, match=r"call booster\.backward"):
        optimizer.clip_grad_by_norm(1.0)


@pytest.mark.parametrize("at", [3, 7, 10])
def test_a_loop_of_ones_own_goes_on_from_the_saved_state(at):
    rule = SkipRule(**{**LIST, "accept_after": 3})
    spikes = SPIKES | {8: 400.0}
    whole = train(range(1, 19), spikes, skip=rule)
    made = boosted(skip=rule)
    first = train(range(1, at + 1), spikes, of=made)
    again = boosted(skip=rule)
    again[1].unwrap().load_state_dict(copy.deepcopy(made[1].unwrap().state_dict()))
    again[2].load_state_dict(copy.deepcopy(made[2].state_dict()))
    second = train(range(at + 1, 19), spikes, of=again)
    assert first[0] + second[0] == whole[0]
    require_same(second, whole)
