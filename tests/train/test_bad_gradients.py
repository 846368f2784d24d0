"""Steps whose gradient is not finite: warnings, what they say, and the end of a run of skips."""

import logging
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runner import Trainer
from runner.booster import LossScale, NonFiniteGradient, SinglePlugin
from runner.booster.loss import WindowLoss
from tests.distributed.training import Rows
from tests.on_device import Waits, kept_on_device

SAMPLES, BATCH = 24, 2


class Swapped(nn.Module):
    """Its layers run in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.last(self.middle(self.first(inputs).tanh()).tanh())


ORDER = [f"{layer}.{kind}" for layer in ("first", "middle", "last") for kind in ("weight", "bias")]


def data(bad=()):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    for sample in bad:
        inputs[sample] = math.nan
    return TensorDataset(inputs, torch.randint(3, (SAMPLES,), generator=generator))


def loader(bad=(), shuffle=False):
    return SinglePlugin().prepare_dataloader(data(bad), BATCH, shuffle=shuffle, seed=3)


def plant(parameter, steps, microbatches=1, in_microbatch=1, value=math.nan):
    """Make one element of a gradient bad in one microbatch of each of ``steps`` (from 1)."""
    passes = iter(range(10**6))

    def planted(gradient):
        step, microbatch = divmod(next(passes), microbatches)
        if step + 1 in steps and microbatch + 1 == in_microbatch:
            gradient = gradient.clone()
            gradient.view(-1)[-1] = value
        return gradient

    parameter.register_hook(planted)


def training(model=None, train=None, steps=6, **options):
    torch.manual_seed(0)
    made = Swapped() if model is None else model
    options = {"optimizers": torch.optim.AdamW(made.parameters(), lr=0.01)} | options
    return Trainer(made, train or loader(), f"{steps}ba", sinks=[Rows()], **options)


def said(caplog, level=logging.WARNING):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "runner.train.bad_gradients" and record.levelno == level
    ]


def test_the_first_bad_step_is_described_and_the_next_one_is_traced(caplog):
    model = Swapped()
    plant(model.middle.weight, steps=(2, 4, 5), microbatches=3, in_microbatch=2)
    caplog.set_level(logging.INFO)
    training(model, accumulation_steps=3).fit()
    first, second = said(caplog)
    assert first == (
        "step 2 was skipped: the gradient's norm is nan: middle.weight (after first.bias and "
        "before middle.bias, which are finite); which microbatch it came from is not known, "
        "because gradients are combined before they are checked. All losses are finite: the "
        "backward pass goes wrong between middle.bias and middle.weight. The next bad step is "
        "traced to its rank and microbatch. 50 skipped steps in a row (clip.max_skips) end the run"
    )
    # Step 4 reads the samples 18 to 23, of which the second microbatch has two.
    assert second.startswith("step 4 was skipped: the gradient's norm is nan: middle.weight (after")
    assert "from microbatch 2 of 3. All losses are finite" in second
    assert ". Its samples: 20, 21." in second
    assert said(caplog, logging.INFO) == ["step 4, samples of the bad microbatch: [20, 21]"]


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_bad_loss_tells_the_microbatch_and_its_samples_at_once(where, caplog):
    caplog.set_level(logging.INFO)
    if where == "host":
        trainer = training(train=loader(bad=[11]), accumulation_steps=3, log_flush=4)
        trainer.fit()
    else:
        with kept_on_device():
            model = Swapped()
            fused = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            options = {"optimizers": fused, "accumulation_steps": 3, "log_flush": 4}
            training(model, loader(bad=[11]), **options).fit()
    [warning] = said(caplog)
    assert (
        "step 2 was skipped: the gradient's norm is nan: all 6 parameters, from microbatch 3 of 3"
        in (warning)
    )
    assert "The loss of this microbatch is nan; the largest weight is 0." in warning
    assert "Its samples: 10, 11." in warning
    assert said(caplog, logging.INFO) == ["step 2, samples of the bad microbatch: [10, 11]"]


def test_samples_of_a_shuffled_epoch_that_has_passed(caplog):
    order = loader(shuffle=True).batch_sampler
    order.set_epoch(0)
    number = next(i for i in range(len(order)) if 11 in order.parts(i)[0])
    with kept_on_device():
        model = Swapped()
        fused = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        # The metrics of the first epoch leave the device in the second one.
        train = loader(bad=[11], shuffle=True)
        training(model, train, 20, optimizers=fused, log_flush=20, eval_interval="20ba").fit()
    wanted = ", ".join(map(str, order.parts(number)[0]))
    assert f"step {number + 1} was skipped" in said(caplog)[0]
    assert f"Its samples: {wanted}." in said(caplog)[0]


def test_other_loaders_do_not_tell_their_samples(caplog):
    train = DataLoader(data(bad=[1]), BATCH)
    training(train=train).fit()
    assert "Only loaders of plugin.prepare_dataloader tell its samples" in said(caplog)[0]


def test_weights_that_are_bad_themselves_are_named(caplog):
    model = Swapped()
    with torch.no_grad():
        model.middle.bias[1] = math.nan
    training(model, steps=1).fit()
    assert "Weights are not finite themselves: middle.bias" in said(caplog)[0]


def always_bad(model):
    plant(model.first.weight, steps=range(1, 10**6))
    return model


@pytest.mark.parametrize("where", ["host", "device"])
def test_so_many_skips_in_a_row_end_the_run(where, caplog):
    def fit():
        model = always_bad(Swapped())
        fused = torch.optim.AdamW(model.parameters(), lr=0.25, fused=True)
        trainer = training(model, steps=100, optimizers=fused, max_skips=20, log_flush=7)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(NonFiniteGradient) as raised:
            trainer.fit()
        assert all(map(torch.equal, before, model.parameters()))
        assert not trainer.optimizer.unwrap().state or where == "device"
        return trainer, str(raised.value)

    if where == "host":
        trainer, error = fit()
    else:
        with kept_on_device():
            trainer, error = fit()
    assert error.startswith("20 steps in a row were skipped, up to step 20: the gradient's norm is")
    assert "first.weight (before first.bias, which is finite)" in error
    assert "a lower learning rate (now 0.25)" in error
    assert "warm-up" in error
    assert "clip.max_skips" in error
    assert "\n" not in error
    steps = [row["train/step"] for row in trainer.state.meter.sinks[0].rows]
    # On a device the host learns of them with the next transfer: that of the end of the epoch.
    assert steps == list(range(1, 21 if where == "host" else 25))
    first, *more = said(caplog)
    assert first.startswith("step 1 was skipped")
    assert more[-1].startswith("10 steps in a row were skipped, up to step 10")


def test_a_step_that_is_taken_ends_the_row():
    model = Swapped()
    plant(model.first.weight, steps=(1, 2, 3, 5, 6, 7))
    trainer = training(model, steps=9, max_skips=4)
    assert trainer.fit()["grad/nonfinite"] == 6
    model = Swapped()
    plant(model.first.weight, steps=(1, 2, 3, 5, 6, 7, 8))
    trainer = training(model, steps=9, max_skips=4)
    with pytest.raises(NonFiniteGradient, match="up to step 8"):
        trainer.fit()


def test_null_never_ends_the_run(caplog):
    trainer = training(always_bad(Swapped()), steps=60, max_skips=None)
    assert trainer.fit()["grad/nonfinite"] == 60
    assert "clip.max_skips" not in "".join(said(caplog))
    with pytest.raises(ValueError, match="max_skips must be at least 1"):
        training(max_skips=0)


def test_the_row_goes_on_after_a_resume(caplog):
    trainer = training(always_bad(Swapped()), steps=7, max_skips=12)
    trainer.fit()
    state = trainer.state.state_dict()
    assert state["skips"] == {"in_a_row": 7, "reported": True, "searches": 0}
    caplog.clear()
    again = training(always_bad(Swapped()), steps=30, max_skips=12)
    again.state.load_state_dict(state)
    with pytest.raises(NonFiniteGradient, match="12 steps in a row were skipped, up to step 12"):
        again.fit()
    [warning] = said(caplog)
    assert warning.startswith("10 steps in a row were skipped, up to step 10")


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_error_names_microbatch_parameter_and_samples(where):
    model = Swapped()
    plant(model.last.bias, (2,), microbatches=3, in_microbatch=2, value=-math.inf)
    trainer = training(model, accumulation_steps=3, nonfinite="error")
    kept = nullcontext() if where == "host" else kept_on_device()
    with kept, pytest.raises(NonFiniteGradient) as raised:
        trainer.fit()
    assert str(raised.value) == (
        "step 2: the gradient's norm is inf: last.bias (after last.weight, which is finite), from "
        "microbatch 2 of 3. All losses are finite: the backward pass goes wrong at last.bias, or "
        "after it. Its samples: 8, 9 (clip.nonfinite=skip leaves such steps out)"
    )


def test_what_is_ignored_is_said_once_and_never_ends_the_run(caplog):
    model = Swapped()
    plant(model.last.bias, (2,))
    trainer = training(model, steps=70, nonfinite="ignore", max_skips=3)
    trainer.fit()
    [warning] = said(caplog)
    assert warning.startswith("step 2 was taken with a bad gradient: ")
    assert not torch.isfinite(model.last.bias).all()


# -- the fp16 loss scale


class Steep(nn.Module):
    """A loss whose gradient overflows fp16 unless the loss scale is at most ``largest``."""

    def __init__(self, largest):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.largest = largest

    def forward(self, batch):
        return batch[0][:, :1] * 0 + self.weight

    def loss(self, outputs, batch):
        class Overflow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.clone()

            @staticmethod
            def backward(ctx, gradient, largest=self.largest):
                return torch.where(gradient.abs().sum() * 0.999 > largest, math.inf, gradient)

        return Overflow.apply(outputs).mean()


def scaled(largest, scale, caplog, **options):
    caplog.set_level(logging.INFO)
    trainer = training(
        Steep(largest), precision="fp16", loss_scale=LossScale(scale, 2000), **options
    )
    assert isinstance(trainer.loss, WindowLoss)
    return trainer


def test_a_search_for_the_loss_scale_does_not_alarm(caplog):
    trainer = scaled(2.0**3, 2.0**16, caplog, steps=30, max_skips=2)
    summary = trainer.fit()
    assert summary["grad/nonfinite"] == trainer.bad_gradients.searches == 13
    assert trainer.optimizer.loss_scale.scale == 2.0**3
    assert said(caplog) == []
    assert trainer.bad_gradients.in_a_row == 0


def test_a_search_for_the_loss_scale_that_does_not_end_does(caplog):
    trainer = scaled(2.0**-9, 2.0**4, caplog, steps=30, max_skips=5)
    skipped = "5 steps in a row were skipped, up to step 9.*precision=bf16 or fp32"
    with pytest.raises(NonFiniteGradient, match=skipped):
        trainer.fit()
    assert trainer.bad_gradients.searches == 4
    first, *_ = said(caplog)
    assert first.startswith("step 5 was skipped: the gradient's norm is inf: weight")


def test_a_bad_loss_is_no_search_for_the_loss_scale(caplog):
    trainer = training(
        train=loader(bad=[3]), precision="fp16", loss_scale=LossScale(2.0**4), steps=4
    )
    trainer.fit()
    [warning] = said(caplog)
    assert "step 2 was skipped" in warning
    assert trainer.bad_gradients.searches == 0


# -- cost


def test_hooks_are_gone_after_the_first_step():
    trainer = training(steps=1)
    trainer.fit()
    modules = trainer.model.modules()
    assert not any(module._forward_pre_hooks for module in modules)
    assert not any(p._backward_hooks for p in trainer.model.parameters())


def test_a_compiled_model_gets_no_hooks(caplog):
    model = Swapped()
    model.compile(backend="aot_eager")
    plant(model.middle.weight, steps=(1,))
    trainer = training(model, steps=1)
    trainer.fit()
    assert "middle.weight" in said(caplog)[0]
    assert not trainer.bad_gradients._order._called


def test_a_good_step_does_not_wait_for_the_device():
    with kept_on_device():
        model = Swapped()
        fused = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        trainer = training(model, optimizers=fused, accumulation_steps=2, log_flush=100)
        waits = Waits()
        steps = trainer.bad_gradients
        clip, check = steps.clip, steps.check

        def within(function, *args):
            with waits:
                return function(*args)

        steps.clip, steps.check = partial(within, clip), partial(within, check)
        trainer.fit()
    assert waits.found == []
