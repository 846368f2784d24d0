"""Steps that are skipped: what is reported, what ends the run, and what goes on after a resume."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import SkipRule
from runner.booster import LossScale, NonFiniteGradient, SinglePlugin
from runner.data.dataset import TensorPairs, collate_pairs
from tests.clip.reference import on, refused
from tests.distributed.training import Rows
from tests.train.test_trainer import parts
from tests.trainers import fitted, trainer_of

SAMPLES, BATCH = 24, 2


@pytest.fixture(params=["host", "device"])
def where(request):
    """Metrics are read by the host at once, or stay on a device."""
    with on(request.param == "device"):
        yield request.param


def data(bad=None):
    return parts(SAMPLES, bad)[1].dataset


def loader(bad=None, shuffle=False):
    return SinglePlugin().prepare_dataloader(data(bad), BATCH, shuffle=shuffle, seed=3)


def planted(steps, microbatches=1, value=math.nan, name="2.bias"):
    """A network with a bad gradient in the first microbatch of each of ``steps`` (from 1)."""
    model = parts()[0]
    passes = iter(range(10**6))

    def plant(gradient):
        step, microbatch = divmod(next(passes), microbatches)
        if step + 1 in steps and microbatch == 0:
            gradient = gradient.clone()
            gradient.view(-1)[-1] = value
        return gradient

    model.get_parameter(name).register_hook(plant)
    return model


def training(model=None, train=None, steps=6, lr=0.01, **options):
    model = parts()[0] if model is None else model
    options |= {"optimizers": torch.optim.AdamW(model.parameters(), lr=lr, fused=True)}
    return trainer_of(model, train or loader(), f"{steps}ba", sinks=[Rows()], **options)


def warnings(caplog):
    records = (record for record in caplog.records if record.name == "runner.train.callbacks")
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


def test_the_first_bad_step_is_reported_with_all_that_finds_it(where, caplog):
    training(planted((2, 4), 3), accumulation_steps=3, log_flush=4).fit()
    [warning] = warnings(caplog)
    for part in ("step 2 was skipped", "norm is nan: 2.bias. All losses", "clip.max_skips"):
        assert part in warning
    assert "Its samples: 6, 7, 8, 9, 10, 11." in warning


def test_a_bad_loss_in_an_epoch_that_has_passed(where, caplog):
    order = [order for [order] in map(loader(shuffle=True).batch_sampler.parts, range(12))]
    number = next(i for i in range(12) if 11 in order[i])
    # On a device, metrics of the first epoch are read in the second one.
    training(train=loader(11, shuffle=True), steps=20, log_flush=20).fit()
    samples = ", ".join(map(str, order[number]))
    for part in (f"step {number + 1} was skipped", "0.weight, 0.bias", "A loss is not finite"):
        assert part in warnings(caplog)[0]
    assert f"Its samples: {samples}." in warnings(caplog)[0]


def test_an_error_ends_the_run(where):
    trainer = training(planted((2,), 3, -math.inf), accumulation_steps=3, nonfinite="error")
    words = "step 2: |norm is inf: 2.bias|6, 7, 8, 9, 10, 11|clip.nonfinite=skip"
    refused(NonFiniteGradient, words, trainer.fit)


def test_an_ignored_gradient_is_reported_once(where, caplog):
    model = planted((2,))
    train = DataLoader(data(), BATCH)
    training(model, train, steps=70, nonfinite="ignore", max_skips=3).fit()
    [warning] = warnings(caplog)
    assert warning.startswith("step 2 was taken with a bad gradient: ")
    assert "Only loaders of plugin.prepare_dataloader" in warning
    assert not torch.isfinite(model[2].bias).all()


def test_so_many_skips_in_a_row_end_the_run(where, caplog):
    model = planted(range(1, 10**6))
    before = [p.detach().clone() for p in model.parameters()]
    trainer = training(model, steps=100, lr=0.25, max_skips=20, log_flush=7)
    words = "20 steps in a row were skipped, up to step 20|2.bias|now 0.25|warm-up"
    refused(NonFiniteGradient, words, trainer.fit)
    assert all(map(torch.equal, before, model.parameters()))
    steps = [row["train/step"] for row in trainer.state.meter.sinks[0].rows]
    # On a device the host learns of them with the next transfer: that of the end of the epoch.
    assert steps == list(range(1, 21 if where == "host" else 25))
    [warning] = warnings(caplog)
    assert warning.startswith("step 1 was skipped")
    # The row goes on after a resume.
    before, after = (training(planted(range(1, 99)), steps=n, max_skips=12) for n in (7, 30))
    before.fit()
    after.state.load_state_dict(before.state.state_dict())
    words = "12 steps in a row were skipped, up to step 12"
    refused(NonFiniteGradient, words, after.fit)
    assert len(warnings(caplog)) == 2


def test_a_step_that_is_taken_ends_the_row_of_skipped_ones():
    bad = (1, 2, 3, 5, 6, 7)
    trainer = training(planted(bad), steps=9, max_skips=4)
    assert trainer.fit()["grad/nonfinite"] == len(bad)
    trainer = training(planted((*bad, 8)), steps=9, max_skips=4)
    refused(NonFiniteGradient, "up to step 8", trainer.fit)


def test_a_limit_of_null_never_ends_the_run():
    trainer = training(planted(range(1, 61)), steps=60, max_skips=None)
    assert trainer.fit()["grad/nonfinite"] == 60


def test_a_limit_below_1_is_refused():
    refused(ValueError, "max_skips must be at least 1", training, max_skips=0)


class Steep(nn.Module):
    """A loss whose gradient overflows fp16 unless the loss scale is at most ``largest``."""

    def __init__(self, largest):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.weight.register_hook(
            lambda grad: torch.where(grad.abs().sum() * 0.999 > largest, math.inf, grad)
        )

    def forward(self, batch):
        return batch[0][:, :1] * 0 + self.weight

    def loss(self, outputs, batch):
        return outputs.mean()


def test_a_search_for_the_loss_scale_is_no_alarm_while_it_can_end(caplog):
    fp16 = {"precision": "fp16", "steps": 30}
    trainer = training(Steep(2.0**3), loss_scale=LossScale(2.0**16), max_skips=2, **fp16)
    assert trainer.fit()["grad/nonfinite"] == trainer.skipped_steps.searches == 13
    assert trainer.optimizer.loss_scale.scale == 2.0**3
    assert (warnings(caplog), trainer.skipped_steps.in_a_row) == ([], 0)
    trainer = training(Steep(2.0**-9), loss_scale=LossScale(2.0**4), max_skips=5, **fp16)
    words = "5 steps in a row were skipped, up to step 9|precision=fp32"
    refused(NonFiniteGradient, words, trainer.fit)
    assert trainer.skipped_steps.searches == 4
    assert "step 5 was skipped: the gradient's norm is inf: weight" in warnings(caplog)[0]
    caplog.clear()
    trainer = training(train=loader(3), loss_scale=LossScale(2.0**4), **fp16)
    trainer.fit()  # a bad loss is no search
    assert "step 2 was skipped" in warnings(caplog)[0]
    assert trainer.skipped_steps.searches == 0


# -- spikes

RULE = {"k": 4.0, "window": 8, "min_steps": 4}
SPIKES = (7, 11, 12)


def spiky(steps, spikes=SPIKES, rule=RULE, rate=1e-4, **options):
    torch.manual_seed(0)
    inputs = torch.randn(40, 4) * 0.02 + 1.0
    inputs[[number - 1 for number in spikes]] *= 1000.0
    train = DataLoader(TensorPairs(inputs, torch.ones(40, 1)), 1, collate_fn=collate_pairs)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    options |= {"optimizers": sgd, "schedulers": torch.optim.lr_scheduler.StepLR(sgd, 1, 0.9)}
    options |= {"criterion": nn.MSELoss(), "skip": SkipRule(**rule), "sinks": [Rows()]}
    return trainer_of(model, train, f"{steps}ba", **options)


def test_spikes_are_counted_apart_from_bad_gradients():
    trainer = spiky(20)
    summary = trainer.fit()
    assert (summary["clip/skipped"], summary["grad/nonfinite"]) == (len(SPIKES), 0)
    counts = [row["clip/skipped"] for row in trainer.state.meter.sinks[0].rows]
    assert counts == [sum(spike <= step for spike in SPIKES) for step in range(1, 21)]


def test_the_schedule_waits_at_a_spike():
    trainer = fitted(spiky(20))
    assert trainer.state.schedulers[0].last_epoch == 20 - len(SPIKES)


@pytest.mark.parametrize(
    ("of", "named"),
    [("norm", "norm of the gradient"), ("any", "norm of the gradient or the loss")],
)
def test_the_first_spike_is_reported(caplog, of, named):
    spiky(20, rule={**RULE, "of": of}).fit()
    [warning] = warnings(caplog)
    assert warning.startswith(f"step 7 was skipped: the {named} is a spike")


@pytest.mark.parametrize(
    ("step", "of"), [(6, "norm"), (7, "norm"), (11, "loss"), (12, "any"), (11, "update")]
)
def test_a_resume_at_a_spike_changes_nothing(step, of, tmp_path):
    rule = {**RULE, "of": of}
    whole = fitted(spiky(20, rule=rule))
    second = spiky(20, rule=rule)
    second.load(fitted(spiky(step, rule=rule)).save(tmp_path))
    assert second.fit()["clip/skipped"] == len(SPIKES)
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))
    ours, theirs = (t.optimizer.skip.state_dict()["history"] for t in (second, whole))
    assert torch.equal(ours["kept"], theirs["kept"])


def test_a_long_row_of_spikes_ends_the_run_unless_its_level_is_accepted_before():
    trainer = spiky(40, range(10, 41), max_skips=6)
    refused(NonFiniteGradient, "6 steps in a row were skipped, up to step 15", trainer.fit)
    trainer = spiky(40, range(10, 41), {**RULE, "k": 10.0, "accept_after": 5}, 0.0, max_skips=6)
    assert trainer.fit()["clip/skipped"] == 5
    assert trainer.skipped_steps.in_a_row == 0
