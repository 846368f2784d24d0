"""A criterion that learns is synchronised, counted and clipped with the model."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from runner import GradientClipping, Trainer
from runner.booster import (
    Booster,
    PipelineParallelPlugin,
    SinglePlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.data.dataset import TensorPairs
from tests.against_torch.together import Temperature, assert_plain_steps, models
from tests.ranks import run_ranks

PAIRS = ["ddp", "fsdp", "zero1", "zero2", "zero3", "tensor", "sequence", "1f1b", "gpipe"]
QUADS = ["tensor_dp", "pipeline_dp", "hsdp", "hybrid", "hybrid_zero1", "hybrid_fsdp_pp"]
STEPS = 4


def test_a_learned_temperature_in_one_process():
    assert_plain_steps([None], 1, "gpt", "adamw", True, STEPS)


def test_a_learned_temperature_over_two_ranks():
    assert_plain_steps(PAIRS, 2, "gpt", "adamw", True, STEPS)


def test_a_learned_temperature_with_two_stages_a_rank():
    assert_plain_steps(["interleaved"], 2, "gpt", "adamw", True, STEPS)


def _zero_bubble():
    (model,), criterion = models("gpt"), Temperature()
    optimizer = SGD([*model.parameters(), *criterion.parameters()], lr=1.0)
    booster = Booster(plugin=PipelineParallelPlugin(schedule="zero_bubble"))
    with pytest.raises(ValueError, match="zero_bubble takes no gradient of a criterion's") as error:
        booster.boost(model, optimizer, criterion)
    return str(error.value)


def test_a_schedule_that_leaves_the_criterion_out_is_refused():
    assert all("schedule='1f1b'" in said for said in run_ranks(_zero_bubble, 2))


def test_a_parameter_of_no_module_is_named():
    model, loose = nn.Linear(3, 2), nn.Parameter(torch.zeros(4))
    optimizer = SGD([{"params": model.parameters()}, {"params": [loose]}], lr=1.0)
    where = r"param_groups\[1\]\['params'\]\[0\] of SGD, of shape \[4\], is no parameter"
    with pytest.raises(ValueError, match=where):
        Booster().boost(model, optimizer)
    with pytest.raises(ValueError, match=where):
        Trainer(model, [], optimizers=optimizer)


def test_the_optimizer_that_the_trainer_makes_trains_the_criterion():
    criterion = Scaled()
    criterion.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
    model = nn.Linear(5, 1).double()
    loader = SinglePlugin().prepare_dataloader(_pairs(), 8)
    trainer = Trainer(model, loader, "2ba", criterion=criterion)
    assert {criterion.scale, *model.parameters()} == set(
        trainer.optimizer.param_groups[0]["params"]
    )
    before = criterion.scale.detach().clone()
    trainer.fit()
    assert criterion.scale != before


def test_a_criterion_that_holds_the_model():
    class Penalty(nn.Module):
        def __init__(self, model, **own):
            super().__init__()
            self.model = model
            for name, parameter in own.items():
                self.register_parameter(name, parameter)

    model = nn.Linear(3, 2)
    booster = Booster()
    _, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0), Penalty(model))
    assert optimizer.layout.names == ["weight", "bias"]
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="weight is also a parameter of the criterion"):
        booster.boost(model, None, Penalty(model, scale=nn.Parameter(torch.ones(1))))


class Scaled(nn.Module):
    """Squared distance, in learned units."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, outputs, targets):
        return (self.scale * outputs - targets).square().mean()


def _fit(plugin):
    torch.manual_seed(0)
    model, criterion = nn.Linear(5, 1).double(), Scaled()
    data, parameters = _pairs(), [*model.parameters(), *criterion.parameters()]
    trainer = Trainer(
        model,
        plugin.prepare_dataloader(data, 4 // plugin.data_size),
        "6ba",
        GradientClipping("norm", 0.5),
        optimizers=AdamW(parameters, lr=0.05, weight_decay=0.3),
        criterion=criterion,
        plugin=plugin,
        accumulation_steps=2,
    )
    trainer.fit()
    return trainer.booster.state_dict(trainer.model) | {"scale": criterion.scale.detach().clone()}


def _pairs():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    return TensorPairs(inputs, torch.randn(24, 1, generator=generator, dtype=torch.float64))


def _fit_over_ranks():
    return [_fit(TorchDDPPlugin()), _fit(TorchFSDPPlugin())]


def test_the_trainer_trains_its_criterion():
    torch.manual_seed(0)
    model, criterion, data = nn.Linear(5, 1).double(), Scaled(), _pairs()
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = AdamW(parameters, lr=0.05, weight_decay=0.3)
    for step in range(6):
        part = slice(step % 3 * 8, step % 3 * 8 + 8)
        criterion(model(data.inputs[part]), data.targets[part]).backward()
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm().item()
        for parameter in parameters:
            parameter.grad.mul_(min(1.0, 0.5 / norm))
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict() | {"scale": criterion.scale.detach()}
    for found in [_fit(SinglePlugin()), *run_ranks(_fit_over_ranks, 2)[0]]:
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)


def test_a_learned_temperature_over_four_ranks():
    assert_plain_steps(QUADS, 4, "gpt", "adamw", True, STEPS)


def test_a_learned_temperature_with_experts():
    assert_plain_steps(["moe"], 2, "moe", "adamw", True, STEPS)


def test_a_learned_temperature_with_two_optimizers():
    assert_plain_steps(["ddp", "fsdp", "zero1"], 2, "tied", "sgd", True, STEPS)
