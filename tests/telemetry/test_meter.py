"""Rows are the same wherever the figures were computed."""

import math

import pytest
import torch

from runner.clip import Decision
from runner.telemetry.meter import Meter, StepMetrics


class Rows(list):
    write = list.append

    def close(self, summary, exit_code):
        pass


def step(number, outcome, loss=1.0):
    return StepMetrics(number, loss, outcome, 0.1, 8 * number, 0, 0.5)


def test_figures_in_tensors_and_on_the_host_make_the_same_rows():
    outcomes = [
        (2.0, 1.0, 0.5, 1.0, 1.0, 2.0),
        (0.5, 0.5, 1.0, 0.0, 0.0, 0.5),
        (4.0, 1.0, 0.25, 1.0, 1.0, 4.0),
    ]
    collected = []
    for as_tensor in (False, True):
        rows = Rows()
        meter = Meter([rows], interval=2, flush_every=3)
        for number, figures in enumerate(outcomes, 1):
            if as_tensor:
                figures = tuple(torch.tensor(f, dtype=torch.float64) for f in figures)
            meter.push(step(number, Decision(*figures, threshold=1.0)))
        collected.append((list(rows), meter.summary()))
    assert collected[0] == collected[1]
    rows, summary = collected[0]
    assert [row["train/step"] for row in rows] == [2]
    assert rows[0]["grad/norm_mean"] == 1.25
    assert rows[0]["clip/ratio"] == 0.5
    assert rows[0]["throughput/samples_per_s"] == 16.0
    assert summary["clip/ratio_total"] == pytest.approx(2 / 3)


def test_a_step_that_an_accelerator_skipped_is_not_counted_as_clipped():
    rows = Rows()
    meter = Meter([rows], flush_every=1)
    # λ/inf and inf·0, as a device computes them without looking.
    meter.push(
        step(1, Decision(math.inf, math.nan, 0.0, 1.0, 1.0, max_stat=math.inf, threshold=1.0))
    )
    assert rows[0]["clip/clipped"] == 0
    assert rows[0]["grad/norm"] == math.inf
    assert math.isnan(rows[0]["clip/coef"])
    assert meter.summary()["grad/nonfinite"] == 1
    assert meter.summary()["clip/ratio_total"] == 0.0


def test_a_run_that_breaks_off_leaves_out_the_loss_that_needs_the_other_ranks():
    rows = Rows()
    meter = Meter([rows], mean_over_data=lambda figures: [figure / 2 for figure in figures])
    meter.push(step(1, Decision.untouched(1.0, 2.0, 1.0)), evaluation={})
    meter.push(step(2, Decision.untouched(1.0, 2.0, 1.0)))
    meter.flush(together=False)
    assert rows[0]["train/loss"] == 0.5
    assert "train/loss" not in rows[1]


def test_an_empty_run_has_a_summary():
    assert Meter().summary()["steps"] == 0
