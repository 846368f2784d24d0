"""A person sees a live bar on a terminal and readable lines elsewhere, whatever the figures are."""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner.run_folder.rows import Row
from runner.telemetry.sinks.terminal import ConsoleHandler, TerminalSink, is_watched
from runner.train.progress import steps_between_lines

ROOT = Path(__file__).parents[3]
SUMMARY: dict[str, Any] = {
    "final": {"train/loss": 0.1, "eval/loss": 0.0912, "eval/accuracy": 0.975},
    "grad/norm": {"p50": 0.5, "p90": 1.25, "p99": 3.5},
    "clip/ratio_total": 0.37,
    "steps": 450,
    "wall_s": 12.34,
}


def _row(step: int, **more: float) -> Row:
    return {
        "train/step": step,
        "train/loss": 0.123,
        "grad/norm": 0.456,
        "clip/ratio": float(step % 2),
        "clip/ratio_total": 0.37,
        "throughput/samples_per_s": 812.4,
        "time/step_s": 0.04,
        **{key.replace("_", "/", 1): value for key, value in more.items()},
    }


def _lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_line_holds_the_figures_worth_a_look() -> None:
    stream = io.StringIO()
    sink = TerminalSink(450, 1, "t", stream)
    sink.write(_row(100, eval_loss=0.0912, eval_accuracy=0.975))
    assert _lines(stream) == [
        "step 100/450  loss 0.123  norm 0.456  clipped 0 %  eval 0.0912 / 97.5 %"
        "  812 samples/s  eta 0:14"
    ]


def test_lines_come_at_the_interval_with_an_evaluation_and_at_the_end() -> None:
    stream = io.StringIO()
    sink = TerminalSink(25, 10, "t", stream)
    for step in range(1, 26):
        sink.write(_row(step, eval_loss=1.0) if step == 13 else _row(step))
    assert [line.split()[1] for line in _lines(stream)] == ["10/25", "13/25", "23/25"]
    sink.close(None, 0)
    sink.close(None, 0)
    assert [line.split()[1] for line in _lines(stream)[3:4]] == ["25/25"]
    assert _lines(stream)[4:] == ["t: finished after 25 steps"]


@pytest.mark.parametrize("evaluation", [1, 10, 45, 50, 60, 75, 120, 225, 1000])
def test_lines_and_evaluations_have_one_rhythm(evaluation: int) -> None:
    stream = io.StringIO()
    total = 3 * evaluation
    sink = TerminalSink(total, steps_between_lines(evaluation, 50), "t", stream)
    for step in range(1, total + 1):
        sink.write(_row(step, eval_loss=1.0) if step % evaluation == 0 else _row(step))
    steps = [int(line.split()[1].partition("/")[0]) for line in _lines(stream)]
    assert set(range(evaluation, total + 1, evaluation)) <= set(steps)
    apart = [after - before for before, after in pairwise([0, *steps])]
    parts = len(steps) // 3  # the last part of each evaluation interval takes up the rounding
    assert max(apart) - min(apart) < max(parts, 1)
    assert max(apart) <= 75
    assert evaluation < 50 or min(apart) >= 34


def test_one_step_is_not_1_steps() -> None:
    stream = io.StringIO()
    TerminalSink(1, 1, "t", stream).close({"steps": 1}, 0)
    TerminalSink(100, 1, "t", stream).close({"steps": 1}, 130)
    assert _lines(stream) == ["t: finished after 1 step", "t: interrupted after 1 of 100 steps"]


def test_the_last_row_is_not_shown_twice() -> None:
    stream = io.StringIO()
    sink = TerminalSink(20, 10, "t", stream)
    for step in range(1, 21):
        sink.write(_row(step))
    sink.close(None, 0)
    assert sum("20/20" in line for line in _lines(stream)) == 1


def test_a_line_counts_the_clipped_steps_since_the_line_before() -> None:
    stream = io.StringIO()
    sink = TerminalSink(None, 10, "t", stream)
    for step in range(1, 21):
        sink.write({"train/step": step, "clip/ratio": 1.0 if step <= 3 or step > 15 else 0.0})
    assert _lines(stream) == ["step 10  clipped 30 %", "step 20  clipped 50 %"]


def test_missing_keys_and_numbers_that_are_not_finite_are_shown() -> None:
    stream = io.StringIO()
    sink = TerminalSink(None, 1, "t", stream)
    sink.write({"train/step": 1})
    sink.write({"train/step": 2, "train/loss": math.nan, "grad/norm": math.inf})
    sink.write({"train/step": 3, "eval/accuracy": 0.5, "throughput/samples_per_s": math.nan})
    sink.close({"grad/norm": {"p50": math.nan}, "final": {"eval/loss": math.inf}}, 1)
    assert _lines(stream) == [
        "step 1",
        "step 2  loss nan  norm inf",
        "step 3  eval 50.0 %  nan samples/s",
        "t: failed after 3 steps",
        "eval inf  (loss / accuracy)",
        "gradient norm  p50 nan",
    ]


def test_the_summary_is_at_most_three_lines() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    TerminalSink(450, 1, "my-run", stream).close(SUMMARY, 0)
    stream.seek(0)
    assert stream.read().splitlines() == [
        "my-run: finished after 450 steps in 12.3 s",
        "eval 0.0912 / 97.5 %  (loss / accuracy)",
        "gradient norm  p50 0.500  p90 1.25  p99 3.50  clipped 37 % of the steps",
    ]


@pytest.mark.parametrize(
    ("exit_code", "word"),
    [(0, "finished"), (1, "failed"), (130, "interrupted"), (143, "terminated")],
)
def test_the_summary_says_how_it_ended(exit_code: int, word: str) -> None:
    stream = io.StringIO()
    TerminalSink(1, 1, "t", stream).close(None, exit_code)
    assert _lines(stream) == [f"t: {word}"]


def test_an_ascii_stream_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    TerminalSink(450, 1, "t", stream).close(SUMMARY | {"guidance": ["the largest ‖G‖"]}, 0)
    assert b"the largest |G|" in raw.getvalue()


def test_a_broken_stream_ends_the_show_and_not_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    sink = TerminalSink(3, 1, "t", stream)
    for step in range(1, 4):
        sink.write(_row(step))
    sink.close(SUMMARY, 0)
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_file_and_a_dumb_terminal_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_watched(io.StringIO())
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as stream:
        monkeypatch.setenv("TERM", "xterm")
        assert is_watched(stream)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_watched(stream)
    assert not is_watched(stream)


PROGRAM = """
import sys
from runner.telemetry.sinks import terminal
from runner.telemetry.sinks.terminal import TerminalSink
terminal.REDRAW_SECONDS = 0
sink = TerminalSink(30, 10, "my-run", sys.stderr)
try:
    for step in range(1, 31):
        row = {"train/step": step, "train/loss": 0.5, "grad/norm": 1.5, "clip/ratio_total": 0.25,
               "throughput/samples_per_s": 900.0, "time/step_s": 0.02}
        if step == 10:
            row |= {"eval/loss": 0.25, "eval/accuracy": 0.5}
        sink.write(row)
        if len(sys.argv) > 1 and step == 15:
            raise RuntimeError("broke off")
finally:
    guidance = {"guidance": ["0123456 " * 40]}
    sink.close(None if len(sys.argv) > 1 else guidance, len(sys.argv) - 1)
"""


def _on_a_terminal(columns: int, *words: str, **environ: str) -> str:
    """What a terminal of that width receives from the program above."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(follower)
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=ROOT,
        stderr=follower,
        env={**env, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environ},
    )
    seen = bytearray()
    os.set_blocking(leader, False)
    while True:
        ended = process.poll() is not None
        try:
            seen += os.read(leader, 65536)
        except BlockingIOError:
            if ended:
                break
    assert termios.tcgetattr(follower) == before
    os.close(leader)
    os.close(follower)
    return seen.decode()


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_a_live_bar() -> None:
    seen = _plain(_on_a_terminal(150))
    drawn = [part for part in seen.split("\r") if "/30" in part]
    assert len(drawn) >= 30
    last = drawn[-1]
    for figure in ("30/30", "loss 0.500", "norm 1.50", "clipped 25 %", "eval 0.250 / 50.0 %"):
        assert figure in last
    assert "900 samples/s" in last
    assert "eta 0:00" in last
    assert "\nmy-run: finished after 30 steps\n" in seen.replace("\r", "")


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_gets_what_fits_on_one_line(columns: int) -> None:
    seen = _plain(_on_a_terminal(columns))
    bars = [part for part in seen.split("\r") if "/30" in part and "step" not in part]
    assert bars
    assert max(len(part.strip("\n")) for part in bars) <= columns
    if columns >= 40:
        assert any("loss" in part for part in bars)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (20, ["eta"]),
        (40, ["loss", "eta"]),
        (60, ["loss", "clipped", "eval 50.0 %", "eta"]),
        (80, ["|", "loss", "norm", "clipped", "eval 50.0 %", "eta"]),
        (120, ["|", "loss", "norm", "clipped", "eval 0.250 / 50.0 %", "900 samples/s", "eta"]),
    ],
)
def test_the_least_useful_parts_are_dropped_first(columns: int, shown: list[str]) -> None:
    seen = _plain(_on_a_terminal(columns))
    last = [part for part in seen.split("\r") if part.startswith("30/30")][-1]
    parts = ["|", "loss", "norm", "clipped", "eval 50.0 %", "eval 0.250 / 50.0 %", "samples/s"]
    for part in [*parts, "eta 0:00"]:
        assert (part in last) == any(part in kept or kept in part for kept in shown), part


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_guidance_breaks_between_words(columns: int) -> None:
    lines = _plain(_on_a_terminal(columns)).replace("\r", "").splitlines()
    guidance = [line for line in lines if line.startswith("0123456")]
    assert {word for line in guidance for word in line.split()} == {"0123456"}
    assert sum(len(line.split()) for line in guidance) == 40
    assert columns - 9 < len(guidance[0]) < columns


def test_a_pipe_gets_each_sentence_on_one_line() -> None:
    stream = io.StringIO()
    TerminalSink(1, 1, "t", stream).close({"guidance": ["word " * 40]}, 0)
    assert _lines(stream)[1] == "word " * 40


def test_a_warning_takes_the_place_of_the_bar_on_a_terminal() -> None:
    record = logging.LogRecord("runner", logging.WARNING, "", 0, "word " * 30, None, None)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as stream:
        ConsoleHandler(stream).handle(record)
        seen = os.read(leader, 65536).decode()
    assert seen.startswith("\r\x1b[Kwarning: word word")
    assert max(len(line) for line in _plain(seen).splitlines()) < 60
    assert ConsoleHandler(io.StringIO()).format(record) == "warning:" + " word" * 30


def test_no_color_is_honoured() -> None:
    assert "\x1b[3" in _on_a_terminal(80)
    assert "\x1b[3" not in _on_a_terminal(80, NO_COLOR="1")


def test_an_exception_leaves_a_usable_shell_and_a_readable_traceback() -> None:
    seen = _on_a_terminal(100, "break")
    assert "\x1b[?25l" not in seen
    lines = [line.split("\r")[-1] for line in _plain(seen).replace("\r\n", "\n").split("\n")]
    assert "my-run: failed after 15 of 30 steps" in lines
    assert "RuntimeError: broke off" in lines
