"""A training that skips spikes: counts, schedule, the end of a long row, and resume."""

import logging

import pytest
import torch
from torch import nn

from runner import SkipRule, Trainer
from runner.booster import NonFiniteGradient
from runner.config.identity import differences
from runner.data.dataset import TensorPairs, collate_pairs
from runner.telemetry import guidance

RULE = {"k": 4.0, "window": 8, "min_steps": 4}
SPIKES = (7, 11, 12)


class Rows:
    def __init__(self):
        self.rows = []

    def write(self, row):
        self.rows.append(dict(row))

    def close(self, summary, exit_code):
        pass


def training(steps, spikes=SPIKES, rule=RULE, scheduled=False, **options):
    """Steps of one sample each; the inputs of a spike are a thousand times as large."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 4) * 0.02 + 1.0
    for number in spikes:
        inputs[number - 1] *= 1000.0
    data = TensorPairs(inputs, torch.ones(40, 1))
    loader = torch.utils.data.DataLoader(data, 1, collate_fn=collate_pairs)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if scheduled else None
    return Trainer(
        model,
        loader,
        f"{steps}ba",
        optimizers=optimizer,
        schedulers=schedule,
        criterion=nn.MSELoss(),
        skip=SkipRule(**rule),
        sinks=[Rows()],
        **options,
    )


def test_rows_and_summary_count_spikes_apart_from_gradients_that_are_not_finite(caplog):
    trainer = training(20, scheduled=True)
    summary = trainer.fit()
    assert summary["clip/skipped"] == len(SPIKES)
    assert summary["grad/nonfinite"] == 0
    counts = [row["clip/skipped"] for row in trainer.state.meter.sinks[0].rows]
    assert counts == [sum(spike <= step for spike in SPIKES) for step in range(1, 21)]
    # The schedule waits for a step that is skipped.
    assert trainer.state.schedulers[0].last_epoch == 20 - len(SPIKES)
    [warning] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.startswith("step 7 was skipped: the norm of the gradient is a spike")
    setting = guidance.Setting(trainer.state.mode.info, None)
    [remark] = guidance.remarks(summary, setting)
    assert "3 of 20 steps were skipped as spikes" in remark.text


def test_a_long_row_ends_the_run_and_a_level_that_lasts_is_accepted():
    shift = range(10, 41)
    trainer = training(40, shift, {**RULE, "accept_after": None}, max_skips=6)
    with pytest.raises(NonFiniteGradient, match="6 steps in a row were skipped, up to step 15"):
        trainer.fit()
    # Those that are accepted count toward the row.
    trainer = training(40, shift, {**RULE, "accept_after": 7}, max_skips=6)
    with pytest.raises(NonFiniteGradient, match="up to step 15"):
        trainer.fit()
    accepted = training(40, shift, {**RULE, "k": 10.0, "accept_after": 5}, max_skips=6)
    for group in accepted.optimizer.param_groups:  # The level has to stay the same.
        group["lr"] = 0.0
    assert accepted.fit()["clip/skipped"] == 5
    assert accepted.bad_gradients.in_a_row == 0


@pytest.mark.parametrize("at", [6, 7, 11])
def test_a_resume_in_the_middle_changes_nothing(at, tmp_path):
    whole = training(20)
    wanted = whole.fit()
    first = training(at)
    first.fit()
    path = first.save(tmp_path)
    second = training(20)
    second.load(path)
    assert second.fit()["clip/skipped"] == wanted["clip/skipped"] == len(SPIKES)
    for one, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    ours, theirs = (t.optimizer.skip.state_dict()["history"] for t in (second, whole))
    assert torch.equal(ours["kept"], theirs["kept"])


def test_a_run_without_a_rule_has_no_such_key():
    trainer = Trainer(nn.Linear(4, 2), [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))])
    assert "clip/skipped" not in trainer.fit()


def test_a_checkpoint_of_an_earlier_version_goes_on_without_a_rule_only():
    earlier = {"clip": {"mode": "norm"}}
    now = {"clip": {"mode": "norm", "skip": {"rule": None, "of": "norm", "accept_after": 20}}}
    assert differences(earlier, now) == {}
    now["clip"]["skip"]["rule"] = "sigma"
    assert differences(earlier, now) == {"clip.skip.rule": (None, "sigma")}
