"""Rows are the same wherever the figures were computed."""

import math
import random

import pytest
import torch

from runner.clip import Decision
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics


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


def test_rows_and_summary_do_not_depend_on_when_metrics_reach_the_host():
    random.seed(0)
    steps = []
    for number in range(1, 101):
        norm = random.choice([math.nan, math.inf, *[random.lognormvariate(0, 3)] * 20])
        outcome = Decision(norm, norm / 3, 1 / 3, random.random() < 0.3, 0.1, norm, threshold=1.0)
        steps.append(step(number, outcome, loss=random.choice([math.nan, *[random.random()] * 9])))
    found = []
    for every in (1, 7, 1000):
        rows = Rows()
        meter = Meter([rows], interval=4, flush_every=every, what_if=[0.5, 2.0])
        for each in steps:
            meter.push(each, {"eval/loss": 1.0} if each.step % 50 == 0 else None)
        found.append(repr((list(rows), meter.summary(), meter.state_dict())))
    assert found[0] == found[1] == found[2]
    assert found[0].count("'train/step'") == 27


def test_sums_since_the_last_row_are_those_of_a_plain_loop():
    rows = Rows()
    meter = Meter([rows], interval=3, flush_every=7)
    norms = [0.1, 0.7, 1e16, 3.0, math.nan, 2.0, 0.3, math.inf, 0.9]
    for number, norm in enumerate(norms, 1):
        meter.push(step(number, Decision.untouched(norm, 2.0, norm), loss=norm))
    meter.flush()
    for row, part in zip(rows, (norms[:3], norms[3:6], norms[6:]), strict=True):
        total, largest = 0.0, 0.0
        for norm in part:
            total += norm
            largest = norm if math.isnan(norm) or math.isnan(largest) else max(largest, norm)
        wanted = total / 3, math.nan if math.isnan(total) else largest
        assert repr((row["grad/norm_mean"], row["grad/norm_max"])) == repr(wanted)
    assert [row["grad/nonfinite"] for row in rows] == [0, 1, 2]
    assert meter.summary()["best"] == {"train/loss": 0.1}


def test_an_empty_run_has_a_summary():
    assert Meter().summary()["steps"] == 0
