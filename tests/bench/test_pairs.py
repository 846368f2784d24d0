"""Interleaved rounds, spreads of ratios, and the rows that show them."""

import json

import numpy as np
import pytest
import torch

from runner.bench.pairs import Spread, added, interleave, milliseconds, ratio
from runner.bench.subjects import Small, Subject, Telemetry, exact_power
from runner.bench.table import HEADER, WIDTH, Row
from runner.clip import Layout, build


def test_every_round_times_each_side_once_and_begins_with_another_one():
    calls = []

    def side(name):
        return lambda: calls.append(name) or float(len(calls))

    times = interleave({"a": side("a"), "b": side("b"), "c": side("c")}, rounds=3, warm_up=1)
    assert calls == [*"abc", *"bca", *"cab", *"abc"]
    assert times == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}


@pytest.mark.parametrize("number", [1, 2, 5, 15])
def test_a_spread_has_the_quartiles_of_numpy(number):
    values = np.random.default_rng(number).normal(size=number)
    spread = Spread.of(values.tolist())
    low, median, high = np.percentile(values, (25, 50, 75))
    assert spread == pytest.approx((median, low, high, number))


def test_ratios_are_taken_within_a_round():
    # The machine is three times slower in the second round.
    assert ratio([2.0, 6.0, 2.0], [4.0, 12.0, 4.0]) == (0.5, 0.5, 0.5, 3)


def test_added_cost_is_relative_to_what_the_other_side_adds():
    assert added([3.0, 9.0], [5.0, 15.0], [1.0, 3.0]) == (0.5, 0.5, 0.5, 2)


def test_a_round_in_which_the_bare_side_was_slower_says_nothing():
    assert added([3.0, 2.0, 3.0], [5.0, 1.0, 5.0], [1.0, 1.5, 1.0]).number == 2
    assert added([3.0], [1.0], [2.0]) == (1.0, 1.0, 1.0, 1)


def test_a_row_reads_as_one_line_and_says_whether_its_limit_is_missed():
    row = Row("resnet34, binding", Spread(0.43, 0.41, 0.46, 15), 0.5, ms={"torch": 12.345})
    assert "missed" not in row.line()
    assert row.line().split() == [
        *("resnet34,", "binding", "0.43", "0.41", "-", "0.46", "0.50", "torch", "12.35"),
    ]
    assert "0.40 missed" in Row(row.what, row.value, 0.4).line()
    assert HEADER.index("median") > WIDTH


def test_a_row_is_recorded_with_all_its_numbers():
    row = Row("error", Spread.of([3e-8]), 1e-6, "error")
    assert json.loads(json.dumps(row.record())) == {
        "what": "error",
        "median": 3e-8,
        "q1": 3e-8,
        "q3": 3e-8,
        "rounds": 1,
        "unit": "error",
        "limit": 1e-6,
        "ms": {},
    }
    assert "3e-08" in row.line()


def test_milliseconds_are_medians():
    assert milliseconds({"a": [0.001, 0.5, 0.002]}) == {"a": 2.0}


def test_gradients_are_restored_before_each_timed_part():
    subject = Subject("small", Small(5), "cpu")
    before = [gradient.clone() for gradient in subject.gradients]
    seen = []

    def work():
        seen.extend(gradient.clone() for gradient in subject.gradients)
        for gradient in subject.gradients:
            gradient.zero_()

    side = subject.side(work)
    assert side() > 0
    assert len(seen) == 3 * 5  # short work is done three times
    for at in range(0, 15, 5):
        assert all(map(torch.equal, seen[at : at + 5], before))


def test_a_backward_pass_of_the_loss_gives_the_same_gradients():
    subject = Subject("small", Small(5), "cpu")
    before = [gradient.clone() for gradient in subject.gradients]
    for parameter in subject.parameters:
        parameter.grad = None
    subject.loss().backward()
    assert all(map(torch.equal, subject.gradients, before))


def test_the_norm_of_a_subject_is_that_of_float64():
    subject = Subject("small", Small(50), "cpu")
    whole = torch.cat(subject.gradients).double().numpy()
    assert subject.norm == pytest.approx(float(np.linalg.norm(whole)), rel=1e-14)
    long = torch.randn(3 * 2**20 + 7)
    exact = float(np.sum(np.square(long.double().numpy())))
    assert exact_power(long) == pytest.approx(exact, rel=1e-13)


def test_telemetry_writes_a_row_for_each_decision(tmp_path):
    subject, telemetry = Subject("small", Small(5), "cpu"), Telemetry(tmp_path)
    mode, layout = build("norm", threshold=0.5 * subject.norm), Layout.of_model(subject.model)
    for _ in range(50):
        subject.restore()
        telemetry(mode.clip(layout))
    [file] = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 50
    assert rows[-1]["clip/coef"] == pytest.approx(0.5)
