"""Rates that follow evaluations or belong to parameter groups, over checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Evaluate, Log, Trainer
from runner.booster import SinglePlugin
from runner.optim.groups import parameter_groups
from runner.optim.schedulers import LinearWarmupPolynomialLR, PlateauLR

RATE = 2e-7  # at this rate the loss stays the same, which is no improvement


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.arange(4) % 2) for _ in range(3)]


class Rates:
    """The rate after each evaluation."""

    def __init__(self):
        self.seen = []

    def on_evaluate(self, trainer, metrics):
        self.seen.append(trainer.optimizer.param_groups[0]["lr"])


def training(duration, patterns=None, follows=True):
    """A training of two layers, and the rates after its evaluations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(parameter_groups(model, patterns or {}), lr=RATE)
    rates = Rates()
    trainer = Trainer(
        model,
        batches(),
        duration,
        eval_dataloader=Evaluate(batches()),
        optimizers=optimizer,
        schedulers=PlateauLR(optimizer, patience=1, factor=0.5) if follows else None,
        callbacks=[rates],
        log=Log(bar=False),
    )
    return trainer, rates


def test_the_rate_falls_after_evaluations_without_an_improvement():
    trainer, rates = training("6ep")
    trainer.fit()
    assert rates.seen == [RATE, RATE, RATE / 2, RATE / 2, RATE / 4, RATE / 4]


def test_a_plateau_goes_on_from_a_checkpoint(tmp_path):
    first, before = training("2ep")
    first.fit()
    checkpoint = first.save(tmp_path)
    second, after = training("6ep")
    second.load(checkpoint)
    second.fit()
    assert before.seen + after.seen == [RATE, RATE, RATE / 2, RATE / 2, RATE / 4, RATE / 4]


def test_a_training_that_keeps_its_groups_takes_the_moments_alone_from_a_checkpoint(tmp_path):
    first, _ = training("1ep", {"0.*": {"lr": 0.01, "weight_decay": 0.5}}, follows=False)
    first.fit()
    checkpoint = first.save(tmp_path)
    patterns = {"1.bias": {"lr": 0.003}, "0.*": {"weight_decay": 0.0}}
    second, _ = training("2ep", patterns, follows=False)
    second.load(checkpoint, keep={"groups", "lr"})
    settings = [(group["lr"], group["weight_decay"]) for group in second.optimizer.param_groups]
    assert settings == [(RATE, 0), (0.003, 0), (RATE, 0.0)]
    moments = second.optimizer.unwrap().state
    assert {int(moment["step"]) for moment in moments.values()} == {3}


def test_a_plateau_keeps_its_reductions_where_the_schedules_are_made_anew(tmp_path):
    first, _ = training("3ep")
    first.fit()
    checkpoint = first.save(tmp_path)
    second, rates = training("4ep")
    second.load(checkpoint, keep={"lr"})
    second.fit()
    assert rates.seen == [RATE / 2]


def by_samples(size, microbatches, total):
    """A training whose rate falls in a line over samples, in microbatches of a size."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LinearWarmupPolynomialLR(optimizer, total)
    schedule.by_samples = True
    data = TensorDataset(torch.randn(48, 3), torch.arange(48) % 2)
    loader = SinglePlugin().prepare_dataloader(data, size)
    options = {"optimizers": optimizer, "schedulers": schedule, "log": Log(bar=False)}
    return Trainer(model, loader, "2ba", accumulation_steps=microbatches, **options)


def test_a_rate_by_samples_goes_on_in_microbatches_of_another_size(tmp_path):
    first = by_samples(4, 2, total=12)
    first.fit()
    checkpoint = first.save(tmp_path)
    second = by_samples(8, 1, total=6)
    second.load(checkpoint, keep={"lr"})
    rates = [trainer.optimizer.param_groups[0]["lr"] for trainer in (first, second)]
    assert rates == pytest.approx([1 - 16 / 48] * 2)


def test_a_plateau_without_held_out_data_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="give an eval_dataloader"):
        Trainer(model, batches(), "1ep", optimizers=optimizer, schedulers=schedule)
