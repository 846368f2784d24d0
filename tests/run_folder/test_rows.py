"""Rows survive the way through the file bit for bit, and a reader never sees half a row."""

import json
import math
import random
import struct
import threading

import pytest

from runner.run_folder.strict_json import JsonlSink, cut, follow, read_rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_numbers_read_back_bit_for_bit_as_soon_as_they_are_written(path):
    draw = random.Random(0)
    sink = JsonlSink(path)
    drawn = (struct.unpack("<d", draw.randbytes(8))[0] for _ in range(500))
    values = [value for value in drawn if not math.isnan(value)]
    rows = [{"a": value} for value in [*values, -0.0, 5e-324, math.inf, -math.inf, 2**53 + 1]]
    for row in rows[:3]:
        sink.write(row)
        assert [*read_rows(path)][-1] == row
    for row in rows[3:]:
        sink.write(row)
    sink.write({"a": math.nan})
    sink.close(None, 0)
    *back, last = read_rows(path)
    assert back == rows
    for read_back, row in zip(back[:-1], rows, strict=False):
        assert struct.pack("<d", read_back["a"]) == struct.pack("<d", row["a"])
    assert isinstance(back[-1]["a"], int)
    assert math.isnan(last["a"])
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_file_that_is_not_there_has_no_rows(path):
    cut(path, 3)
    assert not path.exists()
    assert [*read_rows(path)] == []


@pytest.fixture
def torn(path):
    """The lines of five rows in a file that ends with a part of a sixth one."""
    sink = JsonlSink(path)
    for step in range(1, 6):
        sink.write({"train/step": step, "grad/norm": math.inf if step == 2 else 0.1 * step})
    sink.close(None, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"train/step": 6, "grad/no')
    return lines


@pytest.mark.usefixtures("torn")
def test_a_row_that_is_torn_is_not_read(path):
    assert [row["train/step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]


def test_rows_after_a_step_are_cut(path, torn):
    for step in (5, 3, 0):
        cut(path, step)
        assert path.read_bytes().splitlines(keepends=True) == torn[:step]


@pytest.fixture
def stopped():
    event = threading.Event()
    event.set()
    return event


def test_a_follower_yields_what_was_written_before_the_end(path, stopped):
    assert list(follow(path, stopped)) == []
    path.write_text('{"train/step": 1}\n{"train/step": 2}\n')
    [row] = follow(path, stopped, start=18)  # without the first one
    assert row == {"train/step": 2}


def test_a_follower_names_a_wrong_line(path, stopped):
    path.write_text('{"train/step": 2}\n{"train/ste\n')
    rows = follow(path, stopped)
    assert next(rows) == {"train/step": 2}
    with pytest.raises(ValueError, match="line 1 column"):
        next(rows)


class Writer(threading.Event):
    """Writes to a file each time that its follower waits, and sets itself at the end."""

    def __init__(self, path, chunks):
        super().__init__()
        self.path, self.chunks = path, chunks

    def wait(self, timeout=None):
        with self.path.open("a") as file:
            file.write(self.chunks.pop(0))
        if not self.chunks:
            self.set()
        return self.is_set()


def test_following_yields_a_row_as_soon_as_it_is_whole(path):
    chunks = ['{"train/step": 1}\n{"train/st', "", 'ep": 2}\n', '{"train/step": 3}\n{"train/ste']
    rows = follow(path, Writer(path, chunks))
    for step, pending in ((1, 3), (2, 1), (3, 0)):
        assert next(rows) == {"train/step": step}
        assert len(chunks) == pending
    assert list(rows) == []


def test_ranks_that_start_again_show_no_step_twice(path):
    path.write_text('{"train/step": 1}\n{"train/step": 2}\n{"train/step": 3}\n')
    writer = Writer(path, ['{"train/step": 2}\n{"train/st', 'ep": 3}\n{"train/step": 4}\n', ""])
    rows = follow(path, writer)
    assert [next(rows)["train/step"] for _ in range(3)] == [1, 2, 3]
    cut(path, 1)
    assert list(rows) == [{"train/step": 4}]
