"""Clipping inside of a fused step is clipping, and then a step of plain PyTorch."""

import copy
import math
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.booster import Booster
from runner.booster.fused import Fold
from runner.clip import build
from runner.clip import mode as modes
from tests.on_device import Waits, kept_on_device

STEPS = 100

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
    for step in range(STEPS):
        scale = 30.0 if step % 3 else 0.01  # clipped or not
        yield scale * torch.randn(6, 2, 4, 4, generator=drawn), step % 4 != 1


def loss_of(model, images, extra):
    return model(images, extra).square().mean()


def by_hand(model, kind, options, threshold):
    """Norms, and clipped gradients of each step, by torch's loop over parameters."""
    optimizer = kind(model.parameters(), foreach=False, **options)
    norms, clipped = [], []
    for images, extra in batches():
        optimizer.zero_grad()
        loss_of(model, images, extra).backward()
        present = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in present))
        if norm > threshold:
            for gradient in present:
                gradient.copy_(gradient.double() * (threshold / norm))
        norms.append(norm)
        clipped.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return norms, clipped


def refuse(*_):
    raise AssertionError("gradients were multiplied by themselves")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_folded_step_is_clipping_and_a_step(name, channels_last):
    kind, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = Net()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    threshold = 0.5
    norms, wanted = by_hand(other, kind, options, threshold)
    assert 10 < sum(norm > threshold for norm in norms) < 90
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, kind(model.parameters(), fused=True, **options))
    mode = build("norm", threshold=threshold)
    with patch.object(modes, "scale", refuse):
        for (images, extra), norm, expected in zip(batches(), norms, wanted, strict=True):
            booster.backward(loss_of(model, images, extra), optimizer)
            decision = optimizer.clip_and_step(mode)
            assert decision.norm == pytest.approx(norm, rel=1e-4)
            assert decision.norm_clipped == pytest.approx(min(norm, threshold), rel=1e-4)
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                if gradient is None:
                    assert parameter.grad is None
                else:
                    torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def stepped(kind=SGD, fused=True, dtype=torch.float32, **given):
    """A linear layer with a boosted optimizer whose gradients wait to be clipped."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3, dtype=dtype)
    parameters = given.pop("parameters", lambda made: made.parameters())(model)
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, kind(parameters, lr=0.1, fused=fused))
    booster.backward(100 * model(torch.ones(2, 4, dtype=dtype)).square().sum(), optimizer)
    return model, optimizer


class Halved(SGD):
    """SGD that looks at gradients before it steps."""

    def step(self, closure=None):
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def norm_of(gradients):
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients))


def test_whoever_looks_before_the_step_sees_clipped_gradients():
    model, optimizer = stepped(Halved)
    optimizer.clip_and_step(build("norm", threshold=0.25))
    assert norm_of(optimizer.unwrap().seen) == pytest.approx(0.25, rel=1e-5)

    model, optimizer = stepped()
    seen = []
    optimizer.unwrap().register_step_pre_hook(
        lambda *_: seen.append(norm_of([p.grad for p in model.parameters()]))
    )
    optimizer.clip_and_step(build("norm", threshold=0.25))
    assert seen == pytest.approx([0.25], rel=1e-5)

    seen.clear()
    model, optimizer = stepped()
    hook = register_optimizer_step_pre_hook(
        lambda *_: seen.append(norm_of([p.grad for p in model.parameters()]))
    )
    try:
        optimizer.clip_and_step(build("norm", threshold=0.25))
    finally:
        hook.remove()
    assert seen == pytest.approx([0.25], rel=1e-5)

    model, optimizer = stepped()
    optimizer.clip(build("norm", threshold=0.25))
    assert norm_of([p.grad for p in model.parameters()]) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"fused": False},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"parameters": lambda model: [model.weight]},
    ],
    ids=["not-fused", "float64", "bfloat16", "a parameter without optimizer"],
)
def test_gradients_that_no_fused_step_can_clip_are_clipped_before(given):
    model, optimizer = stepped(**given)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.clip_and_step(build("norm", threshold=0.25))
    gradients = [p.grad for p in model.parameters()]
    rel = 1e-2 if given.get("dtype") is torch.bfloat16 else 1e-5
    assert norm_of(gradients) == pytest.approx(0.25, rel=rel)
    weight, start, gradient = model.unwrap().weight, before[0], gradients[0]
    torch.testing.assert_close(weight.detach(), start - 0.1 * gradient, rtol=rel, atol=rel)


def test_a_closure_computes_gradients_of_its_own():
    model, optimizer = stepped()
    mode = build("norm", threshold=0.25)
    optimizer.clip(mode, fold=True)
    start = model.unwrap().weight.detach().clone()

    def closure():
        with torch.enable_grad():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        return 0.0

    optimizer.step(closure)
    torch.testing.assert_close(model.unwrap().weight.detach(), start - 0.1)


def test_a_parameter_that_an_optimizer_gets_later_is_clipped_as_well():
    model = nn.Linear(4, 3)
    optimizer = SGD([model.weight], lr=0.1, fused=True)
    booster = Booster()
    model, boosted, *_ = booster.boost(model, optimizer)
    fold = Fold(boosted.optimizers, boosted.layout)
    bias = model.unwrap().bias
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert fold.takes(0.5)
    assert bias.grad.tolist() == [0.5] * 3  # no step multiplies it
    optimizer.add_param_group({"params": [bias], "fused": True})
    assert fold.takes(0.5)
    assert bias.grad.tolist() == [0.5] * 3
    assert not fold.takes(1e-35)  # float32 does not hold 1 / coef


def test_gradients_far_above_the_threshold():
    for size, threshold in ((1e25, 0.5), (1e30, 1e-9), (1e-25, 1e-30)):
        booster = Booster()
        model = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0, fused=True))
        booster.backward(model(torch.full((1, 8), size)).sum(), optimizer)
        optimizer.clip_and_step(build("norm", threshold=threshold))
        each = threshold / math.sqrt(8)
        assert model.unwrap().weight.tolist() == [pytest.approx([-each] * 8, rel=1e-5, abs=0)]


def test_an_accelerator_folds_without_waiting():
    with kept_on_device():
        model, optimizer = stepped()
        before = model.unwrap().weight.detach().clone()
        with patch.object(modes, "scale", refuse), Waits() as waits:
            decision = optimizer.clip_and_step(build("norm", threshold=0.25))
        assert not waits.found
    gradients = [p.grad for p in model.parameters()]
    assert norm_of(gradients) == pytest.approx(0.25, rel=1e-5)
    torch.testing.assert_close(model.unwrap().weight.detach(), before - 0.1 * gradients[0])
    assert float(decision.coef) < 1.0


def test_an_accelerator_that_finds_nan_changes_nothing():
    with kept_on_device():
        model, optimizer = stepped()
        before = [p.detach().clone() for p in model.parameters()]
        model.unwrap().bias.grad[1] = math.nan
        optimizer.clip_and_step(build("norm", threshold=0.25))
        assert not optimizer.was_taken()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
