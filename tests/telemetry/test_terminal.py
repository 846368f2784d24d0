"""A person sees a live bar on a terminal and readable lines elsewhere, whatever the figures are."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from runner.telemetry.sink import Row
from runner.telemetry.terminal import TerminalSink, is_watched

ROOT = Path(__file__).parents[2]
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
    assert [line.split()[1] for line in _lines(stream)] == ["10/25", "13/25", "20/25"]
    sink.close(None, 0)
    sink.close(None, 0)
    assert [line.split()[1] for line in _lines(stream)[3:4]] == ["25/25"]
    assert _lines(stream)[4:] == ["t: finished  25 steps"]


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
        "t: failed  3 steps",
        "eval inf  (loss / accuracy)",
        "|G|  p50 nan",
    ]


def test_the_summary_is_at_most_three_lines() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    TerminalSink(450, 1, "my-run", stream).close(SUMMARY, 0)
    stream.seek(0)
    assert stream.read().splitlines() == [
        "my-run: finished  450 steps  12.3 s",
        "eval 0.0912 / 97.5 %  (loss / accuracy)",
        "‖G‖  p50 0.500  p90 1.25  p99 3.50  clipped 37 % of the steps",
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
    TerminalSink(450, 1, "t", stream).close(SUMMARY, 0)
    assert b"|G|  p50 0.500" in raw.getvalue()


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
import sys, time
from runner.telemetry.terminal import TerminalSink
sink = TerminalSink(30, 10, "my-run", sys.stderr)
try:
    for step in range(1, 31):
        row = {"train/step": step, "train/loss": 0.5, "grad/norm": 1.5, "clip/ratio_total": 0.25,
               "throughput/samples_per_s": 900.0, "time/step_s": 0.02}
        if step == 10:
            row |= {"eval/loss": 0.25, "eval/accuracy": 0.5}
        sink.write(row)
        time.sleep(0.02)
        if len(sys.argv) > 1 and step == 15:
            raise RuntimeError("broke off")
finally:
    sink.close(None, 1 if len(sys.argv) > 1 else 0)
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
    assert len(drawn) >= 3
    last = drawn[-1]
    for figure in ("30/30", "loss 0.500", "norm 1.50", "clipped 25 %", "eval 0.250 / 50.0 %"):
        assert figure in last
    assert "900 samples/s" in last
    assert "eta 0:00" in last
    assert seen.replace("\r", "").endswith("\nmy-run: finished  30 steps\n")


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_gets_what_fits_on_one_line(columns: int) -> None:
    seen = _plain(_on_a_terminal(columns))
    bars = [part for part in seen.split("\r") if "/30" in part and "step" not in part]
    assert bars
    assert max(len(part.strip("\n")) for part in bars) <= columns
    if columns >= 40:
        assert any("loss" in part for part in bars)


def test_no_color_is_honoured() -> None:
    assert "\x1b[3" in _on_a_terminal(80)
    assert "\x1b[3" not in _on_a_terminal(80, NO_COLOR="1")


def test_an_exception_leaves_a_usable_shell_and_a_readable_traceback() -> None:
    seen = _on_a_terminal(100, "break")
    assert "\x1b[?25l" not in seen
    lines = [line.split("\r")[-1] for line in _plain(seen).replace("\r\n", "\n").split("\n")]
    assert "my-run: failed  15 steps" in lines
    assert "RuntimeError: broke off" in lines
