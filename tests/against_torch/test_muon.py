"""Fused steps beside Muon clip all gradients but those of its matrices."""

from contextlib import nullcontext
from itertools import product

import torch
from torch.optim import SGD, Muon

from runner.booster import Booster
from runner.clip import build
from tests.against_torch.plain import PLUGINS, backward, batch, mean_square, network
from tests.on_device import kept_on_device
from tests.ranks import run_ranks

MATRICES = ("0.weight", "2.weight")


def norm_of(gradients):
    return float(torch.cat([g.flatten() for g in gradients]).norm())


def muon_and_sgd(model, fused):
    """SGD shows a wrong factor, which AdamW would hide."""
    named = dict(model.named_parameters())
    rest = [p for name, p in named.items() if name not in MATRICES]
    return [Muon([named[n] for n in MATRICES], lr=0.02), SGD(rest, lr=0.5, fused=fused)]


def folded(plugins):
    """Weights of float32 trainings whose fused steps clip, on the host and on an accelerator."""
    torch.Tensor.bfloat16 = lambda tensor: tensor  # Muon's own cast would hide differences.
    found = {}
    for plugin, on_device in product(plugins, (False, True)):
        model = network().float()
        booster = Booster(plugin=PLUGINS[plugin]())
        model, optimizer, *_ = booster.boost(model, muon_and_sgd(model, True))
        with kept_on_device() if on_device else nullcontext():
            for step in range(4):
                backward(booster, model, optimizer, step, torch.float32)
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
        first |= folded(["single"])
        model = network()
        optimizers = muon_and_sgd(model, False)
        for step in range(4):
            mean_square(model(batch(step)[0]), batch(step)[1]).backward()
            rest = [p.grad for n, p in model.named_parameters() if n not in MATRICES]
            torch._foreach_mul_(rest, min(1.0, 0.1 / norm_of(rest)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.Tensor.bfloat16 = ordinary
    assert len(first) == 6
    for weights in first.values():
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name].double(), weight, rtol=1e-4, atol=1e-4)
