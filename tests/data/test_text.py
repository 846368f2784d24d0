import errno
import os
import sysconfig
from pathlib import Path

import pytest
import torch

from runner.data import IGNORED, DataUnavailable
from runner.data.text import ByteWindows, text


def read(path, **changes):
    sizes = {"sequence_length": 4, "test_fraction": 0.25, "max_bytes": 10_000}
    return text(path=None if path is None else str(path), **{**sizes, **changes})


def joined(windows):
    """The bytes that the targets of all windows hold, and the first input before them."""
    inputs, targets = windows.__getitems__(list(range(len(windows))))
    flat = targets.flatten()
    return bytes([int(inputs[0, 0]), *flat[flat != IGNORED].tolist()])


@pytest.mark.parametrize("size", range(2, 14))
def test_windows_predict_every_byte_but_the_first_exactly_once(size):
    content = bytes(range(200, 200 + size))
    windows = ByteWindows(content, 4)
    assert len(windows) == -(-(size - 1) // 4)
    assert joined(windows) == content
    inputs, targets = windows.__getitems__(list(range(len(windows))))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (len(windows), 4)
    for index in range(len(windows)):
        x, y = windows[index]
        assert torch.equal(x, inputs[index])
        assert torch.equal(y, targets[index])
        assert bytes(x.tolist()).rstrip(b"\0") == content[index * 4 : index * 4 + 4]


def test_the_last_short_window_is_padded_with_ignored_targets():
    windows = ByteWindows(b"abcdefg", 4)
    inputs, targets = windows[1]
    assert inputs.tolist() == [*b"efg", 0]
    assert targets.tolist() == [*b"fg", IGNORED, IGNORED]


def test_no_window_is_made_of_padding_alone():
    windows = ByteWindows(b"abcde", 4)
    assert len(windows) == 1
    assert windows[0][1].tolist() == list(b"bcde")


def test_the_end_of_the_text_is_held_out(tmp_path):
    content = bytes(range(100))
    (tmp_path / "file").write_bytes(content)
    data = read(tmp_path / "file")
    assert data.items == "tokens"
    assert data.tokens_per_sample == 4
    assert joined(data.train) == content[:75]
    assert joined(data.test) == content[75:]


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path):
    for name, content in {
        "b/z": b"third",
        "b/a/deep": b"fourth",
        "c": b"second",
        "a": b"first",
        ".git/objects": b"hidden",
        ".hidden": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    data = read(tmp_path)
    assert joined(data.train) + joined(data.test) == b"firstsecondthirdfourth"


def test_reading_stops_at_the_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 30)
    (tmp_path / "b").write_bytes(b"b" * 30)
    data = read(tmp_path, max_bytes=40)
    assert joined(data.train) + joined(data.test) == b"a" * 30 + b"b" * 10


def test_without_a_path_it_is_the_standard_library():
    data = read(None, sequence_length=128)
    again = read(None, sequence_length=128)
    content = joined(data.train) + joined(data.test)
    assert content == joined(again.train) + joined(again.test)
    assert len(content) == 10_000
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.name)
    assert content.startswith(first.read_bytes()[:1000])


def test_the_standard_library_is_its_own_sources_only(tmp_path, monkeypatch):
    for name in (
        "os.py",
        "os.pyc",
        "lib.so",
        "json/decoder.py",
        "json/tests/test_decoder.py",
        "site-packages/torch.py",
        "test/test_os.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"<{name}>".encode())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    data = read(None)
    assert joined(data.train) + joined(data.test) == b"<os.py><json/decoder.py>"


def assert_names_the_ways_forward(error, path):
    for words in (str(path), "data.path", "file or folder", "data.path=null"):
        assert words in str(error)


@pytest.mark.parametrize("content", [None, {}, {"empty": b""}, {"tiny": b"abc"}])
def test_nothing_to_read_names_the_path_and_the_ways_forward(tmp_path, content):
    path = tmp_path / "folder"
    if content is not None:
        path.mkdir()
        for name, raw in content.items():
            (path / name).write_bytes(raw)
    with pytest.raises(DataUnavailable) as caught:
        read(path)
    assert_names_the_ways_forward(caught.value, path)


def test_a_path_that_is_neither_file_nor_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataUnavailable) as caught:
        read(tmp_path / "pipe")
    assert_names_the_ways_forward(caught.value, tmp_path / "pipe")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(self, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    (tmp_path / "secret").write_bytes(b"x" * 100)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataUnavailable, match="Permission denied") as caught:
        read(tmp_path)
    assert_names_the_ways_forward(caught.value, tmp_path / "secret")


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 0},
        {"max_bytes": 0},
        {"test_fraction": 0.0},
        {"test_fraction": 1.0},
        {"test_fraction": float("nan")},
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, change):
    (tmp_path / "file").write_bytes(b"x" * 100)
    (name,) = change
    with pytest.raises(ValueError, match=name):
        read(tmp_path, **change)
