"""Muon beside other optimizers in one step: what is multiplied, and what goes wrong otherwise."""

import copy
import math
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon

from runner import GradientClipping, Trainer
from runner.booster import Booster, SinglePlugin
from runner.clip import build
from runner.clip import mode as modes
from runner.optim.muon import muon_with_adamw
from tests.on_device import kept_on_device


class Net(nn.Module):
    def __init__(self, width=8, dtype=torch.float32):
        super().__init__()
        self.into = nn.Linear(4, width, dtype=dtype)
        self.hidden = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, 3, dtype=dtype)

    def forward(self, inputs):
        return self.head(self.hidden(self.into(inputs).tanh()).tanh())


HEADS = ("head.weight",)
MATRICES = ("into.weight", "hidden.weight")


def network(**given):
    torch.manual_seed(1)
    return Net(**given)


def batches(steps, dtype=torch.float32):
    drawn = torch.Generator().manual_seed(7)
    for step in range(steps):
        scale = 30.0 if step % 3 else 0.01  # clipped or not
        yield scale * torch.randn(6, 4, generator=drawn).to(dtype)


def loss_of(model, inputs):
    return (model(inputs) - inputs[:, :3]).square().mean()


def norm_of(gradients):
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients))


def by_hand(model, threshold, steps, scales="auto"):
    """Plain PyTorch: clipped gradients of each step, before it is taken."""
    named = dict(model.named_parameters())
    rest = [p for name, p in named.items() if name not in MATRICES]
    optimizers = [
        Muon([named[name] for name in MATRICES], lr=0.02),
        AdamW(rest, lr=0.01, foreach=False),
    ]
    clipped = []
    for inputs in batches(steps):
        loss_of(model, inputs).backward()
        scaled = [p.grad for p in (named.values() if scales == "all" else rest)]
        norm = norm_of(scaled)
        for gradient in scaled:
            gradient.mul_(min(1.0, threshold / norm))
        clipped.append({name: p.grad.clone() for name, p in named.items()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return clipped


def refuse(*_):
    raise AssertionError("gradients were multiplied by themselves")


def boosted(model, fused=True):
    booster = Booster()
    optimizers = muon_with_adamw(model, heads=HEADS, lr=0.02, adamw_lr=0.01, fused=fused)
    wrapped, optimizer, *_ = booster.boost(model, optimizers)
    return booster, wrapped, optimizer


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scales", ["auto", "all"])
def test_a_fused_step_multiplies_what_it_may(scales, fused, on_device):
    model, other = network(), network()
    threshold, steps = 0.5, 12
    wanted = by_hand(other, threshold, steps, scales)
    booster, wrapped, optimizer = boosted(model, fused)
    mode = build("norm", threshold=threshold, scales=scales)
    folds = fused and scales == "auto"  # with "all" the matrices have to be multiplied as well
    clipped = 0.0
    for inputs, gradients in zip(batches(steps), wanted, strict=True):
        booster.backward(loss_of(wrapped, inputs), optimizer)
        refused = patch.object(modes, "scale", refuse) if folds else nullcontext()
        with kept_on_device() if on_device else nullcontext(), refused:
            decision = optimizer.clip_and_step(mode)
        clipped += float(decision.clipped)
        assert optimizer.was_taken()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
        optimizer.zero_grad()
    assert 3 <= clipped <= steps - 3
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_clipped_gradients_are_there_before_a_hook_runs():
    model = network()
    booster, wrapped, optimizer = boosted(model)
    seen = {}
    optimizer.optimizers[1].register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in model.named_parameters()})
    )
    booster.backward(30 * loss_of(wrapped, torch.ones(2, 4)), optimizer)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.clip_and_step(build("norm", threshold=0.1))
    rest = [gradient for name, gradient in seen.items() if name not in MATRICES]
    assert norm_of(rest) == pytest.approx(0.1, rel=1e-5)
    for name in MATRICES:
        assert torch.equal(seen[name], before[name])


class MuonWithAuxAdam(SGD):
    """An optimizer that steps marked groups by Muon and others by something else."""


def test_one_optimizer_with_groups_of_both_kinds():
    model = network()
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in MATRICES], "use_muon": True},
        {"params": [p for name, p in named.items() if name not in MATRICES], "use_muon": False},
    ]
    booster = Booster()
    wrapped, optimizer, *_ = booster.boost(model, MuonWithAuxAdam(groups, lr=0.1, fused=True))
    booster.backward(30 * loss_of(wrapped, torch.ones(2, 4)), optimizer)
    before = {name: p.grad.clone() for name, p in named.items()}
    optimizer.clip_and_step(build("norm", threshold=0.1))
    rest = norm_of([g for name, g in before.items() if name not in MATRICES])
    for name, parameter in named.items():
        factor = 1.0 if name in MATRICES else 0.1 / rest
        torch.testing.assert_close(parameter.grad, before[name] * factor, rtol=1e-5, atol=0)


def test_a_fused_optimizer_that_is_left_out_multiplies_nothing():
    class OwnMuon(SGD):
        pass

    model = network()
    named = dict(model.named_parameters())
    rest = [p for name, p in named.items() if name not in MATRICES]
    optimizers = [
        OwnMuon([named[name] for name in MATRICES], lr=0.1, fused=True),
        SGD(rest, lr=0.1, fused=True),
    ]
    booster = Booster()
    wrapped, optimizer, *_ = booster.boost(model, optimizers)
    [inputs] = batches(1)
    booster.backward(30 * loss_of(wrapped, inputs), optimizer)
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in named.items()}
    norm = norm_of([p.grad for p in rest])
    with patch.object(modes, "scale", refuse):
        optimizer.clip_and_step(build("norm", threshold=0.1))
    for name, (weight, gradient) in before.items():
        wanted = gradient * (1.0 if name in MATRICES else 0.1 / norm)
        torch.testing.assert_close(named[name].grad, wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(named[name], weight - 0.1 * wanted, rtol=1e-5, atol=1e-6)


def test_the_limit_of_a_plugin_leaves_muon_out_too():
    model = network()
    plugin = SinglePlugin()
    plugin.max_norm = 0.1
    booster = Booster(plugin=plugin)
    wrapped, optimizer, *_ = booster.boost(
        model, muon_with_adamw(model, heads=HEADS, lr=0.02, adamw_lr=0.01)
    )
    booster.backward(30 * loss_of(wrapped, torch.ones(2, 4)), optimizer)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    rest = [p.grad for name, p in model.named_parameters() if name not in MATRICES]
    assert norm_of(rest) == pytest.approx(0.1, rel=1e-5)
    for name in MATRICES:
        assert torch.equal(model.get_parameter(name).grad, before[name])


@pytest.mark.parametrize("scales", ["auto", "all"])
def test_the_trainer_clips_by_the_same_rule(scales):
    model, other = network(), network()
    data = [(inputs, inputs[:, :3]) for inputs in batches(4)]
    optimizers = muon_with_adamw(model, heads=HEADS, lr=0.02, adamw_lr=0.01)
    rows = []
    Trainer(
        model,
        data,
        "4ba",
        [GradientClipping("norm", 0.5, scales=scales)],
        optimizers=optimizers,
        criterion=nn.MSELoss(),
        callbacks=[Recorded(rows)],
    ).fit()
    wanted = by_hand(other, 0.5, 4, scales)
    for decision, gradients in zip(rows, wanted, strict=True):
        assert decision.norm_clipped == pytest.approx(norm_of(gradients.values()), rel=1e-4)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


class Recorded:
    def __init__(self, rows):
        self.rows = rows

    def on_step(self, trainer, metrics):
        self.rows.append(metrics.decision)


# What others report, by a clipping that knows nothing of Muon.


class Unbalanced(nn.Module):
    """A hidden matrix that learns, beside a vector whose gradient is 5e7 times the threshold."""

    def __init__(self, width=16):
        super().__init__()
        self.hidden = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.zeros(1))
        nn.init.orthogonal_(self.hidden.weight)

    def loss(self, inputs, targets):
        return 1e-3 * (self.hidden(inputs) - targets).square().mean() + 5e7 * self.gain.sum()


def unbalanced(clip, steps=60):
    """Train by Muon and AdamW; return the updates of the matrix, and the loss of its part."""
    torch.manual_seed(0)
    model = Unbalanced()
    inputs = torch.randn(64, 16)
    targets = inputs @ torch.linalg.qr(torch.randn(16, 16))[0]
    booster = Booster()
    optimizers = [
        Muon([model.hidden.weight], lr=0.02, weight_decay=0.0),
        AdamW([model.gain], lr=1e-3, weight_decay=0.0),
    ]
    _, optimizer, *_ = booster.boost(model, optimizers)
    updates, errors = [], []
    for _ in range(steps):
        booster.backward(model.loss(inputs, targets), optimizer)
        before = model.hidden.weight.detach().clone()
        clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        updates.append((model.hidden.weight.detach() - before).norm().item())
        with torch.no_grad():
            errors.append((model.hidden(inputs) - targets).square().mean().item())
    return updates, errors


def test_a_global_coefficient_freezes_matrices_and_ours_does_not():
    """As reported of Megatron-LM: 2e-8 pushes the input of Muon below its 1e-7."""

    def naive(model, optimizer):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert 1.0 / norm.item() == pytest.approx(2e-8, rel=1e-3)

    def ours(model, optimizer):
        decision = optimizer.clip(build("norm", threshold=1.0))
        assert decision.factor == pytest.approx(2e-8, rel=1e-3)
        assert decision.norm == pytest.approx(5e7, rel=1e-6)

    def all_of_them(model, optimizer):
        optimizer.clip(build("norm", threshold=1.0, scales="all"))

    free, free_errors = unbalanced(lambda model, optimizer: None)
    frozen, frozen_errors = unbalanced(naive)
    kept, kept_errors = unbalanced(ours)
    assert max(frozen) < 0.05 * min(free)
    assert frozen_errors[-1] > 0.9 * frozen_errors[0]
    assert free_errors[-1] < 0.2 * free_errors[0]
    assert (kept, kept_errors) == (free, free_errors)  # the same bits
    told, _ = unbalanced(all_of_them)
    assert max(told) < 0.05 * min(free)


def test_large_matrices_do_not_stall_adamw():
    """Compared with λ is the norm of what is multiplied: a matrix cannot shrink other gradients."""
    steps, sizes = 5, {}
    for scale in (1.0, 1e9):
        model = network(dtype=torch.float64)
        start = copy.deepcopy(model.state_dict())
        booster, wrapped, optimizer = boosted(model, None)
        for inputs in batches(steps, torch.float64):
            booster.backward(loss_of(wrapped, inputs), optimizer)
            for name in MATRICES:
                model.get_parameter(name).grad.mul_(scale)
            optimizer.clip(build("norm", threshold=0.5))
            for name in MATRICES:  # Muon does not see the difference; the test of AdamW stays clean
                model.get_parameter(name).grad.div_(scale)
            optimizer.step()
            optimizer.zero_grad()
        sizes[scale] = {name: w - start[name] for name, w in model.state_dict().items()}
    for name, update in sizes[1.0].items():
        torch.testing.assert_close(sizes[1e9][name], update, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_clipped_update_shrinks_with_width_and_ours_does_not(width):
    """As reported of DeepSpeed: the update that Muon makes is clipped by the default of 1.0."""
    torch.manual_seed(0)
    rate, gradient = 0.1, torch.randn(width, width)

    def muon(weight):
        return Muon([weight], lr=rate, weight_decay=0.0)

    # Naive: the gradient is replaced by the orthogonalized update, and then clipped.
    weight = nn.Parameter(torch.zeros(width, width))
    weight.grad = gradient.clone()
    muon(weight).step()
    update = -weight.detach() / rate
    weight.grad = update.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0).item()
    shrunk = norm / weight.grad.norm().item()
    assert shrunk == pytest.approx(norm, rel=1e-4)
    assert 0.6 * math.sqrt(width) < shrunk < 1.2 * math.sqrt(width)  # 4, 8, 16 times

    model = nn.Linear(width, width, bias=False)
    nn.init.zeros_(model.weight)
    booster = Booster()
    _, optimizer, *_ = booster.boost(model, muon(model.weight))
    model.weight.grad = gradient.clone()
    optimizer.clip_and_step(build("norm", threshold=1.0))
    torch.testing.assert_close(-model.weight.detach() / rate, update, rtol=0, atol=0)
