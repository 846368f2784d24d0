"""Modes ``update`` and ``spike`` against optimizers in plain float64 arithmetic."""

import copy
import math

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster
from runner.clip import build
from tests.clip.reference import norm_of, on, refused, unwaited

BETAS, EPS, DECAY, RATE = (0.9, 0.99), 1e-8, 0.05, 0.01
STEPS = 250


def model_of(dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(dtype)
    model.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
    return model


def adamw(parameters, **options):
    return torch.optim.AdamW(
        parameters, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
    )


def boosted(model, optimizer):
    _, wrapped, *_ = Booster().boost(model, optimizer)
    return wrapped


def gradients(steps, like, seed=1):
    """Made-up gradients: plateaus, spikes, zeros, level shifts, and steps that are not finite."""
    draw = torch.Generator().manual_seed(seed)
    level = 1.0
    for step in range(steps):
        if step in (120, 200):
            level *= 20.0 if step == 120 else 0.01
        size = level * (50.0 if step % 37 == 36 else 1.0)
        found = [torch.randn(p.shape, generator=draw, dtype=torch.float64) * size for p in like]
        if step % 41 == 5:
            found[0] = torch.zeros_like(found[0])
        if step % 53 == 8:
            found[1] *= 100.0  # one tensor alone
        if step % 97 == 60:
            found[2].view(-1)[0] = math.nan if step < 100 else math.inf
        yield found


def give(parameters, given):
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient.to(parameter.dtype, copy=True)


def train(mode, optimizer, steps, model, device=False):
    """Decisions of made-up steps; on a device the host reads nothing."""
    wrapped, parameters, decisions = boosted(model, optimizer), list(model.parameters()), []
    wrapped.bind(mode)
    for given in gradients(steps, parameters):
        give(parameters, given)
        with unwaited(device):
            wrapped.clip(mode, fold=True)
            wrapped.step()
        decisions.append(wrapped.decision)
        wrapped.zero_grad()
    return decisions


class Moments:
    """The moments of Adam for finite gradients, and what they are divided by."""

    def __init__(self, weights):
        self.m, self.v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        self.count = 0

    def add(self, gradients):
        self.count += 1
        for m, v, g in zip(self.m, self.v, gradients, strict=True):
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
        return [
            m / (1 - BETAS[0] ** self.count) / (self.second(v).sqrt() + EPS)
            for m, v in zip(self.m, self.v, strict=True)
        ]

    def second(self, v):
        return v / (1 - BETAS[1] ** self.count)


def stable_adamw(weights, moments, given, limit, _):
    """Algorithm 2 of arXiv 2304.13013: the update of each tensor is divided by its RMS."""
    updates, every = moments.add(given), []
    for w, v, g, update in zip(weights, moments.v, given, updates, strict=True):
        rms = math.sqrt(float((g * g / moments.second(v).clamp(min=EPS * EPS)).mean()))
        w.sub_(RATE / max(1.0, rms / limit) * (DECAY * w + update))
        every.append(rms)
    over = [rms > limit * (1 + 1e-6) for rms in every]
    top = max(every)
    return {
        "fraction": sum(over) / len(over),
        "max_stat": top,
        "coef": min(1.0, limit / top),
        "threshold": limit,
    }


def spam(weights, moments, given, limit, options):
    """SPAM's clipping in front of AdamW, without its resets."""
    changed = elements = 0
    top, entering = 0.0, []
    for v, g in zip(moments.v, given, strict=True):
        elements += g.numel()
        if moments.count and moments.count >= options["min_steps"]:
            top = max(top, float(torch.where(v > 0, g * g / v, 0.0).max()))
            mask = (g * g > limit * v) & (v > 0)
            changed += int(mask.sum())
            g = torch.where(mask, g.sign() * (limit * v).sqrt(), g)
        entering.append(g)
    for w, update in zip(weights, moments.add(entering), strict=True):
        w.sub_(RATE * (DECAY * w + update))
    after = norm_of(entering, options.get("norm_type", 2.0))
    coef = after / norm_of(given, options.get("norm_type", 2.0))
    fraction = changed / elements
    return {"fraction": fraction, "max_stat": top, "norm_clipped": after, "coef": coef}


SPIKE = {"threshold": 40.0, "min_steps": 3}
RULES = {
    "update, rms 1": {"threshold": 1.0},
    "update, rms 1.4": {"threshold": 1.4},
    "spike, from the start": {**SPIKE, "min_steps": 0},
    "spike, after 20 steps": {**SPIKE, "min_steps": 20, "norm_type": 1.0},
    "spike, largest element": {**SPIKE, "norm_type": math.inf},
}
WHERE = {"plain": (False, False), "fused": (True, False), "device": (True, True)}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_the_reference(name, where):
    """On a device the host waits for nothing."""
    (mode, _, _), options, (fused, device) = name.partition(","), RULES[name], WHERE[where]
    rule, p = spam if mode == "spike" else stable_adamw, options.get("norm_type", 2.0)
    dtype = torch.float32 if where == "fused" and name == "update, rms 1" else torch.float64
    model = model_of(dtype)
    weights = [q.detach().double().clone() for q in model.parameters()]
    moments, clipped = Moments(weights), 0
    with on(device):
        optimizer = adamw(model.parameters(), fused=fused)
        decisions = train(build(mode, **options), optimizer, STEPS, model, device)
    exact = 1e-5 if dtype is torch.float32 else 1e-9
    for given, decision in zip(gradients(STEPS, weights), decisions, strict=True):
        if not math.isfinite(norm := norm_of(given, p)):
            assert bool(decision.finite) is False
            continue
        wanted = {"norm": norm, "norm_clipped": norm}
        wanted |= rule(weights, moments, given, options["threshold"], options)
        wanted["clipped"] = float(wanted["fraction"] > 0)
        clipped += wanted["clipped"]
        for key, value in wanted.items():
            found = float(getattr(decision, key))
            assert found == pytest.approx(value, rel=exact, nan_ok=True), key
    assert 2 < clipped < STEPS - 10
    for ours, theirs in zip(model.parameters(), weights, strict=True):
        rough = {"rtol": 2e-5, "atol": 2e-5} if exact == 1e-5 else {"rtol": 1e-6, "atol": 1e-9}
        torch.testing.assert_close(ours.detach().double(), theirs, **rough)


@pytest.mark.parametrize("name", ["RMSprop", "Adam", "NAdam", "RAdam"])
def test_other_optimizers_move_by_a_part_of_their_own_update(name):
    """The update is what the optimizer alone would do from the same state; v is its own."""
    kind, model = getattr(torch.optim, name), model_of()
    parameters = list(model.parameters())
    optimizer = kind(parameters, lr=RATE, weight_decay=0.1)
    wrapped, mode, limited = boosted(model, optimizer), build("update", threshold=0.9), 0
    wrapped.bind(mode)
    for given in gradients(40, parameters):
        before = [p.detach().clone() for p in parameters]
        twin = kind([nn.Parameter(b.clone()) for b in before], lr=RATE, weight_decay=0.1)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        alone = twin.param_groups[0]["params"]
        give(parameters, given)
        give(alone, given)
        wrapped.clip(mode)
        wrapped.step()
        wrapped.zero_grad()
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


@pytest.mark.parametrize(("limit", "coef"), [(1.0, 1.0), (0.5, 0.5)])
def test_clipping_an_update_leaves_the_gradient_as_it_is(limit, coef):
    """The first update of AdamW is the rate times the sign: its RMS is 1 but for rounding."""
    model = model_of(torch.float32)
    first_gradients, *_ = gradients(1, list(model.parameters()))
    boosted, _, *_ = Booster().boost(model, adamw(model.parameters()))
    give(model.parameters(), first_gradients)
    decision = apply_gradient_clipping(boosted, "update", limit)
    assert decision.max_stat == pytest.approx(1.0, rel=1e-6)
    assert decision.clipped == decision.fraction == float(limit < 1)
    assert decision.coef == pytest.approx(coef)
    for parameter, gradient in zip(model.parameters(), first_gradients, strict=True):
        assert torch.equal(parameter.grad, gradient.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-22, 1.0, 1e20])
def test_spikes_at_the_ends_of_the_range(dtype, size):
    """What has no second moment, what no optimizer steps and what is 9·v exactly stays as it is."""
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.Adam([model.weight])
    give([model.weight], [torch.ones(2, 3)])
    optimizer.step()
    v = torch.tensor([[0.0, 1.0, 4.0], [1.0, 1.0, 0.25]], dtype=torch.float64) * size
    optimizer.state[model.weight]["exp_avg_sq"] = v.to(dtype)
    root = math.sqrt(size)
    wrapped = boosted(model, optimizer)
    grad, bias = torch.tensor([[9.0, -9.0, 1.0], [2.0, 3.0, 8.0]]), torch.tensor([3.0, 4.0])
    give(model.parameters(), [grad.double() * root, bias.double() * root])
    decision = wrapped.clip(build("spike", threshold=9.0, min_steps=1))
    wanted = torch.tensor([[9.0, -3.0, 1.0], [2.0, 3.0, 1.5]], dtype=torch.float64) * root
    rough = 2e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(model.weight.grad.double(), wanted, rtol=rough, atol=0.0)
    if dtype is not torch.bfloat16:
        assert decision.max_stat == pytest.approx(256.0, rel=1e-5)
        assert decision.fraction == 2 / 6 or size != 1.0
        assert decision.norm_clipped == pytest.approx(norm_of([wanted, bias * root], 2.0), rel=1e-5)


class Debiased(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"].mul_(1.5)


def test_optimizers_without_the_second_moments_of_adam_are_refused():
    for mode in ("update", "spike"):
        for name in ("SGD", "Adagrad", "Adafactor", "Muon"):
            model = nn.Linear(3, 3, bias=False)
            wrapped = boosted(model, getattr(torch.optim, name)(model.parameters(), lr=0.1))
            words, made = f"clip={mode}|{name}|adamw", build(mode, threshold=1.0)
            refused(ValueError, words, wrapped.bind, made)
    model = nn.Linear(3, 3)
    wrapped = boosted(model, Debiased(model.parameters()))
    wrapped.bind(build("spike", threshold=1.0))
    refused(ValueError, "Debiased", wrapped.bind, build("update", threshold=1.0))
    model(torch.ones(1, 3)).sum().backward()
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    for mode in ("update", "spike"):
        words = f"clip={mode}|optimizer"
        refused(ValueError, words, apply_gradient_clipping, plain, mode, 1.0)
