"""Clipping in the backward pass, and stepping there, equals clipping after it; what is refused."""

import copy
import gc
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from runner.booster import Booster
from runner.booster.step_order import StepOrderError
from runner.clip import SkipRule, build
from tests.clip.reference import on, refused

STEPS = 4
MODES = {
    "none": (None, {}),
    "value": (0.01, {}),
    "adaptive": (0.02, {"exclude": ["*bias"]}),
    "per_parameter": (0.05, {}),
    "adagc": (1.02, {"warmup_steps": 2, "absolute": 0.2, "beta": 0.9}),
    "update": (0.9, {}),
}
"""Threshold and options of each mode that decides tensor by tensor."""


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
    model, wrapped, *_ = booster.boost(net, optimizer(net))
    threshold, more = MODES.get(mode, (0.01, {}))
    clip = build(mode, threshold=threshold, **more)
    if step is None:  # as a reference: after the backward pass
        wrapped.bind(clip)
    else:
        wrapped.clip_in_backward(clip, step=step)
    return booster, model, wrapped, clip


def cross_entropy(model, step):
    inputs, targets = batch(step)
    return F.cross_entropy(model(inputs), targets)


def train(net, loss=cross_entropy, clips=True, micros=1, **options):
    """Return what was decided, and the history of the mode."""
    booster, model, optimizer, mode = boosted(net, **options)
    rows = []
    for number in range(STEPS):
        for micro in range(micros):
            with booster.no_sync(model) if micro < micros - 1 else nullcontext():
                booster.backward(loss(model, number + micro), optimizer)
        rows += [optimizer.clip(mode)] if clips else []
        optimizer.step()
        optimizer.zero_grad()
    return rows, str(mode.state_dict())


@pytest.mark.parametrize(
    ("does", "micros"), [("", 1), ("clip", 1), ("step", 1), ("step", 2)], ids=str
)
def test_memory_of_gradients(does, micros):
    """Of one gradient instead of all, if the optimizer steps in a backward pass of its own."""
    net = network()
    alive = []
    largest = [0]

    def count(parameter):
        storage = parameter.grad.untyped_storage()
        alive[:] = [entry for entry in alive if not entry[1].expired()]
        if not any(key == storage._cdata for key, _, _ in alive):
            alive.append((storage._cdata, StorageWeakRef(storage), storage.nbytes()))
        largest[0] = max(largest[0], sum(size for _, _, size in alive))

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    train(net, micros=micros, step={"": None, "clip": False, "step": True}[does])
    sizes = [parameter.numel() * 8 for parameter in net.parameters()]
    assert largest[0] == (max(sizes) if does == "step" and micros == 1 else sum(sizes))


class Odd(nn.Module):
    """Gradients that share memory with each other, or with what the backward pass still needs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(3)
        )
        self.matrix = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, inputs):
        summed = torch.stack([self.first, self.second]).sum(0)
        viewed = self.matrix.view(-1) + self.third.sin().view(2, 2).reshape(-1)
        return summed * inputs + viewed


class Twice(nn.Module):
    """One layer in two checkpointed segments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, inputs, reentrant=False):
        hidden = inputs.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=reentrant)
        return hidden


def assert_same(net, other, rtol=1e-12):
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("make", [Odd, Twice, network])
def test_steps_are_those_of_plain_pytorch(make, step):
    """By value; without a call of clip too."""

    def loss(model, number):
        return model(batch(number)[0]).square().sum()

    net = make()
    plain = make()
    plain_optimizer = adamw(plain)
    for number in range(STEPS):
        loss(plain, number).backward()
        for parameter in plain.parameters():
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    train(net, loss, step=step, clips=make is not network)
    assert_same(net, plain)


class Uneven(nn.Module):
    """A tied weight, a vector used twice, a frozen and an unused layer, and a hook of a user."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.never, self.frozen = (nn.Linear(4, 4).double() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.last = nn.Linear(4, 4).double()
        self.last.weight = self.first.weight
        self.first.weight.register_hook(lambda gradient: gradient * 2.0)
        self.frozen.requires_grad_(False)

    def forward(self, inputs):
        hidden = self.first(inputs).tanh() * self.scale
        return self.last((hidden + self.frozen(hidden)) * self.scale)


def two(net):
    first, *later = [p for p in net.parameters() if p.requires_grad]
    return [
        torch.optim.AdamW([first], lr=0.02, weight_decay=0.3, fused=True),
        torch.optim.Adam(later, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    ]


@pytest.mark.parametrize(
    ("step", "micros", "kept"), [(True, 1, False), (False, 2, False), (True, 1, True)]
)
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_of_clipping_after_the_backward_pass(mode, step, micros, kept):
    step = step or mode == "update"
    net = Uneven()
    reference = Uneven()
    options = {"mode": mode, "optimizer": two, "micros": micros}
    with on(kept):
        rows, history = train(net, step=step, **options)
    expected, expected_history = train(reference, step=None, **options)
    for record, row in zip(rows, expected, strict=True):
        metrics = tuple(map(float, record.metrics))
        expected_metrics = tuple(map(float, row.metrics))
        assert metrics == pytest.approx(expected_metrics, rel=1e-9, nan_ok=True)
    assert any(row.fraction for row in expected) == (mode != "none")
    assert mode == "adagc" or history == expected_history
    assert_same(net, reference, 1e-8)


def test_a_step_that_is_not_finite_changes_nothing():
    """Without steps in the backward pass it is skipped, and forgotten by the mode."""
    net = network()
    booster = Booster()
    model, optimizer, *_ = booster.boost(net, adamw(net))
    mode = build("adagc", threshold=1.05, warmup_steps=0)
    optimizer.clip_in_backward(mode)
    for number in range(STEPS):
        before = str(copy.deepcopy((net.state_dict(), mode.state_dict())))
        spoilt = math.nan if number == 2 else 1.0
        loss = cross_entropy(model, number) + net[0].weight.sum() * spoilt
        booster.backward(loss, optimizer)
        assert optimizer.clip(mode).finite == (number != 2)
        optimizer.step()
        assert optimizer.was_taken() == (number != 2)
        optimizer.zero_grad()
        assert (str((net.state_dict(), mode.state_dict())) == before) == (number == 2)


def test_what_goes_wrong_in_a_backward_pass_is_refused():
    booster, model, optimizer, mode = boosted(network(), step=False)
    booster.backward(cross_entropy(model, 0), optimizer)
    again = cross_entropy(model, 1)
    words = "one backward pass outside of no_sync"
    refused(StepOrderError, words, booster.backward, again, optimizer)
    refused(ValueError, "already", optimizer.clip_in_backward, mode)
    refused(ValueError, "the same mode", optimizer.clip_grad_by_norm, 1.0)
    booster, model, optimizer, _ = boosted(Twice())
    # Reentrant segments accumulate a gradient twice, so it is not final after the first time.
    loss = model(batch(0)[0], True).sum()
    refused(StepOrderError, "use_reentrant=False", booster.backward, loss, optimizer)


def test_what_a_script_asks_for_is_refused_with_the_reason():
    for options, words in (
        ({"mode": "norm"}, "needs the whole gradient"),
        ({"nonfinite": "skip"}, "cannot be taken back"),
        ({"skip": SkipRule()}, "spike"),
        ({"optimizer": lambda net: torch.optim.LBFGS(net.parameters())}, "LBFGS cannot step"),
    ):
        refused(ValueError, words, boosted, network(), **options)


def test_a_wrapper_that_is_gone_clips_nothing_more():
    net = network()
    wrapper = boosted(net, step=False)
    gc.disable()  # no cycle keeps it
    try:
        del wrapper
        cross_entropy(net, 0).backward()
    finally:
        gc.enable()
    assert max(float(p.grad.abs().max()) for p in net.parameters()) > 0.011
