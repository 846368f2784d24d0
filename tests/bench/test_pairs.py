"""Interleaved rounds, spreads of ratios, and the rows that show them."""

import numpy as np
import pytest

from runner.bench.timing import compared, interleave, line_of, row


def test_every_round_times_each_side_once_and_begins_with_another_one():
    calls = []

    def side(name):
        return lambda: calls.append(name) or float(len(calls))

    times = interleave({"a": side("a"), "b": side("b"), "c": side("c")}, rounds=3, warm_up=1)
    assert calls == [*"abc", *"bca", *"cab", *"abc"]
    assert times == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}


def spread(row):
    return tuple(row[name] for name in ("low", "median", "high", "number"))


@pytest.mark.parametrize("number", [1, 2, 5, 15])
def test_a_spread_has_the_quartiles_of_numpy(number):
    values = np.random.default_rng(number).normal(size=number)
    wanted = [*np.percentile(values, (25, 50, 75)), number]
    assert spread(row("", values.tolist())) == pytest.approx(wanted)


def test_ratios_are_taken_within_a_round():
    def ratio(ours, base, bare=None):
        times = {"ours": ours, "base": base, "bare": bare}
        return spread(compared("", times, "ours", "base", bare=bare and "bare"))

    # The machine is three times slower in the second round.
    assert ratio([2.0, 6.0, 2.0], [4.0, 12.0, 4.0]) == (0.5, 0.5, 0.5, 3)
    assert ratio([3.0, 9.0], [5.0, 15.0], [1.0, 3.0]) == (0.5, 0.5, 0.5, 2)
    # A round in which the bare side was slower says nothing.
    assert ratio([3.0, 2.0, 3.0], [5.0, 1.0, 5.0], [1.0, 1.5, 1.0])[-1] == 2
    assert ratio([3.0], [1.0], [2.0]) == (1.0, 1.0, 1.0, 1)


def test_a_row_reads_as_one_line():
    times = {"step": [1.0, 1.0], "torch": [3.0, 3.0], "ours": [2.0, 2.0]}
    found = compared("resnet34", times, "ours", "torch", 0.5, bare="step", steps=100)
    words = ["resnet34", "0.50", "0.50", "-", "0.50", "0.50"]
    assert line_of(found).split() == [*words, "step", "10.00", "torch", "30.00", "ours", "20.00"]
    assert "0.60 missed" in line_of(compared("", times, "ours", "torch", 0.6))
    assert line_of(row("s", [3.5], 4.0, "s")).split() == [
        "s",
        "3.50",
        "s",
        "3.50",
        "-",
        "3.50",
        "4.00",
    ]
