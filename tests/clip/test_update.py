"""Mode ``update``: each tensor's update is limited by its RMS, or the whole one by earlier ones.

The references are optimizers in plain float64 arithmetic, and published ones where they are right.
"""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster
from runner.clip import build
from tests.on_device import Waits, kept_on_device

BETAS, EPS, DECAY = (0.9, 0.99), 1e-8, 0.05


def model_of(dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(dtype)
    model.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
    return model


def gradients(steps, like, seed=1):
    """Made-up gradients: plateaus, spikes, zeros, level shifts, and steps that are not finite."""
    draw = torch.Generator().manual_seed(seed)
    level = 1.0
    for step in range(steps):
        if step in (120, 300):
            level *= 20.0 if step == 120 else 0.01
        size = level * (50.0 if step % 37 == 36 else 1.0)
        found = [torch.randn(p.shape, generator=draw, dtype=torch.float64) * size for p in like]
        if step % 41 == 5:
            found[0] = torch.zeros_like(found[0])
        if step % 53 == 8:
            found[1] *= 100.0  # one tensor alone
        if step % 97 == 60:
            found[2].view(-1)[0] = math.nan if step < 200 else math.inf
        yield found


def stable_adamw(steps, weights, rate, limit, skip=True):
    """StableAdamW as algorithm 2 of arXiv 2304.13013 writes it, tensor by tensor."""
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    count, all_rms = 0, []
    for given in gradients(steps, weights):
        if skip and not all(g.isfinite().all() for g in given):
            all_rms.append(None)
            continue
        count += 1
        # The corrections are written into the betas, so that the moments are the corrected ones.
        first, second = (b * (1 - b ** (count - 1)) / (1 - b**count) for b in BETAS)
        found = []
        for w, m, v, g in zip(weights, means, squares, given, strict=True):
            m.mul_(first).add_((1 - first) * g)
            v.mul_(second).add_((1 - second) * g * g)
            rms = math.sqrt(float((g * g / v.clamp(min=EPS * EPS)).mean()))
            own = rate / max(1.0, rms / limit)
            w.sub_(own * DECAY * w).sub_(own * m / (v.sqrt() + EPS))
            found.append(rms)
        all_rms.append(found)
    return weights, all_rms


def train(mode, optimizer, steps, model, device=False):
    """Decisions of made-up steps; on a device the host reads nothing."""
    booster = Booster()
    model, boosted, *_ = booster.boost(model, optimizer)
    boosted.bind(mode)
    parameters = list(model.unwrap().parameters())
    decisions, waits = [], []
    for given in gradients(steps, parameters):
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        with Waits() if device else nullcontext() as waiting:
            boosted.clip(mode, fold=True)
            boosted.step()
        waits += waiting.found if device else []
        decisions.append(boosted.decision)
        boosted.zero_grad()
    assert waits == []
    return parameters, decisions


def adamw(parameters, **options):
    return torch.optim.AdamW(
        parameters, lr=0.01, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("limit", [1.0, 1.4])
def test_500_steps_are_those_of_stable_adamw(fused, limit):
    model = model_of()
    start = [p.detach().clone() for p in model.parameters()]
    wanted, all_rms = stable_adamw(500, start, 0.01, limit)
    mode = build("update", threshold=limit)
    weights, decisions = train(mode, adamw(model.parameters(), fused=fused), 500, model)
    for ours, theirs in zip(weights, wanted, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=1e-12)
    seen = set()
    for decision, rms in zip(decisions, all_rms, strict=True):
        assert (decision.finite is False) == (rms is None)
        if rms is None:
            continue
        over = [one > limit * (1 + 1e-6) for one in rms]
        seen.add(sum(over))
        assert decision.fraction == sum(over) / len(rms)
        assert decision.clipped == float(any(over))
        assert decision.max_stat == pytest.approx(max(rms), rel=1e-9)
        assert decision.coef == pytest.approx(min(1.0, limit / max(rms)), rel=1e-9)
        assert decision.norm_clipped == decision.norm
        assert decision.threshold == limit
    assert {0, 1, 3} <= seen


def test_the_first_step_of_adam_has_an_rms_of_1_whatever_rounding_makes_of_it():
    for dtype in (torch.float32, torch.float64):
        model = model_of(dtype)
        _, [first] = train(build("update", threshold=1.0), adamw(model.parameters()), 1, model)
        assert first.max_stat == pytest.approx(1.0, rel=1e-6)
        assert (first.clipped, first.fraction, first.coef) == (0.0, 0.0, 1.0)


def test_float32_agrees_to_1e_5():
    model = model_of(torch.float32)
    start = [p.detach().double() for p in model.parameters()]
    wanted, all_rms = stable_adamw(500, start, 0.01, 1.0)
    mode = build("update", threshold=1.0)
    weights, decisions = train(mode, adamw(model.parameters()), 500, model)
    for ours, theirs in zip(weights, wanted, strict=True):
        torch.testing.assert_close(ours.detach().double(), theirs, rtol=2e-5, atol=2e-5)
    for decision, rms in zip(decisions, all_rms, strict=True):
        if rms is not None:
            assert decision.max_stat == pytest.approx(max(rms), rel=1e-5)


def assert_same_on_device(steps, name, **options):
    """A mode does the same on a device that the host never waits for."""
    found = []
    for device in (False, True):
        model = model_of()
        mode = build(name, **options)
        optimizer = adamw(model.parameters(), fused=True)
        with kept_on_device() if device else nullcontext():
            found.append(train(mode, optimizer, steps, model, device=device))
    (host, read), (kept, left) = found
    for ours, theirs in zip(kept, host, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    for a, b in zip(left, read, strict=True):
        assert bool(a.finite) is bool(b.finite)
        wanted = pytest.approx(tuple(map(float, b.metrics)), rel=1e-9, nan_ok=True)
        # What an accelerator says of a skipped step is replaced on the host.
        if b.finite is not False:
            assert tuple(map(float, a.metrics)) == wanted
    assert any(d.clipped for d in read)


@pytest.mark.parametrize("options", [{"rule": "rms"}, {"rule": "sigma", "window": 16}])
def test_on_a_device_the_same_happens_and_the_host_waits_for_nothing(options):
    assert_same_on_device(200, "update", threshold=1.2, **options)


@pytest.mark.parametrize("name", ["RMSprop", "Adam", "NAdam", "RAdam"])
def test_other_optimizers_move_by_a_part_of_their_own_update(name):
    """The update is what the optimizer alone would do from the same state; v is its own."""
    kind = getattr(torch.optim, name)
    model = model_of()
    parameters = list(model.parameters())
    optimizer = kind(parameters, lr=0.01, weight_decay=0.1)
    booster = Booster()
    _, boosted, *_ = booster.boost(model, optimizer)
    mode = build("update", threshold=0.9)
    boosted.bind(mode)
    limited = 0
    for given in gradients(40, parameters):
        before = [p.detach().clone() for p in parameters]
        twin = kind([nn.Parameter(b.clone()) for b in before], lr=0.01, weight_decay=0.1)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        alone = twin.param_groups[0]["params"]
        for p, other, g in zip(parameters, alone, given, strict=True):
            p.grad, other.grad = g.clone(), g.clone()
        boosted.clip(mode)
        boosted.step()
        boosted.zero_grad()
        twin.step()
        for p, other, old, g in zip(parameters, alone, before, given, strict=True):
            state = twin.state[other]
            v = state["square_avg"] if name == "RMSprop" else state["exp_avg_sq"]
            if name != "RMSprop":
                v = v / (1 - 0.999 ** float(state["step"]))
            squares = (g + 0.1 * old).square() / v.clamp(min=EPS * EPS)
            rms = math.sqrt(float(squares.mean()))
            limited += rms > 0.9
            wanted = old + (other.detach() - old) / max(1.0, rms / 0.9)
            # NAdam keeps a product of factors in float32.
            torch.testing.assert_close(p.detach(), wanted, rtol=1e-9, atol=1e-10)
    assert 20 < limited < 160


def test_pytorch_optimizer_and_optimi_agree():
    """Both write the correction into beta; eps is a floor of the root of v in both."""
    ours = model_of(torch.float64)
    mode = build("update", threshold=1.0)
    steps = 60
    weights, _ = train(mode, adamw(ours.parameters()), steps, ours)
    compared = 0
    for library, options in (("pytorch_optimizer", {}), ("optimi", {"foreach": False})):
        try:
            module = __import__(library)
        except ImportError:
            continue
        compared += 1
        if library == "optimi":
            options = {**options, "triton": False}
        theirs = model_of(torch.float64)
        listed = list(theirs.parameters())
        other = module.StableAdamW(
            listed, lr=0.01, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
        )
        for given in gradients(steps, listed):
            for parameter, gradient in zip(listed, given, strict=True):
                parameter.grad = gradient.clone()
            other.step()
        for a, b in zip(weights, listed, strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-7)
    if not compared:
        pytest.skip("neither library is installed")


def test_sigma_is_levanters_rule():
    """The norm of update ÷ rate, weight decay included, against mean + kσ of the last 128."""
    model = model_of()
    mode = build("update", threshold=3.0, rule="sigma")
    _, decisions = train(mode, adamw(model.parameters()), 500, model)
    weights = [p.detach().clone() for p in model_of().parameters()]
    alone = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    count, norms, bound, clipped = 0, [], math.nan, 0
    for given, decision in zip(gradients(500, weights), decisions, strict=True):
        if not all(g.isfinite().all() for g in given):
            assert decision.finite is False
            continue
        count += 1
        updates = []
        for w, m, v, g in zip(weights, *alone, given, strict=True):
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
            corrected = (v / (1 - BETAS[1] ** count)).sqrt() + EPS
            updates.append(m / (1 - BETAS[0] ** count) / corrected + DECAY * w)
        norm = math.sqrt(sum(float(u.square().sum()) for u in updates))
        last = torch.tensor(norms[-128:], dtype=torch.float64)
        bound = math.nan
        if len(last) >= 64:
            bound = float(last.mean() + 3.0 * last.std(correction=0).clamp(min=1e-6))
        coef = bound / norm if norm > bound else 1.0
        clipped += norm > bound
        for w, update in zip(weights, updates, strict=True):
            w.sub_(0.01 * coef * update)
        norms.append(norm)
        assert decision.max_stat == pytest.approx(norm, rel=1e-7)
        assert decision.threshold == pytest.approx(bound, rel=1e-7, nan_ok=True)
        assert decision.coef == pytest.approx(coef, rel=1e-7)
        assert decision.clipped == float(norm > bound)
    assert 2 < clipped < 100
    for ours, theirs in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adafactor"])
def test_sigma_takes_any_optimizer(name):
    model = model_of()
    mode = build("update", threshold=1.0, rule="sigma", window=8)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    _, decisions = train(mode, optimizer, 60, model)
    assert 0 < sum(decision.clipped for decision in decisions) < 50


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("update", {"threshold": 1.0}),
        ("update", {"threshold": 1.0, "rule": "sigma", "window": 8}),
        ("spike", {"threshold": 40.0, "min_steps": 4}),
    ],
)
def test_resume_in_the_middle_changes_nothing(name, options):
    def run(stop_at):
        model = model_of()
        mode = build(name, **options)
        _, boosted, *_ = Booster().boost(model, adamw(model.parameters(), fused=True))
        boosted.bind(mode)
        clipped = 0.0
        for step, given in enumerate(gradients(80, list(model.parameters()))):
            if step == stop_at:
                saved = copy.deepcopy((model.state_dict(), boosted.state_dict(), mode.state_dict()))
                model, mode = model_of(), build(name, **{**options, "threshold": 7.0})
                _, boosted, *_ = Booster().boost(model, adamw(model.parameters(), fused=True))
                boosted.bind(mode)
                for part, state in zip((model, boosted, mode), saved, strict=True):
                    part.load_state_dict(state)
            for parameter, gradient in zip(model.parameters(), given, strict=True):
                parameter.grad = gradient.clone()
            boosted.clip(mode, fold=True)
            boosted.step()
            clipped += float(boosted.decision.clipped)
            boosted.zero_grad()
        return [p.detach() for p in model.parameters()], clipped

    (whole, clipped), (resumed, again) = run(None), run(33)
    assert clipped == again > 0
    for ours, theirs in zip(whole, resumed, strict=True):
        assert torch.equal(ours, theirs)


def test_the_gradient_is_not_changed():
    model = model_of()
    parameters = list(model.parameters())
    mode = build("update", threshold=0.1)
    _, boosted, *_ = Booster().boost(model, adamw(parameters))
    for given in gradients(3, parameters):
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        assert boosted.clip(mode).clipped == 1.0
        boosted.step()
        for parameter, gradient in zip(parameters, given, strict=True):
            assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("mode", ["update", "spike"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adafactor", "Muon"])
def test_optimizers_without_second_moments_are_refused(mode, name):
    model = nn.Linear(3, 3, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    _, boosted, *_ = Booster().boost(model, optimizer)
    with pytest.raises(ValueError, match=rf"clip={mode} .*{name} keeps none: choose optim.*=adamw"):
        boosted.bind(build(mode, threshold=1.0))


def test_an_optimizer_with_another_second_moment_is_refused():
    class Debiased(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["exp_avg_sq"].mul_(1.5)

    model = nn.Linear(3, 3)
    _, boosted, *_ = Booster().boost(model, Debiased(model.parameters()))
    with pytest.raises(ValueError, match="Debiased computes them in another way than Adam"):
        boosted.bind(build("update", threshold=1.0))
    boosted.bind(build("spike", threshold=1.0))


@pytest.mark.parametrize(("mode", "rule"), [("update", "rms"), ("update", "sigma"), ("spike", "")])
def test_without_an_optimizer_there_is_one_message(mode, rule):
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    options = {"rule": rule} if rule else {}
    with pytest.raises(
        ValueError, match=rf"^clip={mode} works on the optimizer's step, so it need"
    ):
        apply_gradient_clipping(model, mode, 1.0, **options)


def test_one_call_clips_a_boosted_model():
    model = model_of()
    parameters = list(model.parameters())
    boosted_model, boosted, *_ = Booster().boost(model, adamw(parameters))
    before = [p.detach().clone() for p in parameters]
    for parameter, gradient in zip(parameters, next(gradients(1, parameters)), strict=True):
        parameter.grad = gradient.clone()
    assert apply_gradient_clipping(boosted_model, "update", 0.5).coef == pytest.approx(0.5)
    boosted.step()
    for parameter, old in zip(parameters, before, strict=True):
        # The first update of AdamW is the rate times the sign.
        assert float((parameter.detach() - old).abs().max()) == pytest.approx(0.005, rel=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps must be above 0, not 0.0"),
        ({"rule": "mean"}, "rule must be rms or sigma, not 'mean'"),
        ({"window": 1}, "window must be at least 2, not 1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build("update", threshold=1.0, **options)
    assert str(raised.value) == message
