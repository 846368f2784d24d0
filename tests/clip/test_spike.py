"""Mode ``spike``: elements above θ times their second moment are clamped, as SPAM does.

The reference is AdamW in plain float64 arithmetic, with the clamp in front.
"""

import math

import pytest
import torch

from runner.booster import Booster
from runner.clip import build
from tests.clip.test_update import (
    BETAS,
    DECAY,
    EPS,
    adamw,
    assert_same_on_device,
    gradients,
    model_of,
    train,
)

LIMIT = 40.0


def spam(steps, weights, rate, limit, min_steps):
    """What SPAM's clipping does in front of AdamW, without its resets."""
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    count, found = 0, []
    for given in gradients(steps, weights):
        if not all(g.isfinite().all() for g in given):
            found.append(None)
            continue
        clipped = elements = 0
        largest = power = 0.0
        for w, m, v, g in zip(weights, means, squares, given, strict=True):
            elements += g.numel()
            if count and count >= min_steps:
                ratio = torch.where(v > 0, g * g / v, 0.0)
                largest = max(largest, float(ratio.max()))
                mask = (g * g > limit * v) & (v > 0)
                clipped += int(mask.sum())
                g = torch.where(mask, g.sign() * (limit * v).sqrt(), g)
            power += float(g.square().sum())
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
            step = count + 1
            divisor = (v / (1 - BETAS[1] ** step)).sqrt() + EPS
            w.sub_(rate * DECAY * w).sub_(rate * m / (1 - BETAS[0] ** step) / divisor)
        count += 1
        found.append((clipped / elements, largest, math.sqrt(power)))
    return weights, found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("min_steps", [0, 20])
def test_500_steps_are_those_of_the_reference(fused, min_steps):
    model = model_of()
    start = [p.detach().clone() for p in model.parameters()]
    wanted, found = spam(500, start, 0.01, LIMIT, min_steps)
    mode = build("spike", threshold=LIMIT, min_steps=min_steps)
    weights, decisions = train(mode, adamw(model.parameters(), fused=fused), 500, model)
    for ours, theirs in zip(weights, wanted, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=1e-12)
    clipped = 0
    for decision, reference in zip(decisions, found, strict=True):
        assert (decision.finite is False) == (reference is None)
        if reference is None:
            continue
        fraction, largest, norm = reference
        clipped += fraction > 0
        assert decision.fraction == fraction
        assert decision.max_stat == pytest.approx(largest, rel=1e-9)
        assert decision.norm_clipped == pytest.approx(norm, rel=1e-9)
        assert decision.coef == pytest.approx(norm / decision.norm, rel=1e-9)
    assert 10 < clipped < 400


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_on_a_device_the_same_happens_and_the_host_waits_for_nothing(norm_type):
    assert_same_on_device(150, "spike", threshold=LIMIT, norm_type=norm_type, min_steps=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-22, 1.0, 1e20])
def test_elements_at_the_ends_of_the_range(dtype, size):
    """An element without a second moment is left alone; the others keep their sign."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    v = torch.tensor([[0.0, 1.0, 4.0], [1.0, 1.0, 0.25]], dtype=torch.float64) * size
    optimizer.state[parameter]["exp_avg_sq"] = v.to(dtype)
    root = math.sqrt(size)
    given = torch.tensor([[9.0, -9.0, 1.0], [2.0, 3.0, 8.0]], dtype=torch.float64) * root
    model = torch.nn.Module()
    model.weight = parameter
    _, boosted, *_ = Booster().boost(model, optimizer)
    parameter.grad = given.to(dtype)
    decision = boosted.clip(build("spike", threshold=9.0, min_steps=1))
    wanted = torch.tensor([[9.0, -3.0, 1.0], [2.0, 3.0, 1.5]], dtype=torch.float64) * root
    rough = {"rtol": 2e-2, "atol": 0.0} if dtype is torch.bfloat16 else {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(parameter.grad.double(), wanted, **rough)
    if dtype is not torch.bfloat16:
        assert decision.max_stat == pytest.approx(256.0, rel=1e-5)
        if size == 1.0:
            assert decision.fraction == 2 / 6


def test_a_channels_last_gradient_is_compared_with_its_own_elements():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(2, 3, 4, 4))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.randn(2, 3, 4, 4)
    optimizer.step()
    v = optimizer.state[parameter]["exp_avg_sq"].clone()
    given = torch.randn(2, 3, 4, 4)
    model = torch.nn.Module()
    model.weight = parameter
    _, boosted, *_ = Booster().boost(model, optimizer)
    parameter.grad = given.clone().contiguous(memory_format=torch.channels_last)
    decision = boosted.clip(build("spike", threshold=1000.0, min_steps=1))
    mask = given.square() > 1000.0 * v
    assert decision.fraction == float(mask.sum()) / given.numel()
    assert 0 < decision.fraction < 1
    wanted = torch.where(mask, given.sign() * (1000.0 * v).sqrt(), given)
    torch.testing.assert_close(parameter.grad, wanted)


def test_pytorch_optimizers_spam_agrees_while_nothing_is_reset():
    """Its threshold of 20 steps counts from 1. Its fault: at v = 0 it clamps to 0 for ever."""
    library = pytest.importorskip("pytorch_optimizer")
    steps = 55  # before the first gradient that is not finite
    ours, theirs = model_of(torch.float32), model_of(torch.float32)
    options = {"lr": 0.01, "betas": BETAS, "eps": EPS}
    listed = list(theirs.parameters())
    other = library.SPAM(
        listed, threshold=40, grad_accu_steps=21, update_proj_gap=10**6, warmup_epoch=0, **options
    )
    for given in gradients(steps, listed):
        for parameter, gradient in zip(listed, given, strict=True):
            parameter.grad = gradient.float()
        other.step()
    optimizer = torch.optim.Adam(ours.parameters(), **options)
    weights, decisions = train(build("spike", threshold=40.0), optimizer, steps, ours)
    assert any(decision.clipped for decision in decisions)
    for a, b in zip(weights, listed, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-3, atol=1e-3)
    dead = torch.nn.Parameter(torch.zeros(1))
    faulty = library.SPAM([dead], lr=0.1, grad_accu_steps=0, update_proj_gap=10**6)
    for _ in range(5):
        dead.grad = torch.ones(1)
        faulty.step()
    assert dead.item() == 0.0
