"""``python -m runner bench``: tables run, and are printed and recorded; rounds and ratios."""

import json
import math
import signal

import numpy as np
import pytest
import torch

from runner.bench import TABLES
from runner.bench.timing import compared, interleave, line_of, row
from runner.cli.main import main
from runner.train import stop
from tests.process import python

EVERY = tuple(name for name in TABLES if name not in ("gpu", "parity"))


@pytest.mark.parametrize("tables", [("clip",), pytest.param(EVERY, marks=pytest.mark.slow)])
def test_tables_are_recorded_as_they_are_printed(tables, tmp_path):
    folder = tmp_path / "out"
    words = ["--quick", "--peers", "--pairs", "1", "--device", "cpu", "--output", str(folder)]
    printed = python("-m", "runner", "bench", *tables, *words).stdout
    text = (folder / "bench.txt").read_text()
    assert printed == f"{text}\n{folder / 'bench.json'}\n"
    recorded = json.loads((folder / "bench.json").read_text())
    assert tuple(recorded["tables"]) == tables
    for name, table in recorded["tables"].items():
        assert f"\n{name}: " in text
        assert all(math.isfinite(row["median"]) for row in table["rows"])
    assert "cores" in recorded["machine"]
    assert f"torch {torch.__version__.partition('+')[0]}" in recorded["versions"]
    assert set(recorded["peers"]) == {"timm", "lightning", "accelerate"}
    assert recorded["command"].startswith(f"python -m runner bench {tables[0]}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clips"], "TABLE=clips  is no table: use clip, parallel"),
        (["parity", "--with", "deepspeeds"], "--with=deepspeeds  is no tool that parity knows"),
        (["start", "--output", "."], "holds an earlier benchmark"),
        (["clip", "--device", "cuda", "--output", "out"], "no CUDA device"),
        (["gpu", "--output", "out"], "TABLE=gpu  needs a CUDA device"),
    ],
)
def test_a_wrong_request_measures_nothing(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "bench.json").write_text("{}")
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_a_table_that_cannot_be_measured_fails_with_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("runner.bench.loop.ANSWERS", {"--help": 3})
    words = ["--quick", "--output", str(tmp_path / "out")]
    assert main(["bench", "start", *words]) == 1
    assert "ended with 0, not 3" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_training_ends_the_benchmark(tmp_path, monkeypatch, number, code):
    def rows(setting):
        stop.defer()  # as a training does
        stop.request(number)
        yield row("first", [1.0])
        raise AssertionError("it goes on")

    monkeypatch.setattr("runner.bench.loop.rows", rows)
    assert main(["bench", "loop", "--output", str(tmp_path / "out")]) == code


def test_the_order_of_the_sides_rotates_from_round_to_round():
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
    expected = [*np.percentile(values, (25, 50, 75)), number]
    assert spread(row("", values.tolist())) == pytest.approx(expected)


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
    compared_row = compared("resnet34", times, "ours", "torch", 0.5, bare="step", steps=100)
    line = "resnet34 0.50 0.50 - 0.50 0.50 step 10.00 torch 30.00 ours 20.00"
    assert " ".join(line_of(compared_row).split()) == line
    assert "0.60 missed" in line_of(compared("", times, "ours", "torch", 0.6))
    assert " ".join(line_of(row("s", [3.5], 4.0, "s")).split()) == "s 3.50 s 3.50 - 3.50 4.00"
