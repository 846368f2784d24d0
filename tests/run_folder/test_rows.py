"""Rows survive the way through the file bit for bit, and a reader never sees half a row."""

from __future__ import annotations

import json
import math
import random
import struct
import threading
from pathlib import Path

import pytest

from runner.run_folder.rows import JsonlSink, Row, cut, follow, last_step, read_rows
from runner.run_folder.strict_json import decode, encode
from tests.process import wait_for


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_floats_read_back_bit_for_bit(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows: list[Row] = []
    while len(rows) < 500:
        (value,) = struct.unpack("<d", draw.randbytes(8))
        if math.isfinite(value):
            rows.append({"train/step": len(rows) + 1, "grad/norm": value})
    rows.append({"train/step": 501, "grad/norm": -0.0})
    rows.append({"train/step": 502, "grad/norm": 5e-324})
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for row in rows:
        sink.write(row)
    sink.close(None, 0)
    back = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["train/step"] for row in back] == [row["train/step"] for row in rows]
    assert [_bits(row["grad/norm"]) for row in back] == [_bits(row["grad/norm"]) for row in rows]


def test_rows_after_a_step_are_cut_and_no_step_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut(path, 3)
    assert not path.exists()
    assert last_step(path) == 0
    sink = JsonlSink(path)
    for step in (1, 2, 2, 3, 4, 5):
        sink.write({"train/step": step, "grad/norm": math.inf if step == 2 else 0.1 * step})
    sink.close(None, 0)
    kept = path.read_bytes().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"train/step": 6, "grad/no')
    assert last_step(path) == 5
    cut(path, 3)
    assert path.read_bytes().splitlines(keepends=True) == [kept[0], kept[1], kept[3]]
    assert list(tmp_path.iterdir()) == [path]
    cut(path, 0)
    assert path.read_bytes() == b""


def test_a_follower_may_leave_out_the_rows_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 1}\n')
    earlier, stopped = path.stat().st_size, threading.Event()
    with path.open("a") as file:
        file.write('{"train/step": 2}\n')
    stopped.set()
    assert list(follow(path, stopped, start=earlier)) == [{"train/step": 2}]


def test_integers_stay_integers() -> None:
    row = decode(encode({"train/step": 2**53 + 1, "train/loss": 1.0}))
    assert row == {"train/step": 2**53 + 1, "train/loss": 1.0}
    assert type(row["train/step"]) is int
    assert type(row["train/loss"]) is float


def test_numbers_that_are_not_finite_are_words_of_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write({"train/step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close(None, 0)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not strict JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line == {"train/step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (row,) = read_rows(path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_every_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 4):
        sink.write({"train/step": step})
        assert len(list(read_rows(path))) == step
    sink.close(None, 0)
    sink.close(None, 0)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 1}\n{"train/step": 2, "train/lo')
    assert list(read_rows(path)) == [{"train/step": 1}]


def test_lines_that_are_no_row_are_skipped_by_a_reader_and_named_while_following(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 1}\n{"train/ste\n[2]\n{"train/step": 3}\n')
    assert list(read_rows(path)) == [{"train/step": 1}, {"train/step": 3}]
    stopped = threading.Event()
    stopped.set()
    rows = follow(path, stopped)
    assert next(rows) == {"train/step": 1}
    with pytest.raises(ValueError, match="line 1 column"):
        next(rows)
    with pytest.raises(ValueError, match=r"\[2\]"):
        decode("[2]")


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert list(read_rows(path)) == []


class _Polled(threading.Event):
    """Counts how often it was waited for: after each look at the file."""

    polls = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.polls += 1
        return super().wait(timeout)


class _Follower:
    """Follows a file in a thread and keeps what came."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self.stopped = _Polled()
        self._thread = threading.Thread(target=self._run, args=(path,))
        self._thread.start()

    def _run(self, path: Path) -> None:
        for row in follow(path, self.stopped, poll=0.01):
            self.rows.append(row)

    def has(self, count: int) -> bool:
        wait_for(lambda: len(self.rows) >= count)
        return len(self.rows) == count

    def looks_again(self) -> None:
        seen = self.stopped.polls
        wait_for(lambda: self.stopped.polls > seen + 1)

    def end(self) -> None:
        self.stopped.set()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()


def test_following_yields_rows_as_they_come_and_keeps_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = _Follower(path)
    follower.looks_again()
    with path.open("w") as file:
        file.write('{"train/step": 1}\n{"train/st')
        file.flush()
        assert follower.has(1)
        follower.looks_again()
        assert len(follower.rows) == 1
        file.write('ep": 2, "x": "NaN"}\n')
        file.flush()
        assert follower.has(2)
        file.write('{"train/step": 3}\n{"train/step": 4')
    follower.end()
    assert [row["train/step"] for row in follower.rows] == [1, 2, 3]
    assert math.isnan(follower.rows[1]["x"])


def test_following_ends_when_the_file_never_comes(tmp_path: Path) -> None:
    follower = _Follower(tmp_path / "metrics.jsonl")
    follower.end()
    assert follower.rows == []


def test_following_misses_nothing_that_was_written_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"train/step": {step}}}\n' for step in range(1000)))
    stopped = threading.Event()
    stopped.set()
    assert len(list(follow(path, stopped))) == 1000
