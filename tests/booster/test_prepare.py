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
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.out = nn.Linear(4, 3)

    def forward(self, inputs):
        hidden = self.convolution(inputs.view(-1, 2, 2, 1)).mean((2, 3))
        return self.out(hidden)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.out = nn.Linear(4, 3)


class Ran:
    """A backend of torch.compile that counts the graphs that ran."""

    def __init__(self):
        self.times = 0

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
    results = []
    for whole in (True, False):
        torch._dynamo.reset()
        ran, model = Ran(), network()
        if whole:
            given = torch.compile(model, backend=ran)
        else:
            given = model
            given[2] = torch.compile(given[2], backend=ran)
        booster, boosted, names = train(PLUGINS[plugin](), given)
        assert names == list(network().state_dict())
        # torch runs a module with the hooks of fully_shard uncompiled; blocks inside are compiled.
        assert ran.times >= STEPS or (plugin == "fsdp" and whole)
        results.append(booster.state_dict(boosted))
    return results


def channels_last(plugin):
    model = Convolution().double().to(memory_format=torch.channels_last)
    plan = {"out": "colwise_rep"}
    made = (
        HybridParallelPlugin(tp_size=2, tp_plan=plan) if plugin == "tensor" else PLUGINS[plugin]()
    )
    logging.disable()
    booster, boosted, _ = train(made, model)
    logging.disable(logging.NOTSET)
    return booster.state_dict(boosted)


def average_of(plugin):
    """The averaged weights, and what the average computes."""
    made = []
    booster, net = Booster(plugin=PLUGINS[plugin]()), network()
    if plugin == "fsdp":
        # The copy is made, and sharded, before the model is.
        copied, *_ = booster.boost(averaged(net))

    def update(booster, boosted):
        if plugin == "fsdp":
            copied.unwrap().update_parameters(boosted.unwrap())
        else:
            made[:] = made or [averaged(boosted)]
            made[0].update_parameters(boosted)

    _, boosted, _ = train(booster.plugin, net, update)
    if plugin == "fsdp":
        with pytest.raises(TypeError) as error:
            copy.deepcopy(boosted)
        assert str(error.value) == (
            "a model that is sharded over ranks cannot be copied: for an average of its weights, "
            "copy the model before it is boosted and boost the copy as well: average, *_ = "
            "booster.boost(AveragedModel(net)), and in each step "
            "average.unwrap().update_parameters(model.unwrap())"
        )
        weights = booster.state_dict(copied)
        weights = {n.removeprefix("module."): t for n, t in weights.items() if n != "n_averaged"}
        outputs = copied(part(booster.plugin, batch(0)[0]))
    else:
        assert made[0].module.optimizer is None
        weights = booster.state_dict(made[0].module)
        outputs = made[0](part(booster.plugin, batch(0)[0]))
    # A state of plain PyTorch goes back into the model.
    booster.load_state_dict(boosted, weights)
    again = booster.state_dict(boosted)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    return weights, outputs.detach()


def refuse(plugin):
    model = Sparse()
    with pytest.raises(ValueError, match="sparse") as error:
        Booster(plugin=PLUGINS[plugin]()).boost(model, adamw(model))
    return str(error.value)


def everything(plugins):
    return {
        plugin: (compiled(plugin), channels_last(plugin), average_of(plugin)) for plugin in plugins
    }


def test_odd_models_train_as_in_one_process():
    plugins = ["ddp", "fsdp", "zero1", "tensor"]
    ranks = run_ranks(everything, 2, plugins)
    plain = network()
    average = averaged(plain)
    weights = in_plain_pytorch(plain, average)
    convolution = in_plain_pytorch(Convolution().double())
    for plugin in plugins:
        (whole, layer), convolved, (mean, _) = ranks[0][plugin]
        assert off(whole, weights) < 1e-9, plugin
        assert off(layer, weights) < 1e-9, plugin
        assert off(convolved, convolution) < 1e-9, plugin
        assert off(mean, average.module.state_dict()) < 1e-9, plugin
        outputs = [rank[plugin][2][1] for rank in ranks]
        got = outputs[0] if plugin == "tensor" else torch.cat(outputs)
        torch.testing.assert_close(got, average(batch(0)[0]).detach(), rtol=1e-9, atol=1e-9)


def refuse_all(plugins):
    return [refuse(plugin) for plugin in plugins]


def test_sparse_gradients_are_refused_where_ranks_add_them_up():
    plugins = ["fsdp", "zero1", "tensor"]
    kinds = ["TorchFSDPPlugin", "LowLevelZeroPlugin", "TensorParallelPlugin"]
    for said in run_ranks(refuse_all, 2, plugins):
        assert said == [
            f"words has sparse gradients, which {kind} cannot synchronise: build the layer with "
            "sparse=False"
            for kind in kinds
        ]


# torch's tracer asks for the .grad of a hidden tensor, and is warned by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_runs_compiled_in_one_process():
    whole, layer = compiled("single")
    weights = in_plain_pytorch(network())
    assert off(whole, weights) < 1e-12
    assert off(layer, weights) < 1e-12
