"""Compiled, sparse and channels-last models, and averages of weights, under every plugin."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runner.booster import Booster
from runner.booster.plugin import HybridParallelPlugin
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
    return model.state_dict()


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.out(self.convolution(inputs.view(-1, 2, 2, 1)).mean((2, 3)))


class Ran:
    """A backend of torch.compile that counts the graphs that ran."""

    times = 0

    def __call__(self, graph, example):
        def run(*args):
            self.times += 1
            return graph.forward(*args)

        return run


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
    return booster, boosted, optimizer.layout.names


def compiled(plugin):
    """Weights of a model compiled as a whole, and of one with a compiled layer."""
    for whole in (True, False):
        torch._dynamo.reset()
        ran, given = Ran(), network()
        if whole:
            given = torch.compile(given, backend=ran)
        else:
            given[2] = torch.compile(given[2], backend=ran)
        booster, boosted, names = train(PLUGINS[plugin](), given)
        assert names == list(network().state_dict())
        # torch runs a module with the hooks of fully_shard uncompiled; blocks inside are compiled.
        assert ran.times >= STEPS or (plugin == "fsdp" and whole)
        yield booster.state_dict(boosted)


def channels_last(plugin):
    model = Convolution().double().to(memory_format=torch.channels_last)
    split = HybridParallelPlugin(tp_size=2, tp_plan={"out": "colwise_rep"})
    logging.disable()
    booster, boosted, _ = train(split if plugin == "tensor" else PLUGINS[plugin](), model)
    logging.disable(logging.NOTSET)
    return booster.state_dict(boosted)


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

    _, boosted, _ = train(booster.plugin, net, update)
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
    return [([*compiled(each)], channels_last(each), average_of(each)) for each in plugins]


def test_odd_models_train_as_in_one_process():
    """And sparse gradients are refused where ranks add them up."""
    plugins, plain = ["ddp", "fsdp", "zero1", "tensor"], network()
    ranks = run_ranks(everything, 2, plugins)
    average = averaged(plain)
    weights = in_plain_pytorch(plain, average)
    convolution = in_plain_pytorch(Convolution().double())
    for number, plugin in enumerate(plugins):
        (whole, layer), convolved, (mean, _) = ranks[0][number]
        assert off(whole, weights) < 1e-9, plugin
        assert off(layer, weights) < 1e-9, plugin
        assert off(convolved, convolution) < 1e-9, plugin
        assert off(mean, average.module.state_dict()) < 1e-9, plugin
        outputs = [rank[number][2][1] for rank in ranks]
        got = outputs[0] if plugin == "tensor" else torch.cat(outputs)
        torch.testing.assert_close(got, average(batch(0)[0]).detach(), rtol=1e-9, atol=1e-9)


# torch's tracer asks for the .grad of a hidden tensor, and is warned by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_runs_compiled_in_one_process():
    weights = in_plain_pytorch(network())
    for found in compiled("single"):
        assert off(found, weights) < 1e-12
