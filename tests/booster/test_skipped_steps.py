"""Skipped steps leave weights and moments as a run without them has them, also on a device.

CPU tensors stand in for an accelerator's (``tests/on_device.py``); torch's fused CPU kernels read
the same ``found_inf``.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import Booster, SkipRule, Trainer
from runner.booster import LossScale, NonFiniteGradient
from runner.booster.step_order import StepOrderError
from runner.clip import build
from runner.data.dataset import TensorPairs, collate_pairs
from tests.clip.reference import on, refused
from tests.on_device import Waits

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}
MODES = {"none": None, "norm": 0.5, "value": 0.1, "adaptive": 0.05}
LIST = {"rule": "sigma", "k": 4.0, "window": 6, "min_steps": 4, "accept_after": None}
SPIKES = {7: 900.0, 9: 500.0, 10: 700.0, 13: math.nan, 14: 300.0, 15: math.inf}
"""Factor of the loss of a step: single spikes, a row of them, and steps that are not finite."""
NUMBERS = range(1, 19)
KEPT = [number for number in NUMBERS if number not in SPIKES]


def boosted(kind="adamw", fused=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    inner = OPTIMIZERS[kind](module.parameters(), fused=fused)
    booster = Booster(**options)
    model, optimizer, *_ = booster.boost(module, inner)
    return booster, model, optimizer


def train(numbers, factors, mode="norm", *, added=None, parts=1, kept=False, of=None, **made):
    """Take steps; return which were taken, weights and moments, decisions, and what has waited.

    The loss of a step is multiplied by a factor, and a constant without a gradient is added.
    """
    added = added or {}
    booster, model, optimizer = of or boosted(**made)
    clipper = mode and build(mode, threshold=MODES[mode])
    if clipper:
        clipper.bind(optimizer.layout)
    taken = []
    decisions = []
    waits = []
    with on(kept):
        for number in numbers:
            inputs = torch.arange(12.0).view(3, 4).sin() + 0.02 * math.sin(number)
            with Waits() as waiting:
                for part in range(parts):
                    outputs = model(inputs[part::parts].to(model.unwrap()[0].weight))
                    loss = outputs.square().sum() / 10 * factors.get(number, 1.0)
                    loss = loss + added.get(number, 0.0) / parts
                    with booster.no_sync(model) if part < parts - 1 else torch.enable_grad():
                        booster.backward(loss, optimizer)
                decisions += [optimizer.clip(clipper)] if clipper else []
                optimizer.step()
            waits.append(waiting.found)
            taken.append(optimizer.was_taken())
            optimizer.zero_grad()
    states = optimizer.unwrap().state.values()
    moments = [v.clone() for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    tensors = [p.detach().clone() for p in model.unwrap().parameters()] + moments
    return taken, tensors, decisions, waits


def metrics_of(decisions):
    return [float(metric) for decision in decisions for metric in decision.metrics]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, "norm") for kind in OPTIMIZERS]
    + [("adamw", "value"), ("momentum", "adaptive"), ("sgd", "none")],
)
def test_a_device_skips_steps_as_a_host_that_reads_the_norm_does(kind, mode):
    """Also where the first step is skipped: fused SGD has no momentum buffers before it."""
    for first in (10.0, math.nan):
        factors = dict(enumerate((first, 10.0, math.inf, -20.0, math.nan, 10.0)))
        read = train(factors, factors, mode, kind=kind, fused=False)
        kept = train(factors, factors, mode, kind=kind, kept=True)
        assert metrics_of(kept[2]) == pytest.approx(metrics_of(read[2]), rel=1e-9, nan_ok=True)
        clipped = {float(decision.clipped) for decision in read[2]}
        assert clipped == ({0.0, 1.0} if mode != "none" else {0.0})
        assert kept[0] == read[0] == list(map(math.isfinite, factors.values()))
        for ours, expected in zip(kept[1], read[1], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
        # Momentum buffers need a first step that is taken for certain.
        assert not any(kept[3][2 if math.isnan(first) else 1 :])
        assert any("host.py" in line for line in read[3][1]) or mode != "norm"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_not_finite_can_be_ignored_or_an_error(mode, fused):
    arguments = ((1, 2), {2: math.nan}, mode)
    bad = {"kept": True, "fused": fused}
    read = train(*arguments, nonfinite="ignore", fused=False)
    kept = train(*arguments, nonfinite="ignore", **bad)
    refused(NonFiniteGradient, "nan: 0.weight", train, *arguments, nonfinite="error", **bad)
    assert metrics_of(kept[2]) == pytest.approx(metrics_of(read[2]), rel=1e-9, nan_ok=True)
    assert kept[0] == read[0] == [True, True]
    assert all(bool(weight.isnan().all()) for weight in (*kept[1][:4], *read[1][:4]))


def test_the_schedule_stands_still_when_the_device_skips_a_step():
    """It moves once a step that was taken, also after the last one."""
    inputs = torch.ones(5, 4)
    inputs[2] = math.nan
    data = TensorPairs(inputs, torch.zeros(5, dtype=torch.long))
    for kept in (False, True):
        module = nn.Linear(4, 2)
        loader = DataLoader(data, collate_fn=collate_pairs)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
        halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = Trainer(module, loader, "1ep", [], None, optimizer, halved)
        with on(kept):
            summary = trainer.fit()
        assert (summary["grad/nonfinite"], summary["final"]["train/lr"]) == (1, 0.5**3), kept
        assert optimizer.param_groups[0]["lr"] == 0.5**4, kept


# -- spikes


@pytest.mark.parametrize("mode", ["norm", None])
@pytest.mark.parametrize(
    ("kind", "fused", "parts"), [("adamw", True, 1), ("adamw", False, 3), ("momentum", True, 3)]
)
def test_a_spike_changes_neither_weights_nor_moments(kind, fused, parts, mode):
    options = {"mode": mode, "kind": kind, "fused": fused, "parts": parts}
    expected = train(KEPT, {}, **options)
    ours = train(NUMBERS, SPIKES, skip=SkipRule(**LIST), **options)
    assert ours[0] == [number not in SPIKES for number in NUMBERS]
    assert all(map(torch.equal, ours[1], expected[1]))


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_an_accelerator_finds_the_spikes_that_the_host_finds(kind):
    expected = train(KEPT, {}, kind=kind)
    options = {"kind": kind, "skip": SkipRule(**LIST), "kept": True}
    taken, tensors, decisions, waits = train(NUMBERS, SPIKES, **options)
    # The host waits once: fused SGD must not begin its momentum with a skipped step.
    assert waits[1:] == [[]] * 17
    assert (
        taken
        == [n not in SPIKES for n in NUMBERS]
        == [bool(decision.finite) for decision in decisions]
    )
    spikes = [float(decision.spike) for decision in decisions]
    assert spikes == [float(math.isfinite(SPIKES.get(n, math.nan))) for n in NUMBERS]
    assert math.isnan(float(decisions[6].coef))
    assert float(decisions[6].clipped) == 0.0
    assert all(map(torch.equal, tensors, expected[1]))


def test_a_spike_is_neither_an_overflow_nor_an_error():
    options = {"mixed_precision": "fp16", "loss_scale": LossScale(2.0, 10**6), "fused": False}
    wrapped = boosted(skip=SkipRule(**LIST), dtype=torch.float32, **options)
    assert train(range(1, 9), {7: 500.0}, of=wrapped)[0] == [number != 7 for number in range(1, 9)]
    assert wrapped[2].loss_scale.state_dict() == {"scale": 2.0, "finite_steps": 8}
    error = {"skip": SkipRule(**LIST), "nonfinite": "error"}
    assert train(range(1, 9), {7: 500.0}, **error)[0][6] is False
    refused(NonFiniteGradient, "nan", train, range(1, 9), {7: math.nan}, **error)


@pytest.mark.parametrize("at", [3, 7, 10])
def test_a_loop_of_ones_own_goes_on_from_the_saved_state(at):
    rule = SkipRule(**{**LIST, "accept_after": 3})
    spikes = SPIKES | {8: 400.0}
    whole = train(NUMBERS, spikes, skip=rule)
    begun = boosted(skip=rule)
    again = boosted(skip=rule)
    first = train(range(1, at + 1), spikes, of=begun)
    again[1].unwrap().load_state_dict(copy.deepcopy(begun[1].unwrap().state_dict()))
    again[2].load_state_dict(copy.deepcopy(begun[2].state_dict()))
    second = train(range(at + 1, 19), spikes, of=again)
    assert first[0] + second[0] == whole[0]
    assert all(map(torch.equal, second[1], whole[1]))


# -- spikes of the loss


@pytest.mark.parametrize("of", ["loss", "any"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("mode", ["norm", None])
def test_a_spike_of_the_loss_changes_neither_weights_nor_moments(of, kept, mode):
    """The gradients of these steps are ordinary, so that the norm shows nothing."""
    expected = train(KEPT, {}, mode, parts=3)
    options = {"added": SPIKES, "parts": 3, "kept": kept}
    unseen = train(NUMBERS, {}, mode, skip=SkipRule(**LIST), **options)
    ours = train(NUMBERS, {}, mode, skip=SkipRule(of=of, **LIST), **options)
    assert unseen[0] == [True] * len(NUMBERS)
    assert ours[0] == [number not in SPIKES for number in NUMBERS]
    assert all(map(torch.equal, ours[1], expected[1]))
    if kept:
        assert ours[3][1:] == [[]] * 17  # the host waits for no step


def test_a_loss_that_is_not_finite_counts_as_a_gradient_that_is_not():
    rule = SkipRule(of="loss", **LIST)
    decisions = train(range(1, 9), {}, added={3: math.nan, 6: math.inf}, skip=rule)[2]
    assert [bool(decision.finite) for decision in decisions] == [
        n not in (3, 6) for n in range(1, 9)
    ]
    assert [float(decision.spike) for decision in decisions] == [0.0] * 8
    assert math.isnan(float(decisions[2].norm))
    text = "the gradient is finite, and the loss is not"
    error = {"skip": rule, "nonfinite": "error"}
    refused(NonFiniteGradient, text, train, (1, 2), {}, added={2: math.nan}, **error)


def test_a_loss_that_is_not_finite_can_be_ignored():
    rule = SkipRule(of="loss", **LIST)
    expected = train((1, 2), {})
    ours = train((1, 2), {}, added={2: math.nan}, skip=rule, nonfinite="ignore")
    assert ours[0] == [True, True]
    assert all(map(torch.equal, ours[1], expected[1]))


def test_a_loss_that_is_not_known_is_refused():
    _, model, optimizer = boosted(skip=SkipRule(of="loss"))
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    refused(StepOrderError, "booster.backward(loss, optimizer)", optimizer.step)


# -- spikes of the update

KINDS = [
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("adam", {"maximize": True}),
    ("adamw", {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_of_an_update_is_that_of_what_the_step_subtracts(kind, options, fused):
    torch.manual_seed(0)
    optimizers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    made = optimizers[kind](module.parameters(), lr=0.05, fused=fused, **options)
    booster = Booster(skip=SkipRule(of="update", min_steps=50, window=50))
    model, optimizer, *_ = booster.boost(module, made)
    mode = build("norm", threshold=0.2)
    mode.bind(optimizer.layout)
    for step in range(5):
        before = [p.detach().clone() for p in module.parameters()]
        loss = model(torch.randn(3, 4, dtype=torch.float64)).square().sum() * (step + 1)
        booster.backward(loss, optimizer)
        optimizer.clip(mode, fold=True)
        optimizer.step()
        changes = [p.detach() - old for p, old in zip(module.parameters(), before, strict=True)]
        expected = torch.cat([change.flatten() for change in changes]).norm()
        found = optimizer.compared["update"]
        assert float(found) == pytest.approx(float(expected), rel=1e-9)
        optimizer.zero_grad()


@pytest.mark.parametrize(("mode", "options"), [("norm", {}), ("percentile", {"min_steps": 1})])
def test_a_spike_of_the_update_changes_nothing_and_enters_no_history(mode, options):
    """The mode clips nothing; a larger rate makes the update of a step large, not its gradient."""
    rule = SkipRule("sigma", of="update", k=4.0, window=6, min_steps=4, accept_after=None)
    large = (7, 9, 10)

    def path(numbers, skip):
        booster, model, optimizer = boosted("momentum", skip=skip)
        clipper = build(mode, threshold=100.0, **options)
        clipper.bind(optimizer.layout)
        taken = []
        decisions = []
        for number in numbers:
            optimizer.param_groups[0]["lr"] = 5.0 if number in large else 0.05
            inputs = torch.arange(12.0).view(3, 4).sin() + 0.02 * math.sin(number)
            booster.backward(model(inputs.double()).square().sum() / 10, optimizer)
            decisions.append(optimizer.clip(clipper))
            optimizer.step()
            taken.append(optimizer.was_taken())
            optimizer.zero_grad()
        return taken, [*model.parameters()], clipper.state_dict(), decisions

    kept = [number for number in range(1, 15) if number not in large]
    _, weights, memory, _ = path(kept, None)
    taken, ours, our_memory, decisions = path(range(1, 15), rule)
    assert taken == [number not in large for number in range(1, 15)]
    assert [bool(decision.spike) for decision in decisions] == [not was for was in taken]
    assert all(map(torch.equal, ours, weights))
    assert str(our_memory) == str(memory)


def test_updates_of_other_optimizers_are_refused():
    model = nn.Linear(2, 2)
    booster = Booster(skip=SkipRule(of="update"))
    text = "not of RMSprop: choose one of these"
    refused(ValueError, text, booster.boost, model, torch.optim.RMSprop(model.parameters()))
