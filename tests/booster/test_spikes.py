"""Skipped spikes leave weights and moments as a run without those steps has them, bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn

from runner import Booster, SkipRule
from runner.booster import LossScale, NonFiniteGradient
from runner.clip import build
from tests.clip.reference import on, refused
from tests.on_device import Waits

OPTIMIZERS = {
    "momentum": lambda p, fused: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=fused),
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=fused),
}
LIST = {"rule": "sigma", "k": 4.0, "window": 6, "min_steps": 4, "accept_after": None}
SPIKES = {7: 900.0, 9: 500.0, 10: 700.0, 13: math.nan, 14: 300.0, 15: math.inf}
"""Factor of the loss of a step: single spikes, a row of them, and steps that are not finite."""
NUMBERS = range(1, 19)
KEPT = [number for number in NUMBERS if number not in SPIKES]


def boosted(kind="adamw", fused=True, **options):
    torch.manual_seed(0)
    model, booster = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), Booster(**options)
    made, optimizer, *_ = booster.boost(model, OPTIMIZERS[kind](model.parameters(), fused))
    return booster, made, optimizer


def inputs(number):
    return torch.arange(12.0).view(3, 4).sin() + 0.02 * math.sin(number)


def train(numbers, spikes, *, parts=1, clip=True, of=None, **made):
    """Take steps; return which were taken, weights and moments, decisions, and what has waited."""
    booster, model, optimizer = of or boosted(**made)
    mode = build("norm", threshold=0.5)
    mode.bind(optimizer.layout)
    taken, decisions, waits = [], [], []
    for number in numbers:
        with Waits() as waiting:
            for part in range(parts):
                loss = model(inputs(number)[part::parts]).square().sum() / 10
                loss = loss * spikes.get(number, 1.0)
                with booster.no_sync(model) if part < parts - 1 else torch.enable_grad():
                    booster.backward(loss, optimizer)
            decisions += [optimizer.clip(mode)] if clip else []
            optimizer.step()
        waits.append(waiting.found)
        taken.append(optimizer.was_taken())
        optimizer.zero_grad()
    states = optimizer.unwrap().state.values()
    moments = [v.clone() for each in states for v in each.values() if isinstance(v, torch.Tensor)]
    tensors = [p.detach().clone() for p in model.unwrap().parameters()] + moments
    return taken, tensors, decisions, waits


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    ("kind", "fused", "parts"), [("adamw", True, 1), ("adamw", False, 3), ("momentum", True, 3)]
)
def test_a_spike_changes_neither_weights_nor_moments(kind, fused, parts, clip):
    made = {"kind": kind, "fused": fused, "parts": parts, "clip": clip}
    wanted = train(KEPT, {}, **made)
    ours = train(NUMBERS, SPIKES, skip=SkipRule(**LIST), **made)
    assert ours[0] == [number not in SPIKES for number in NUMBERS]
    assert all(map(torch.equal, ours[1], wanted[1]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_accelerator_decides_as_the_host_does(kind):
    wanted = train(KEPT, {}, kind=kind)
    with on(True):
        made = {"kind": kind, "skip": SkipRule(**LIST)}
        taken, tensors, decisions, waits = train(NUMBERS, SPIKES, **made)
    # The host waits once: fused SGD must not begin its momentum with a skipped step.
    assert waits[1:] == [[]] * 17
    assert taken == [n not in SPIKES for n in NUMBERS] == [bool(one.finite) for one in decisions]
    found = [float(one.spike) for one in decisions]
    assert found == [float(math.isfinite(SPIKES.get(n, math.nan))) for n in NUMBERS]
    assert math.isnan(float(decisions[6].coef))
    assert float(decisions[6].clipped) == 0.0
    assert all(map(torch.equal, tensors, wanted[1]))


def test_a_spike_is_neither_an_overflow_nor_an_error():
    made = {"mixed_precision": "fp16", "loss_scale": LossScale(2.0, 10**6), "fused": False}
    rule, of = SkipRule(**LIST), boosted(skip=SkipRule(**LIST), **made)
    assert train(range(1, 9), {7: 500.0}, of=of)[0] == [number != 7 for number in range(1, 9)]
    assert of[2].loss_scale.state_dict() == {"scale": 2.0, "finite_steps": 8}
    error = {"skip": rule, "nonfinite": "error"}
    assert train(range(1, 9), {7: 500.0}, **error)[0][6] is False
    refused(NonFiniteGradient, "nan", lambda: train(range(1, 9), {7: math.nan}, **error))


@pytest.mark.parametrize("at", [3, 7, 10])
def test_a_loop_of_ones_own_goes_on_from_the_saved_state(at):
    rule, spikes = SkipRule(**{**LIST, "accept_after": 3}), SPIKES | {8: 400.0}
    whole = train(NUMBERS, spikes, skip=rule)
    made, again = boosted(skip=rule), boosted(skip=rule)
    first = train(range(1, at + 1), spikes, of=made)
    again[1].unwrap().load_state_dict(copy.deepcopy(made[1].unwrap().state_dict()))
    again[2].load_state_dict(copy.deepcopy(made[2].state_dict()))
    second = train(range(at + 1, 19), spikes, of=again)
    assert first[0] + second[0] == whole[0]
    assert all(map(torch.equal, second[1], whole[1]))
