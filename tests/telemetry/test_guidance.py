"""What a summary says in words, and when it says nothing."""

import pytest
import torch
from torch import nn

from runner import GradientClipping, Trainer
from runner.telemetry.guidance import Setting, guidance, invariant, percent
from tests.test_train import parts

torch.set_num_threads(1)


def summary(ratio=0.2, nonfinite=0, fraction=None, largest=3.2):
    peak = {"p50": 0.5, "p90": 1.25, "p95": 2.0, "p99": 3.0, "max": largest, "mean": 0.6}
    return {
        "steps": 300,
        "grad/nonfinite": nonfinite,
        "clip/ratio_total": ratio,
        "clip/fraction": ratio if fraction is None else fraction,
        "clip/peak": peak,
    }


def test_a_threshold_that_binds_now_and_then_needs_no_word():
    assert guidance(summary(0.2), Setting("norm", 1.0, invariant="Adam")) == []
    assert guidance(summary(0.5), Setting("value", 1.0)) == []
    assert guidance(summary(0.0), Setting("none", None)) == []


def test_a_threshold_that_never_binds():
    [said] = guidance(summary(0.0), Setting("norm", 10.0))
    assert "never bound" in said
    assert "the largest ‖G‖ was 3.2" in said
    assert "about 1.25" in said


def test_a_threshold_that_limits_the_learning_rate():
    [said] = guidance(summary(0.62), Setting("norm", 0.1))
    assert "62 % of the steps" in said
    assert "Lower optimizer.lr instead" in said
    assert "about 1.25" in said


@pytest.mark.parametrize(("mode", "parts"), [("value", "elements"), ("adaptive", "units")])
def test_modes_that_clip_parts_are_judged_by_how_many(mode, parts):
    [few] = guidance(summary(0.9, fraction=0.03), Setting(mode, 0.1))
    assert f"90 % of the steps (3.0 % of the {parts} on average)" in few
    assert "learning rate" not in few
    [most] = guidance(summary(0.9, fraction=0.8), Setting(mode, 0.1))
    assert "learning rate" in most


def test_an_optimizer_in_which_the_size_of_gradients_cancels():
    setting = Setting("norm", 0.1, invariant="AdamW")
    assert "AdamW" in guidance(summary(0.96), setting)[1]
    assert len(guidance(summary(0.94), setting)) == 1
    assert len(guidance(summary(0.96), Setting("value", 0.1, invariant="AdamW"))) == 1


@pytest.mark.parametrize(("policy", "done"), [("skip", "skipped"), ("ignore", "taken")])
def test_gradients_that_are_not_finite(policy, done):
    for mode, threshold in (("norm", 1.0), ("none", None)):
        [said] = guidance(summary(0.2, nonfinite=3), Setting(mode, threshold, policy))
        assert said.startswith("3 of 300 steps")
        assert done in said


def test_a_run_without_a_finite_gradient():
    empty = summary(0.0, nonfinite=300) | {"clip/peak": {}}
    assert len(guidance(empty, Setting("norm", 1.0))) == 1


@pytest.mark.parametrize(
    ("kind", "options", "cancels"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.AdamW, {}, True),
        (torch.optim.NAdam, {}, True),
        (torch.optim.RMSprop, {}, True),
        (torch.optim.RMSprop, {"eps": 1.0}, False),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, False),
        (torch.optim.SGD, {"lr": 0.1}, False),
    ],
)
def test_optimizers(kind, options, cancels):
    made = kind([nn.Parameter(torch.zeros(4))], **options)
    assert invariant(made, 0.25, 10_000) == (kind.__name__ if cancels else None)
    assert invariant(made, None, 10_000) is None


def test_the_figures_of_a_real_run_are_read():
    model, loader = parts()
    found = Trainer(model, loader, "3ep", [GradientClipping("norm", 1e-3)]).fit()
    [said] = guidance(found, Setting("norm", 1e-3))
    assert "100 % of the steps" in said
    assert guidance(Trainer(model, []).meter.summary(), Setting("norm", 1.0)) == []


def test_a_share_never_reads_as_none_or_all_unless_it_is():
    assert [percent(x) for x in (0, 1, 0.0001, 0.9999, 0.992, 0.034, 0.5)] == [
        "0 %",
        "100 %",
        "under 0.1 %",
        "over 99.9 %",
        "99.2 %",
        "3.4 %",
        "50 %",
    ]
