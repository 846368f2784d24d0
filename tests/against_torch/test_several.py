"""Several optimizers, several models and a criterion that learns take one step together."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from runner import GradientClipping, Trainer
from runner.booster import Booster, PipelineParallelPlugin, SinglePlugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.data.dataset import TensorPairs
from tests.against_torch.plain import PLUGINS, batch, clip, mean_square, off, part
from tests.against_torch.plain import network as one
from tests.ranks import run_ranks


class Scaled(nn.Module):
    """Squared distance, in learned units."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, outputs, targets):
        return (self.scale * outputs - targets).square().mean()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def pairs():
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return TensorPairs(drawn[:, :5], drawn[:, 5:])


def stepped(model, criterion=None):
    """Two optimizers and their schedulers."""
    more = [] if criterion is None else list(criterion.parameters())
    first = SGD([*model[0].parameters(), *more], lr=0.03, momentum=0.9)
    second = AdamW(model[2].parameters(), lr=0.02, weight_decay=0.1)
    return [first, second], [StepLR(each, 2, 0.5) for each in (first, second)]


def fitted(make):
    """Weights that the Trainer ends with."""
    model, criterion, plugin = network(), Scaled(), make()
    optimizers, schedulers = stepped(model, criterion)
    trainer = Trainer(
        model,
        plugin.prepare_dataloader(pairs(), 4 // plugin.data_size),
        "6ba",
        GradientClipping("norm", 0.5),
        optimizers=optimizers,
        schedulers=schedulers,
        criterion=criterion,
        booster=Booster(plugin=plugin),
        accumulation_steps=2,
    )
    trainer.fit()
    return trainer.booster.state_dict(trainer.model) | {"scale": criterion.scale.detach().clone()}


def fitted_over_ranks():
    return [fitted(TorchDDPPlugin), fitted(TorchFSDPPlugin)]


def test_the_trainer_steps_all_optimizers_and_schedulers_and_the_criterion():
    model, criterion, data = network(), Scaled(), pairs()
    optimizers, schedulers = stepped(model, criterion)
    both = nn.ModuleList([model, criterion])
    for step in range(6):
        at = slice(step % 3 * 8, step % 3 * 8 + 8)
        criterion(model(data.inputs[at]), data.targets[at]).backward()
        clip(both, 0.5)
        for each in (*optimizers, *schedulers):
            each.step()
        both.zero_grad()
    wanted = model.state_dict() | {"scale": criterion.scale.detach()}
    for found in [fitted(SinglePlugin), *run_ranks(fitted_over_ranks, 2)[0]]:
        torch.testing.assert_close(found, dict(wanted), rtol=0, atol=1e-12)


def two_models(plugins):
    """Weights of two models under one optimizer."""
    found = {}
    for name in plugins:
        plugin = PLUGINS[name]() if name != "tensor" else TensorParallelPlugin(tp_plan=TWO_PLAN)
        booster, models = Booster(plugin=plugin), parts_of(one())
        adamw = AdamW([p for m in models for p in m.parameters()], lr=0.05, weight_decay=0.5)
        wrapped, optimizer, *_ = booster.boost(models, adamw)
        for step in range(6):
            inputs, targets = (part(plugin, whole) for whole in batch(step // 2))
            with booster.no_sync(wrapped) if step % 2 == 0 else torch.enable_grad():
                booster.backward(mean_square(wrapped[1](wrapped[0](inputs)), targets), optimizer)
            if step % 2:
                optimizer.clip_grad_by_norm(2.0)
                optimizer.step()
                optimizer.zero_grad()
        states = [booster.state_dict(each) for each in wrapped]
        found[name] = {f"{i}.{key}": v for i, s in enumerate(states) for key, v in s.items()}
    return found


TWO_PLAN = {"0": "colwise_rep"}


def parts_of(model):
    return [model[:2], nn.Sequential(*model[2:])]


def test_two_models_under_one_optimizer():
    model = one()
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for step in range(3):
        inputs, targets = batch(step)
        (2 * mean_square(model(inputs), targets)).backward()
        clip(model, 2.0)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {
        f"{i}.{key}": v for i, m in enumerate(parts_of(model)) for key, v in m.state_dict().items()
    }
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3", "tensor"]
    for name, weights in (two_models(["single"]) | run_ranks(two_models, 2, names)[0]).items():
        assert off(weights, wanted) < 1e-9, name


def test_a_script_that_trains_in_phases_makes_a_new_trainer_for_each():
    model = network()
    boosted, *_ = Booster().boost(model, SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match=r"boosted already: .*\[first, second\]"):
        Booster().boost(boosted, SGD(model.parameters(), lr=1.0))
    del boosted
    Booster().boost(model, SGD(model.parameters(), lr=1.0))


def test_what_belongs_to_no_module_or_to_two_is_named():
    first, second = network(), network()
    second[2].weight = first[2].weight
    with pytest.raises(ValueError, match=r"0\.2\.weight and 1\.2\.weight are one parameter of two"):
        Booster().boost([first, second], SGD(first.parameters(), lr=1.0))
    model, loose = network(), nn.Parameter(torch.zeros(4))
    optimizer = SGD([{"params": model.parameters()}, {"params": [loose]}], lr=1.0)
    for boost in (Booster().boost, lambda model, each: Trainer(model, [], optimizers=each)):
        with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[0\] of SGD, of shap"):
            boost(model, optimizer)


def test_a_criterion_that_holds_the_model():
    class Penalty(nn.Module):
        def __init__(self, model, **own):
            super().__init__()
            self.model = model
            for name, parameter in own.items():
                self.register_parameter(name, parameter)

    model = nn.Linear(3, 2)
    _, optimizer, *_ = Booster().boost(model, SGD(model.parameters(), lr=1.0), Penalty(model))
    assert optimizer.layout.names == ["weight", "bias"]
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="weight is also a parameter of the criterion"):
        Booster().boost(model, None, Penalty(model, scale=nn.Parameter(torch.ones(1))))


def refusals():
    """What is said of options and calls that cannot be right, on this rank."""
    for make in (TorchDDPPlugin, TorchFSDPPlugin, LowLevelZeroPlugin, HybridParallelPlugin):
        model = network()
        with pytest.raises(ValueError, match="sync_batchnorm=True needs GPUs"):
            Booster(plugin=make(sync_batchnorm=True)).boost(model)
        booster = Booster(plugin=make())
        booster.boost(model, SGD(model.parameters(), lr=1.0))
        with pytest.raises(ValueError, match=r"boosted already: .*\[first, second\]"):
            booster.boost(model, SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="zero_bubble takes no gradient of a criterion's"):
        Booster(plugin=PipelineParallelPlugin(schedule="zero_bubble")).boost(one(), None, Scaled())
    model = network()
    boosted, *_ = Booster(plugin=TorchDDPPlugin(static_graph=True)).boost(model)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"0\.weight was frozen or unfrozen after boost, but stat"):
        boosted(pairs().inputs)


def test_what_plugins_refuse():
    run_ranks(refusals, 2)
