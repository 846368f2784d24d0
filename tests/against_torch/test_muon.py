"""Muon with AdamW under each clipping mode and plugin: the steps of plain PyTorch in one process.

By default mode ``norm`` leaves the matrices of Muon as they are, and compares λ with the norm of
all other gradients. Windows of two microbatches, in float64.
"""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch.optim import SGD, AdamW, Muon

from runner import apply_gradient_clipping
from runner.booster import Booster
from runner.clip import build
from runner.clip.head import head_weights
from runner.optim.muon import muon_with_adamw
from tests.against_torch.together import PLUGINS, _part, _pass, batches, is_matrix, models
from tests.distributed.by_hand import cross_entropy
from tests.on_device import kept_on_device
from tests.ranks import run_ranks

STEPS = 5
CASES = {
    "none": ("none", {}),
    "norm": ("norm", {"threshold": 0.05}),
    "norm, L1": ("norm", {"threshold": 1.0, "norm_type": 1.0}),
    "norm, L-inf": ("norm", {"threshold": 0.01, "norm_type": math.inf}),
    "norm of all": ("norm", {"threshold": 0.05, "scales": "all"}),
    "value": ("value", {"threshold": 0.005}),
    "adaptive": ("adaptive", {"threshold": 0.02}),
}
OVER_RANKS = ("none", "norm", "norm of all", "value", "adaptive")


def norm_of(gradients, p=2.0):
    return float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]), p))


def scaled_by_unit(weight, gradient, threshold):
    """Adaptive clipping of a matrix by its rows, and of a vector as a whole."""
    rows = (lambda t: t.norm(dim=1, keepdim=True)) if gradient.ndim > 1 else torch.norm
    limit = threshold * rows(weight).clamp(min=1e-3)
    return gradient * (limit / rows(gradient).clamp(min=1e-300)).clamp(max=1.0)


def clip_by_hand(named, mode, threshold=None, norm_type=2.0, scales="auto"):
    """Clip, and return the norm before and after; for ``norm`` also that of what is scaled."""
    gradients = {name: p.grad for name, p in named.items()}
    before, part = norm_of(gradients.values(), norm_type), None
    for name, gradient in gradients.items():
        if mode == "value":
            gradient.clamp_(-threshold, threshold)
        elif mode == "adaptive" and name != "head.weight":
            gradient.copy_(scaled_by_unit(named[name].detach(), gradient, threshold))
    if mode == "norm":
        scaled = [g for n, g in gradients.items() if scales == "all" or not is_matrix(n, g)]
        part = norm_of(scaled, norm_type)
        for gradient in scaled:
            gradient.mul_(min(1.0, threshold / part))
    return before, norm_of(gradients.values(), norm_type), part


def plain(case):
    mode, options = CASES[case]
    [model] = models("gpt")
    named = dict(model.named_parameters())
    muon = [p for name, p in named.items() if is_matrix(name, p)]
    rest = [p for name, p in named.items() if not is_matrix(name, p)]
    optimizers = [
        Muon(muon, lr=0.02, momentum=0.9, weight_decay=0.1),
        AdamW(rest, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, fused=False),
    ]
    rows, data = [], batches(STEPS)
    for first in range(0, len(data), 2):
        for inputs, targets in data[first : first + 2]:
            (cross_entropy(model(inputs), targets) / 2).backward()
        rows.append(clip_by_hand(named, mode, **options))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return rows, model.state_dict()


def boosted(plugin, case):
    mode, options = CASES[case]
    [model] = models("gpt")
    optimizers = muon_with_adamw(
        model,
        heads=head_weights(model),
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
        adamw_lr=0.01,
        adamw_betas=(0.8, 0.9),
        adamw_eps=1e-6,
        adamw_weight_decay=0.2,
    )
    booster = Booster(plugin=PLUGINS[plugin]() if plugin else None)
    model, optimizer, *_ = booster.boost(model, optimizers)
    clipping = build(mode, **options)
    clipping.bind(optimizer.layout)
    rows, data = [], batches(STEPS)
    for first in range(0, len(data), 2):
        window = [tuple(_part(t, booster) for t in pair) for pair in data[first : first + 2]]
        with booster.no_sync(model, optimizer):
            _pass(booster, [model], cross_entropy, optimizer, window[0])
        _pass(booster, [model], cross_entropy, optimizer, window[1])
        decision = optimizer.clip_and_step(clipping)
        rows.append((*map(float, decision.metrics), decision.norm_scaled))
        optimizer.zero_grad()
    return rows, booster.state_dict(model)


def all_of(plugins, exact):
    if exact:
        # Muon's own cast to bfloat16 rounds away what is compared here.
        torch.Tensor.bfloat16 = lambda tensor: tensor
    cases = CASES if plugins == [None] else OVER_RANKS
    return {(plugin, case): boosted(plugin, case) for plugin in plugins for case in cases}


def assert_plain(plugins, ranks):
    ordinary = torch.Tensor.bfloat16
    try:
        every = run_ranks(all_of, ranks, plugins, True) if ranks > 1 else [all_of(plugins, True)]
        torch.Tensor.bfloat16 = lambda tensor: tensor
        wanted = {case: plain(case) for case in CASES}
    finally:
        torch.Tensor.bfloat16 = ordinary
    for (plugin, case), (rows, weights) in every[0].items():
        expected, weights_wanted = wanted[case]
        for name, weight in weights_wanted.items():
            torch.testing.assert_close(
                weights[name], weight, rtol=0, atol=1e-12, msg=f"{plugin}, {case}: {name}"
            )
        for row, (before, after, part) in zip(rows, expected, strict=True):
            norm, norm_clipped, coef, clipped, _, stat, _, norm_scaled = row
            assert norm == pytest.approx(before, rel=1e-12), (plugin, case)
            assert norm_clipped == pytest.approx(after, rel=1e-12), (plugin, case)
            assert coef == pytest.approx(after / before, rel=1e-12)
            assert clipped == float(case != "none"), (plugin, case)
            if part is not None:
                assert stat == pytest.approx(part, rel=1e-12), (plugin, case)
            if case not in ("norm of all", "value", "adaptive"):
                assert norm_scaled == stat <= norm, (plugin, case)
        assert {repr(rank[plugin, case][0]) for rank in every} == {repr(rows)}, (plugin, case)


def test_one_process():
    assert_plain([None], 1)


def test_ddp_and_fsdp():
    assert_plain(["ddp", "fsdp"], 2)


@pytest.mark.parametrize("plugin", ["zero1", "zero2", "zero3", "tensor", "1f1b"])
@pytest.mark.product(every=2)
def test_other_plugins(plugin):
    assert_plain([plugin], 2)


@pytest.mark.parametrize("plugin", ["hsdp", "tensor_dp", "hybrid", "hybrid_zero1"])
@pytest.mark.slow
def test_four_ranks(plugin):
    assert_plain([plugin], 4)


def test_clipping_a_boosted_model_by_one_call_leaves_muon_out_too():
    torch.manual_seed(0)
    [model] = models("gpt")
    booster = Booster()
    wrapped, optimizer, *_ = booster.boost(
        model, muon_with_adamw(model, heads=head_weights(model), lr=0.02)
    )
    inputs, targets = batches(1)[0]
    for given in (wrapped, model, list(model.parameters())):
        booster.backward(cross_entropy(wrapped(inputs), targets), optimizer)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        decision = apply_gradient_clipping(given, "norm", 0.05)
        part = norm_of([g for name, g in before.items() if not is_matrix(name, g)])
        for name, parameter in model.named_parameters():
            factor = 1.0 if is_matrix(name, parameter) else 0.05 / part
            torch.testing.assert_close(
                parameter.grad, before[name] * factor, rtol=1e-12, atol=0, msg=name
            )
        assert decision.norm == pytest.approx(norm_of(before.values()), rel=1e-12)
        assert decision.norm_scaled == pytest.approx(part, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()


def muon_and_sgd(model, fused):
    """SGD shows a wrong factor, which AdamW would hide."""
    named = dict(model.named_parameters())
    return [
        Muon([p for name, p in named.items() if is_matrix(name, p)], lr=0.02),
        SGD([p for n, p in named.items() if not is_matrix(n, p)], lr=0.5, fused=fused),
    ]


def plain_sgd():
    [model] = models("gpt")
    named = dict(model.named_parameters())
    optimizers = muon_and_sgd(model, False)
    for inputs, targets in batches(STEPS)[:STEPS]:
        cross_entropy(model(inputs), targets).backward()
        clip_by_hand(named, "norm", 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def folded(plugins):
    """Weights of float32 trainings whose fused steps clip, on the host and on an accelerator."""
    torch.Tensor.bfloat16 = lambda tensor: tensor
    found = {}
    for plugin, on_device in product(plugins, (False, True)):
        [model] = models("gpt")
        booster = Booster(plugin=PLUGINS[plugin]() if plugin else None)
        model, optimizer, *_ = booster.boost(model.float(), muon_and_sgd(model, True))
        with kept_on_device() if on_device else nullcontext():
            for pair in batches(STEPS)[:STEPS]:
                inputs, targets = (_part(t, booster) for t in pair)
                booster.backward(cross_entropy(model(inputs), targets), optimizer)
                decision = optimizer.clip_and_step(build("norm", threshold=0.1))
                assert float(decision.factor) < 1
                assert optimizer.was_taken()
                optimizer.zero_grad()
        found[plugin, on_device] = booster.state_dict(model)
    return found


def test_fused_steps_of_ranks_clip_what_they_may():
    ordinary = torch.Tensor.bfloat16
    try:
        first, *_ = run_ranks(folded, 2, ["ddp", "zero1"])
        first |= folded([None])
        wanted = plain_sgd()
    finally:
        torch.Tensor.bfloat16 = ordinary
    assert len(first) == 6
    for (plugin, on_device), weights in first.items():
        for name, weight in wanted.items():
            torch.testing.assert_close(
                weights[name].double(),
                weight,
                rtol=1e-4,
                atol=1e-4,
                msg=f"{plugin}, {on_device}: {name}",
            )
