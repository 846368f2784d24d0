"""Averages of weights, and models with sparse gradients, under every plugin."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runner.booster import Booster
from tests.against_torch.plain import (
    PLUGINS,
    backward,
    batch,
    clip,
    mean_square,
    network,
    off,
    part,
)
from tests.clip.reference import refused
from tests.ranks import run_ranks

STEPS = 3


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def in_plain_pytorch(model, average=None):
    optimizer = adamw(model)
    for step in range(STEPS):
        inputs, targets = batch(step)
        mean_square(model(inputs), targets).backward()
        clip(model, 2.0)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def train(plugin, model, average=None):
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    for step in range(STEPS):
        backward(booster, boosted, optimizer, step)
        optimizer.clip_grad_by_norm(2.0)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average(booster, boosted)
    return boosted


def average_of(plugin):
    """The averaged weights, and what the average computes."""
    made = []
    booster, net = Booster(plugin=PLUGINS[plugin]()), network()
    if plugin == "fsdp":  # The copy is made, and sharded, before the model is.
        copied, *_ = booster.boost(averaged(net))

    def update(booster, boosted):
        if plugin == "fsdp":
            copied.unwrap().update_parameters(boosted.unwrap())
        else:
            made[:] = made or [averaged(boosted)]
            made[0].update_parameters(boosted)

    boosted = train(booster.plugin, net, update)
    if plugin == "fsdp":
        refused(TypeError, "AveragedModel|update_parameters", lambda: copy.deepcopy(boosted))
        average = copied
        weights = booster.state_dict(copied)
        weights = {n.removeprefix("module."): t for n, t in weights.items() if n != "n_averaged"}
    else:
        [average] = made
        assert average.module.optimizer is None
        weights = booster.state_dict(average.module)
    outputs = average(part(booster.plugin, batch(0)[0]))
    # A state of plain PyTorch goes back into the model.
    booster.load_state_dict(boosted, weights)
    again = booster.state_dict(boosted)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    return weights, outputs.detach()


def everything(plugins):
    for plugin in plugins[1:]:
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
        boost = Booster(plugin=PLUGINS[plugin]()).boost
        words = "0 has sparse gradients|sparse=False"
        refused(ValueError, words, lambda b=boost, m=model: b(m, adamw(m)))
    return [average_of(each) for each in plugins]


def test_averages_are_those_of_one_process():
    """And sparse gradients are refused where ranks add them up."""
    plugins, plain = ["ddp", "fsdp", "zero1", "tensor"], network()
    ranks = run_ranks(everything, 2, plugins)
    average = averaged(plain)
    in_plain_pytorch(plain, average)
    for number, plugin in enumerate(plugins):
        assert off(ranks[0][number][0], average.module.state_dict()) < 1e-9, plugin
        outputs = [rank[number][1] for rank in ranks]
        got = outputs[0] if plugin == "tensor" else torch.cat(outputs)
        torch.testing.assert_close(got, average(batch(0)[0]).detach(), rtol=1e-9, atol=1e-9)
