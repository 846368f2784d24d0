"""Muon beside other optimizers in one step: what is multiplied, and what goes wrong otherwise."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from runner.booster import Booster, SinglePlugin
from runner.clip import build
from runner.optim.muon import muon_with_adamw
from tests.clip.reference import norm_of

MATRICES = ("into.weight", "hidden.weight")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.into, self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.hidden(self.into(inputs).tanh()).tanh())


def loss_of(model, inputs):
    return (model(inputs) - inputs[:, :3]).square().mean()


def parts(model):
    """The matrices, and all other parameters."""
    named = dict(model.named_parameters())
    return [named[n] for n in MATRICES], [p for n, p in named.items() if n not in MATRICES]


def adamw_and_muon(model):
    return muon_with_adamw(model, heads=("head.weight",), lr=0.02, adamw_lr=0.01, fused=True)


class MuonWithAuxAdam(SGD):
    """An optimizer that steps marked groups by Muon and others by something else."""


class OwnMuon(SGD):
    pass


def marked(model):
    matrices, rest = parts(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return MuonWithAuxAdam(groups, lr=0.1, fused=True)


def several(model):
    matrices, rest = parts(model)
    return [OwnMuon(matrices, lr=0.1, fused=True), SGD(rest, lr=0.1, fused=True)]


@pytest.mark.parametrize("make", [marked, several, adamw_and_muon])
@pytest.mark.parametrize("way", ["mode", "plugin", "hook"])
def test_matrices_are_left_out_in_whatever_way_muon_is_known(make, way):
    """Also by the limit of a plugin, and before a hook of the other optimizer runs."""
    model, plugin, seen = Net(), SinglePlugin(), {}
    plugin.max_norm = 0.1 if way == "plugin" else 0.0
    booster = Booster(plugin=plugin)
    wrapped, optimizer, *_ = booster.boost(model, make(model))
    if way == "hook":
        optimizer.optimizers[-1].register_step_pre_hook(
            lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters()})
        )
    booster.backward(30 * loss_of(wrapped, torch.ones(2, 4)), optimizer)
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
    norm = norm_of([p.grad for p in parts(model)[1]])
    if way == "plugin":
        optimizer.step()
    else:
        optimizer.clip_and_step(build("norm", threshold=0.1))
    for name, parameter in model.named_parameters():
        weight, gradient = before[name]
        wanted = gradient * (1.0 if name in MATRICES else 0.1 / norm)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=0)
        if seen:
            torch.testing.assert_close(seen[name], wanted, rtol=1e-5, atol=0)
        if make is several:
            torch.testing.assert_close(parameter, weight - 0.1 * wanted, rtol=1e-5, atol=1e-6)
