"""A live bar on a terminal, lines elsewhere, and TensorBoard's record."""

import io
import math
import os
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from runner import GradientClipping, Log, Trainer
from runner.cli.main import main
from runner.run_folder.strict_json import Row, read_rows
from runner.telemetry.sinks.console import TerminalSink
from runner.telemetry.sinks.tensorboard import TensorboardSink
from runner.train import preflight
from tests.process import ROOT
from tests.terminal import on_a_terminal

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}


def row(step, **more):
    values: Row = {"train/step": step, "train/loss": 0.123, "grad/norm": 0.456, "time/step_s": 0.04}
    values |= {"clip/ratio": float(step % 2), "throughput/samples_per_s": 812.4}
    return values | {key.replace("_", "/", 1): value for key, value in more.items()}


def lines(rows, total=None, every=1, summary=None, code=None):
    """What a stream that is no terminal receives."""
    stream = io.StringIO()
    sink = TerminalSink(total, every, "t", stream)
    for row in rows:
        sink.write(row)
    for _ in range(2 if code is not None else 0):
        sink.close(summary, code)
    return stream.getvalue().splitlines()


SUMMARY = {"final": {"train/loss": 0.1, "eval/loss": 0.0912, "eval/accuracy": 0.975}}
SUMMARY |= {"grad/norm": {"p50": 0.5, "p90": 1.25, "p99": 3.5}}
SUMMARY |= {"clip/ratio_total": 0.37, "steps": 450, "wall_s": 12.34}
CLIPPED = [{"train/step": n, "clip/ratio": float(n <= 3 or n > 15)} for n in range(1, 21)]
WHOLE = "step 100/450  eta 0:14  loss 0.123  norm 0.456  clipped 0 %  eval 0.0912 / 97.5 %"
SUMMARY_LINES = """t: finished after 450 steps in 12.3 s
eval 0.0912 / 97.5 %
gradient norm  p50 0.500  p90 1.25  p99 3.50  clipped 37 % of the steps"""


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([row(100, eval_loss=0.0912, eval_accuracy=0.975)], (450,), f"{WHOLE}  812 samples/s"),
        (CLIPPED, (None, 10), "step 10  clipped 30 %\nstep 20  clipped 50 %"),
        ([], (450, 1, SUMMARY, 0), SUMMARY_LINES),
        ([{"train/step": 15}], (30, 10, None, 1), "step 15/30\nt: failed after 15 of 30 steps"),
    ],
)
def test_lines_of_a_file(rows, options, expected):
    assert lines(rows, *options) == expected.split("\n")


PROGRAM = """
import sys
from runner.telemetry.sinks.console import TerminalSink
sink = TerminalSink(30, 10, "my-run", sys.stderr)
for step in range(1, 31):
    row = {"train/step": step, "train/loss": 0.5, "grad/norm": 1.5, "clip/ratio_total": 0.25,
           "clip/ratio": 0.25, "throughput/samples_per_s": 900.0, "time/step_s": 0.02}
    sink.write(row | ({"eval/loss": 0.25, "eval/accuracy": 0.5} if step % 10 == 0 else {}))
sink.close({"guidance": ["look at clip.threshold"]}, 0)
"""


@pytest.mark.parametrize(
    ("columns", "shown", "cut"),
    [(40, "30/30  eta 00:00  loss 0.500  norm", "eval"), (120, "900 samples/s  |", "\0")],
)
def test_a_terminal_gets_a_live_bar_that_fits_it(columns, shown, cut):
    seen, code = on_a_terminal([sys.executable, "-c", PROGRAM], ENVIRONMENT, columns)
    assert code == 0
    bars = [part.strip("\n") for part in seen.split("\r") if "/30" in part and "my-" not in part]
    assert len(bars) >= 4
    assert max(map(len, bars)) <= columns
    assert bars[-1].startswith("30/30")
    assert shown in bars[-1]
    assert cut not in bars[-1]
    ended = seen.replace("\r", "").splitlines()
    assert any(line.startswith("my-run: finished") for line in ended)
    assert "look at clip.threshold" in ended


LINES = """
import logging, sys
from runner.telemetry.sinks.console import ConsoleHandler, TerminalSink, print_line
sink = TerminalSink(1, 1, "run", sys.stderr)
print_line("clip-runner: cpu, one rank")
sink.write({"train/step": 1})
sink.close({"guidance": ["the threshold clipped all of the steps, raise clip.threshold"]}, 0)
logging.getLogger().addHandler(ConsoleHandler())
logging.warning("a message that is longer than the terminal: see python -m runner report RUN")
print_line("  python -m runner clip=norm clip.threshold=0.25")
"""


narrow_terminal = pytest.mark.xdist_group("narrow terminal")  # it is started once


@pytest.fixture(scope="module")
def narrow():
    """Lines on a terminal of 40 columns."""
    seen, code = on_a_terminal([sys.executable, "-c", LINES], ENVIRONMENT, 40)
    assert code == 0
    return seen.replace("\x1b[K", "").replace("\r", "\n").splitlines()


@narrow_terminal
def test_lines_on_a_terminal_end_at_a_word(narrow):
    assert narrow[0] == "clip-runner: cpu, one rank"
    assert "  raise clip.threshold" in narrow
    assert all(len(line) <= 40 or "python -m runner" in line for line in narrow)


@narrow_terminal
def test_a_command_on_a_terminal_is_left_whole(narrow):
    assert "  python -m runner report RUN" in narrow
    assert "  python -m runner clip=norm clip.threshold=0.25" in narrow


SCRIPT = """
from torch import nn, zeros
from runner import Trainer
loader = [(zeros(2, 3), zeros(2).long())] * 6
Trainer(nn.Linear(3, 2), loader, "2ep", accumulation_steps=4).fit()
"""


def test_a_script_on_a_terminal_shows_the_bar():
    seen, code = on_a_terminal([sys.executable, "-c", SCRIPT], ENVIRONMENT, 100)
    assert code == 0
    assert "4/4  eta 00:00  loss 0." in seen
    assert "training: finished after 4 steps" in seen


def fit_in_lines(log, capsys):
    """Train a model of two classes for 4 steps; the summary, and what is printed."""
    torch.manual_seed(0)
    loader = [(torch.randn(2, 3), torch.zeros(2).long())] * 4
    summary = Trainer(nn.Linear(3, 2), loader, "1ep", GradientClipping("norm", 0.1), log=log).fit()
    return summary, capsys.readouterr().err.splitlines()


def test_a_script_without_a_terminal_shows_lines(capsys):
    _, shown = fit_in_lines(Log(), capsys)
    assert [line.split()[1] for line in shown[:4]] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_training_without_a_record_says_so(capsys, tmp_path):
    _, without = fit_in_lines(Log(), capsys)
    _, recorded = fit_in_lines(Log(tmp_path / "rows.jsonl"), capsys)
    assert any("nothing was recorded" in line for line in without)
    assert not any("nothing was recorded" in line for line in recorded)


def test_a_file_that_log_names_has_the_row_of_each_step(capsys, tmp_path):
    summary, _ = fit_in_lines(Log([tmp_path / "mine" / "rows.jsonl"]), capsys)
    rows = [*read_rows(tmp_path / "mine" / "rows.jsonl")]
    assert [row["train/step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["train/loss"] == summary["final"]["train/loss"]


def test_the_end_of_a_run_says_what_other_thresholds_would_have_clipped(capsys):
    _, shown = fit_in_lines(Log(what_if=[1e-6, 1e6]), capsys)
    assert "other thresholds would have clipped  1e-06 100 %  1e+06 0 %" in shown


def test_a_summary_is_shown_in_one_line(capsys):
    summary, _ = fit_in_lines(Log(bar=False), capsys)
    assert repr(summary).startswith("<Summary: steps 4, train/loss 0.")
    assert "clipped 100 %" in repr(summary)


SHORT = ["device=cpu", "train.max_duration=4ba", "eval.interval=2ba", "model.width=4"]


def assert_holds(folder, rows):
    """The scalars are those of ``rows``, in float32, and no others."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {key for row in rows for key in row} - {"train/step"}
    for tag in tags:
        expected = {row["train/step"]: row[tag] for row in rows if tag in row}
        logged = {event.step: event.value for event in events.Scalars(tag)}
        assert logged == pytest.approx(expected, rel=1e-6, nan_ok=True)


def recorded_by_tensorboard(folder):
    """The rows of a run whose sink was closed twice, as by a signal."""
    rows = [{"train/step": n, "train/loss": float(n)} for n in range(1, 6)]
    rows[1] |= {"grad/norm": math.inf, "train/loss": math.nan}
    sink = TensorboardSink(folder)
    for row in rows:
        sink.write(row)
    sink.close({}, 0)
    sink.close(None, 143)
    return rows


def test_a_run_of_tensorboard_has_every_metric_of_every_row(tmp_path):
    rows = recorded_by_tensorboard(tmp_path)
    assert_holds(tmp_path, rows)


def test_a_run_of_tensorboard_that_continues_takes_rows_back(tmp_path):
    rows = recorded_by_tensorboard(tmp_path)
    sink = TensorboardSink(tmp_path, continued_after=3)
    again = {"train/step": 4, "train/loss": 40.0}
    sink.write(again)
    sink.close({}, 0)
    assert_holds(tmp_path, [*rows[:3], again])


def test_an_unknown_or_missing_tracker_is_refused(outputs, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    for name, named in (("tensorboard", "clip-runner[tensorboard]"), ("tensorbord", "tensorboard")):
        assert main([*SHORT, "tracker=none", f"tracker.also=[{name}]"]) == 2, name
        message = capsys.readouterr().err
        assert "tracker.also" in message, name
        assert named in message, name
    assert not outputs.exists()
