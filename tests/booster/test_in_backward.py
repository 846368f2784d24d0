"""Clipping and steps in the backward pass: memory, odd gradients, what is refused."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from runner.booster import Booster, NonFiniteGradient
from runner.booster.step_order import StepOrderError
from runner.clip import SkipRule, build
from tests.on_device import kept_on_device
from tests.refusing import Counting

STEPS = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3)).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (8,), generator=generator)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.2)


def boosted(net, mode="value", step=True, optimizer=adamw, **options):
    booster = Booster(**{"nonfinite": "error", **options})
    made = optimizer(net)
    model, wrapped, *_ = booster.boost(net, made)
    clip = build(mode, threshold=None if mode == "none" else 0.01)
    wrapped.clip_in_backward(clip, step=step)
    return booster, model, wrapped, clip


def train(net, loss, step=True, mode="value", **options):
    booster, model, optimizer, clip = boosted(net, mode, step, **options)
    rows = []
    for number in range(STEPS):
        booster.backward(loss(model, number), optimizer)
        rows.append(optimizer.clip(clip))
        optimizer.step()
        optimizer.zero_grad()
    return rows


def clamped(net, loss, optimizer=adamw):
    """The same steps of clipping by value in plain PyTorch."""
    made = optimizer(net)
    for number in range(STEPS):
        loss(net, number).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
        made.step()
        made.zero_grad()


def cross_entropy(model, step):
    inputs, targets = batch(step)
    return F.cross_entropy(model(inputs), targets)


def require_same(net, other):
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("does", "micros"), [("", 1), ("clip", 1), ("step", 1), ("step", 2)], ids=str
)
def test_memory_of_gradients(does, micros):
    """Of one gradient instead of all, if the optimizer steps in a backward pass of its own."""
    net = network()
    alive, most = [], [0]

    def count(parameter):
        storage = parameter.grad.untyped_storage()
        alive[:] = [each for each in alive if not each[1].expired()]
        if not any(key == storage._cdata for key, _, _ in alive):
            alive.append((storage._cdata, StorageWeakRef(storage), storage.nbytes()))
        most[0] = max(most[0], sum(size for _, _, size in alive))

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    booster = Booster(nonfinite="error")
    model, optimizer, *_ = booster.boost(net, adamw(net))
    mode = build("value", threshold=0.01)
    if does:
        optimizer.clip_in_backward(mode, step=does == "step")
    for number in range(STEPS):
        for micro in range(micros):
            with booster.no_sync(model) if micro < micros - 1 else nullcontext():
                booster.backward(cross_entropy(model, number), optimizer)
        optimizer.clip(mode)
        optimizer.step()
        optimizer.zero_grad()
    sizes = [parameter.numel() * 8 for parameter in net.parameters()]
    assert most[0] == (max(sizes) if does == "step" and micros == 1 else sum(sizes))


class Odd(nn.Module):
    """Gradients that share memory with each other, or with what the backward pass still needs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(3)
        )
        self.matrix = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))

    def forward(self, inputs):
        summed = torch.stack([self.first, self.second]).sum(0)
        viewed = self.matrix.view(-1) + self.third.sin().view(2, 3).reshape(-1)
        return (summed * inputs + viewed).square().sum()


def odd_loss(model, step):
    inputs = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return model(inputs)


@pytest.mark.parametrize("step", [True, False])
def test_gradients_that_share_memory(step):
    net, plain = Odd(), Odd()
    clamped(plain, odd_loss)
    train(net, odd_loss, step)
    require_same(net, plain)


def test_hooks_of_the_user_and_channels_last():
    """Those registered before boost see the gradient as it was accumulated."""

    def tripled(parameter):
        parameter.grad.mul_(3.0)

    def images():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
        net = net.to(memory_format=torch.channels_last)
        net[0].weight.register_post_accumulate_grad_hook(tripled)
        net[2].bias.register_hook(lambda gradient: -gradient)
        return net

    def loss(model, step):
        torch.manual_seed(step)
        return F.cross_entropy(model(torch.randn(2, 3, 4, 4)), torch.tensor([0, 2]))

    def fused(net):
        return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, fused=True)

    net, plain = images(), images()
    clamped(plain, loss, fused)
    train(net, loss, optimizer=fused)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["none", "value", "adaptive", "per_parameter"])
def test_metrics_that_stay_on_an_accelerator(mode):
    net, other = network(), network()
    read = train(net, cross_entropy, mode=mode)
    with kept_on_device():
        kept = train(other, cross_entropy, mode=mode)
    for one, two in zip(read, kept, strict=True):
        assert all(isinstance(number, torch.Tensor) for number in two.metrics[:2])
        assert tuple(map(float, two.metrics)) == pytest.approx(one.metrics, rel=1e-9, nan_ok=True)
    require_same(net, other)


def test_a_step_that_is_not_finite_changes_nothing():
    """Without steps in the backward pass it is skipped, and forgotten by the mode."""
    net = network()
    booster = Booster()
    model, optimizer, *_ = booster.boost(net, adamw(net))
    mode = build("adagc", threshold=1.05, warmup_steps=0)
    optimizer.clip_in_backward(mode)
    for number in range(STEPS):
        if number == 2:
            before = copy.deepcopy((net.state_dict(), mode.state_dict()))
        spoilt = math.nan if number == 2 else 1.0
        inputs, targets = batch(number)
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets) + net[0].weight.sum() * spoilt
        booster.backward(loss, optimizer)
        decision = optimizer.clip(mode)
        assert decision.finite == (number != 2)
        optimizer.step()
        assert optimizer.was_taken() == (number != 2)
        optimizer.zero_grad()
        if number == 2:
            assert str((net.state_dict(), mode.state_dict())) == str(before)


def test_an_error_names_what_is_not_finite_and_nothing_is_stepped_after_it():
    net = network()
    booster, model, optimizer, mode = boosted(net)
    before = copy.deepcopy(net.state_dict())
    inputs, targets = batch(0)
    loss = F.cross_entropy(model(inputs), targets) + net[2].weight.sum() * math.inf
    booster.backward(loss, optimizer)
    with pytest.raises(NonFiniteGradient, match=r"2\.weight"):
        optimizer.clip(mode)
    for name in ("0.weight", "0.bias", "2.weight"):
        assert torch.equal(net.state_dict()[name], before[name])


def test_a_second_backward_pass_is_refused():
    booster, model, optimizer, _ = boosted(network(), step=False)
    booster.backward(cross_entropy(model, 0), optimizer)
    with pytest.raises(StepOrderError, match=r"one backward pass outside of no_sync"):
        booster.backward(cross_entropy(model, 1), optimizer)


class Twice(nn.Module):
    """One layer in two checkpointed segments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, inputs, reentrant):
        hidden = inputs.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=reentrant)
        return hidden.square().sum()


def test_checkpointed_segments_that_share_a_layer():
    """Reentrant ones accumulate a gradient twice, so it is not final after the first time."""

    def loss(model, step, reentrant=False):
        return model(batch(step)[0], reentrant)

    net, plain = Twice(), Twice()
    clamped(plain, loss)
    train(net, loss)
    require_same(net, plain)
    booster, model, optimizer, _ = boosted(Twice())
    with pytest.raises(StepOrderError, match="use_reentrant=False"):
        booster.backward(loss(model, 0, reentrant=True), optimizer)


def test_hooks_of_an_optimizer_step_are_refused():
    booster, model, optimizer, _ = boosted(network())
    optimizer.unwrap().register_step_post_hook(lambda *_: None)
    with pytest.raises(StepOrderError, match="register_step_post_hook"):
        booster.backward(cross_entropy(model, 0), optimizer)


@pytest.mark.parametrize("kind", [Counting, torch.optim.LBFGS])
def test_optimizers_that_do_not_step_part_by_part_are_refused(kind):
    net = network()
    with pytest.raises(ValueError, match=f"{kind.__name__} (takes other steps|cannot step)"):
        boosted(net, optimizer=lambda net: kind(net.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "norm"}, "needs the whole gradient"),
        ({"nonfinite": "skip"}, "cannot be taken back"),
        ({"mixed_precision": "fp16"}, "overflow"),
        ({"skip": SkipRule()}, "spike"),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
def test_what_a_script_asks_for_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        boosted(network(), **options)


def test_other_modes_and_closures_are_refused():
    booster, model, optimizer, mode = boosted(network())
    with pytest.raises(ValueError, match="already"):
        optimizer.clip_in_backward(mode)
    booster.backward(cross_entropy(model, 0), optimizer)
    with pytest.raises(ValueError, match="the same mode"):
        optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_a_step_without_a_call_of_clip_is_clipped_too():
    net, plain = network(), network()
    clamped(plain, cross_entropy)
    booster, model, optimizer, _ = boosted(net, step=False)
    for number in range(STEPS):
        booster.backward(cross_entropy(model, number), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    require_same(net, plain)


class Tempered(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs * self.scale, targets)


@pytest.mark.parametrize("step", [True, False])
def test_parameters_of_a_criterion(step):
    def make():
        return nn.ModuleList([network(), Tempered()])

    def loss(parts, number):
        inputs, targets = batch(number)
        return parts[1](parts[0](inputs), targets)

    mine, plain = make(), make()
    clamped(plain, loss)
    booster = Booster(nonfinite="error")
    model, optimizer, *_ = booster.boost(mine[0], adamw(mine), mine[1])
    mode = build("value", threshold=0.01)
    optimizer.clip_in_backward(mode, step=step)
    for number in range(STEPS):
        booster.backward(loss([model, mine[1]], number), optimizer)
        optimizer.clip(mode)
        optimizer.step()
        optimizer.zero_grad()
    require_same(mine, plain)


def test_a_compiled_model():
    """Its gradients are final at once, so they are right, but all of them are there together."""
    net, plain = network(), network()
    clamped(plain, cross_entropy)
    train(torch.compile(net, backend="aot_eager"), cross_entropy)
    require_same(net, plain)
