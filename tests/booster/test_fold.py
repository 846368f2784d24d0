"""Clipping inside of a fused step is clipping, and then a step of plain PyTorch."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.booster import Booster
from runner.clip import build
from tests.clip.reference import norm_of, on, unwaited

OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.05}),
    "momentum": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (Adam, {"lr": 0.003, "amsgrad": True}),
    "adamw": (AdamW, {"lr": 0.003, "weight_decay": 0.1}),
    "adagrad": (Adagrad, {"lr": 0.02}),
}


class Net(nn.Module):
    """Convolution and linear layers, and a layer that some batches leave out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.linear = nn.Linear(32, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, images, extra):
        out = self.linear(self.conv(images).relu().flatten(1))
        return self.extra(out) if extra else out


def batches():
    drawn = torch.Generator().manual_seed(7)
    for step in range(24):
        scale = 30.0 if step % 3 else 0.01  # clipped or not
        yield scale * torch.randn(6, 2, 4, 4, generator=drawn), step % 4 != 1


def gradients_of(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "channels_last"), [*((name, False) for name in OPTIMIZERS), ("momentum", True)]
)
def test_a_folded_step_equals_clipping_before_the_step(name, channels_last):
    kind, options = OPTIMIZERS[name]
    threshold = 0.5
    clipped = 0
    torch.manual_seed(0)
    model = Net()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    plain = kind(reference.parameters(), foreach=False, **options)
    booster = Booster()
    mode = build("norm", threshold=threshold)
    if channels_last:
        mode = build("chain", links=[threshold])
    model, optimizer, *_ = booster.boost(model, kind(model.parameters(), fused=True, **options))
    for images, extra in batches():
        plain.zero_grad()
        reference(images, extra).square().mean().backward()
        norm = norm_of(gradients_of(reference))
        for gradient in gradients_of(reference):
            if gradient is not None and norm > threshold:
                gradient.copy_(gradient.double() * (threshold / norm))
        clipped += norm > threshold
        booster.backward(model(images, extra).square().mean(), optimizer)
        before = copy.deepcopy(gradients_of(model))
        decision = optimizer.clip(mode, fold=True)
        # Nothing but the step multiplies gradients.
        assert all(
            a is b is None or torch.equal(a, b)
            for a, b in zip(before, gradients_of(model), strict=True)
        )
        optimizer.step()
        plain.step()
        assert decision.norm == pytest.approx(norm, rel=1e-4)
        assert decision.norm_clipped == pytest.approx(min(norm, threshold), rel=1e-4)
        for ours, theirs in zip(gradients_of(model), gradients_of(reference), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
        optimizer.zero_grad()
    assert 5 < clipped < 20
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def stepped(kind=SGD, fused=True, dtype=torch.float32, some=False):
    """A linear layer with a boosted optimizer whose gradients wait to be clipped."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3, dtype=dtype)
    booster = Booster()
    parameters = [model.weight] if some else model.parameters()
    model, optimizer, *_ = booster.boost(model, kind(parameters, lr=0.1, fused=fused))
    booster.backward(100 * model(torch.ones(2, 4, dtype=dtype)).square().sum(), optimizer)
    return model, optimizer


class Own(SGD):
    """A subclass, which may look at gradients before it steps."""


@pytest.mark.parametrize("hook", ["own", "global"])
def test_hooks_before_the_step_see_clipped_gradients(hook):
    model, optimizer = stepped()
    seen = []
    register_own = optimizer.unwrap().register_step_pre_hook
    register = register_own if hook == "own" else register_optimizer_step_pre_hook
    handle = register(lambda *_: seen.append(norm_of(gradients_of(model))))
    optimizer.clip_and_step(build("norm", threshold=0.25))
    handle.remove()
    assert seen == pytest.approx([0.25], rel=1e-5)


GIVEN = ({"fused": False}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"some": True})


@pytest.mark.parametrize("given", [*GIVEN, {"kind": Own}], ids=str)
def test_gradients_that_no_fused_step_can_clip_are_clipped_before(given):
    model, optimizer = stepped(**given)
    before = model.unwrap().weight.detach().clone()
    mode = build("norm", threshold=0.25)
    optimizer.clip(mode, fold=True)
    if "some" not in given:
        assert norm_of(gradients_of(model)) == pytest.approx(0.25, rel=1e-2)
    optimizer.step()
    rel = 1e-2 if given.get("dtype") is torch.bfloat16 else 1e-5
    assert norm_of(gradients_of(model)) == pytest.approx(0.25, rel=rel)
    weight = model.unwrap().weight
    gradient = gradients_of(model)[0]
    torch.testing.assert_close(weight.detach(), before - 0.1 * gradient, rtol=rel, atol=rel)


def test_gradients_far_above_the_threshold():
    for size, threshold in ((1e25, 0.5), (1e30, 1e-9), (1e-25, 1e-30)):
        model = nn.Linear(8, 1, bias=False)
        booster = Booster()
        nn.init.zeros_(model.weight)
        model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0, fused=True))
        booster.backward(model(torch.full((1, 8), size)).sum(), optimizer)
        optimizer.clip_and_step(build("norm", threshold=threshold))
        step = threshold / math.sqrt(8)
        assert model.unwrap().weight.tolist() == [pytest.approx([-step] * 8, rel=1e-5, abs=0)], (
            threshold
        )


def test_an_accelerator_folds_without_waiting():
    with on(True):
        model, optimizer = stepped()
        before = model.unwrap().weight.detach().clone()
        with unwaited():
            decision = optimizer.clip_and_step(build("norm", threshold=0.25))
        assert optimizer.was_taken() is True
    gradients = gradients_of(model)
    torch.testing.assert_close(model.unwrap().weight.detach(), before - 0.1 * gradients[0])
    assert norm_of(gradients) == pytest.approx(0.25, rel=1e-5)
    assert float(decision.coef) < 1.0


def test_an_accelerator_changes_nothing_after_nan():
    with on(True):
        model, optimizer = stepped()
        before = model.unwrap().weight.detach().clone()
        model.unwrap().bias.grad[1] = math.nan
        with unwaited():
            optimizer.clip_and_step(build("norm", threshold=0.25))
        assert optimizer.was_taken() is False
    torch.testing.assert_close(model.unwrap().weight.detach(), before)
