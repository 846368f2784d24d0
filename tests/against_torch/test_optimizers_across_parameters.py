"""An optimizer that looks beyond single elements steps as in one process, or is refused."""

import random

import pytest
import torch
from timm.optim import AdamP, Lamb, Lars, Lion, NvNovoGrad
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, AdamW, Muon, Optimizer

from runner.booster import Booster
from runner.clip import build
from tests.against_torch.plain import PLUGINS, backward, batch, clip, mean_square, network, off
from tests.ranks import run_ranks


class GlobalRate(Optimizer):
    """Divides the learning rate by the norm of all gradients, as parameter-free methods do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in held) ** 0.5
        for p in held:
            p.sub_(p.grad * (self.param_groups[0]["lr"] / norm))


class NeedsModel(Optimizer):
    """Cannot be built from its options."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(0.01 * p.grad)


KINDS = {
    "adamw": lambda params: AdamW(params, lr=0.05, weight_decay=0.1),
    "lion": lambda params: Lion(params, lr=0.05),
    "adamp": lambda params: AdamP(params, lr=0.05, weight_decay=0.1),
    "lars": lambda params: Lars(params, lr=5.0, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda params: Adafactor(params, lr=0.05),
    "novograd": lambda params: NvNovoGrad(params, lr=0.05),
    "lamb": lambda params: Lamb(params, lr=0.05),
    "lamb_free": lambda params: Lamb(params, lr=0.05, max_grad_norm=None),
    "muon": lambda params: Muon(params, lr=0.05),
    "global": lambda params: GlobalRate(params, lr=0.1),
    "lbfgs": LBFGS,
}
STEPS = 4


def in_plain_pytorch(kind):
    model = network(bias=kind != "muon")
    optimizer = KINDS[kind](model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        mean_square(model(inputs), targets).backward()
        clip(model, 2.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(plugin, kind):
    """Weights on the first rank, or the message by which the optimizer is refused."""
    model = network(bias=kind != "muon")
    optimizer = KINDS[kind](model.parameters())
    booster = Booster(plugin=PLUGINS[plugin]())
    drawn = torch.get_rng_state(), random.getstate()
    try:
        model, optimizer, *_ = booster.boost(model, optimizer)
    except ValueError as error:
        return str(error)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    for step in range(STEPS):
        backward(booster, model, optimizer, step)
        if kind == "muon":  # as the plain side: its gradients would not be scaled
            optimizer.clip(build("norm", threshold=2.0, scales="all"))
        else:
            optimizer.clip_grad_by_norm(2.0)
        optimizer.step()
        optimizer.zero_grad()
    return booster.state_dict(model)


def train_all(plugins):
    asked = [(plugin, kind) for plugin in plugins for kind in KINDS]
    # LBFGS wants a closure, which a loop that clips cannot give.
    return {each: train(*each) for each in asked if each != ("ddp", "lbfgs")}


REFUSED = {
    "ddp": set(),
    "zero1": {"lamb", "global", "lbfgs"},
    "pipeline": {"lamb", "global", "lbfgs"},
    "fsdp": {"adafactor", "adamp", "novograd", "lbfgs"},
    "zero3": {"adafactor", "adamp", "novograd", "lbfgs"},
    "tensor": {"adafactor", "adamp", "novograd", "lbfgs"},
}


def test_steps_are_those_of_one_process_or_refused():
    wanted = {kind: in_plain_pytorch(kind) for kind in KINDS if kind != "lbfgs"}
    ranks = run_ranks(train_all, 2, list(REFUSED))
    found = {plugin: set() for plugin in REFUSED}
    for (plugin, kind), got in ranks[0].items():
        if isinstance(got, str):
            assert ranks[1][plugin, kind] == got
            found[plugin].add(kind)
        elif kind != "lbfgs":
            # Muon computes in bfloat16.
            rel = 2e-2 if kind == "muon" else 1e-9
            assert off(got, wanted[kind]) < rel, (plugin, kind, off(got, wanted[kind]))
    assert found == REFUSED
    said = ranks[0]
    assert said["zero1", "lamb"] == (
        "Lamb computes its steps from all parameters (max_grad_norm=None turns that off: clip by "
        "the booster instead), but under LowLevelZeroPlugin each rank steps only some of them: "
        "choose TorchDDPPlugin (plugin=ddp) or another optimizer"
    )
    assert said["pipeline", "global"].startswith("GlobalRate computes its steps from all parameter")
    assert said["fsdp", "adafactor"].startswith(
        "Adafactor cannot step the parameters that TorchFSDPPlugin shards over ranks (aten."
    )
    assert said["fsdp", "adafactor"].endswith(
        "choose LowLevelZeroPlugin(stage=1) (plugin=zero plugin.zero_stage=1) or TorchDDPPlugin "
        "(plugin=ddp), which step whole parameters, or another optimizer"
    )
    assert said["tensor", "adamp"].startswith("AdamP decides by the values of a whole parameter")
    assert said["tensor", "lbfgs"].startswith("LBFGS searches along a direction over all param")


class OwnShard(Optimizer):
    """Divides each gradient by the norm of what lies on this rank."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if isinstance(p, DTensor):
                p, gradient = p.to_local(), p.grad.to_local()
            else:
                gradient = p.grad
            p.sub_(0.1 * gradient / (gradient.norm() + 1e-9))


def refuse_own_shard():
    model = network()
    with pytest.raises(ValueError, match="OwnShard") as refused:
        Booster(plugin=PLUGINS["fsdp"]()).boost(model, OwnShard(model.parameters()))
    # A class that no trial can build is let through.
    other = network()
    Booster(plugin=PLUGINS["fsdp"]()).boost(other, NeedsModel(other))
    return str(refused.value)


def test_an_optimizer_that_normalizes_each_shard_is_refused():
    for said in run_ranks(refuse_own_shard, 2):
        assert said.startswith(
            "OwnShard takes other steps on the parameters that TorchFSDPPlugin shards over ranks "
            "than on whole ones (off by "
        )
