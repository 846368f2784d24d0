"""Several optimizers take one step together."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from runner import GradientClipping, Trainer
from runner.booster import Booster, SinglePlugin
from runner.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from runner.data.dataset import TensorPairs
from tests.against_torch.plain import clip
from tests.ranks import run_ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def pairs():
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return TensorPairs(drawn[:, :5], drawn[:, 5:])


def stepped(model):
    """Two optimizers and their schedulers."""
    first = SGD(model[0].parameters(), lr=0.03, momentum=0.9)
    second = AdamW(model[2].parameters(), lr=0.02, weight_decay=0.1)
    return [first, second], [StepLR(each, 2, 0.5) for each in (first, second)]


def fitted(make):
    """Weights that the Trainer ends with."""
    model, plugin = network(), make()
    optimizers, schedulers = stepped(model)
    trainer = Trainer(
        model,
        plugin.prepare_dataloader(pairs(), 4 // plugin.data_size),
        "6ba",
        GradientClipping("norm", 0.5),
        optimizers=optimizers,
        schedulers=schedulers,
        criterion=F.mse_loss,
        booster=Booster(plugin=plugin),
        accumulation_steps=2,
    )
    trainer.fit()
    return trainer.booster.state_dict(trainer.model)


def fitted_over_ranks():
    return [fitted(TorchDDPPlugin), fitted(TorchFSDPPlugin)]


def test_the_trainer_steps_all_optimizers_and_schedulers():
    model, data = network(), pairs()
    optimizers, schedulers = stepped(model)
    for step in range(6):
        at = slice(step % 3 * 8, step % 3 * 8 + 8)
        F.mse_loss(model(data.inputs[at]), data.targets[at]).backward()
        clip(model, 0.5)
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()
    for found in [fitted(SinglePlugin), *run_ranks(fitted_over_ranks, 2)[0]]:
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=1e-12)


def test_a_script_that_trains_in_phases_makes_a_new_trainer_for_each():
    model = network()
    boosted, *_ = Booster().boost(model, SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match=r"boosted already: .*\[first, second\]"):
        Booster().boost(boosted, SGD(model.parameters(), lr=1.0))
    del boosted
    Booster().boost(model, SGD(model.parameters(), lr=1.0))


def test_what_belongs_to_no_module_is_named():
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
    with pytest.raises(ValueError, match=r"the criterion has parameters \(scale\)"):
        Booster().boost(model, None, Penalty(model, scale=nn.Parameter(torch.ones(1))))
