"""Windows of the bytes of a file, a folder or the standard library, plain and masked."""

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from runner.data import IGNORED, DataUnavailable
from runner.data.text import BYTES, MASK, ByteWindows, masked_text, text


def read(path, sequence_length=4, test_fraction=0.25, max_bytes=10_000):
    return text(path and str(path), sequence_length, test_fraction, max_bytes)


def whole(part):
    return part.__getitems__(list(range(len(part))))


def joined(*parts):
    """The bytes that the targets of all windows hold, and the first input before them."""
    content = b""
    for inputs, targets in map(whole, parts):
        flat = targets.flatten()
        content += bytes([int(inputs[0, 0]), *flat[flat != IGNORED].tolist()])
    return content


@pytest.mark.parametrize("size", [2, 4, 5, 6, 9, 13])
def test_windows_predict_every_byte_but_the_first_exactly_once(size):
    content = bytes(range(200, 200 + size))
    windows = ByteWindows(content, 4)
    inputs, targets = whole(windows)
    assert joined(windows) == content
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (-(-(size - 1) // 4), 4)
    for index in range(len(windows)):
        assert all(map(torch.equal, windows[index], (inputs[index], targets[index])))
        assert bytes(inputs[index]) == content[index * 4 : index * 4 + 4].ljust(4, b"\0")


@pytest.fixture
def folder(tmp_path):
    files = {"b/z": b"third", "b/a/deep": b"fourth", "c": b"second", "a": b"first"}
    for name, content in {**files, ".git/objects": b"hidden", ".hidden": b"hidden"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_files_are_read_in_the_order_of_names(folder):
    data = read(folder)
    assert (data.items, data.tokens_per_sample) == ("tokens", 4)
    assert joined(data.train, data.test) == b"firstsecondthirdfourth"


def test_files_are_read_up_to_a_limit(folder):
    data = read(folder, max_bytes=13)
    assert joined(data.train, data.test) == b"firstsecondth"


def test_the_end_of_a_file_is_held_out(tmp_path):
    (tmp_path / "c").write_bytes(bytes(range(100)))
    data = read(tmp_path / "c")
    assert (joined(data.train), joined(data.test)) == (bytes(range(75)), bytes(range(75, 100)))


def test_without_a_path_the_standard_library_is_read():
    data = read(None, sequence_length=128)
    library = min(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.name)
    assert joined(data.train, data.test).startswith(library.read_bytes()[:1000])


def test_a_path_without_enough_text_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "tiny").write_bytes(b"abc")
    for name in ("missing", "pipe", "tiny"):
        with pytest.raises(DataUnavailable, match=rf"data\.path: {tmp_path / name}.*=null"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "value"), [("sequence_length", 0), ("max_bytes", 0), ("test_fraction", 1.0)]
)
def test_a_wrong_number_is_named(tmp_path, name, value):
    (tmp_path / "tiny").write_bytes(b"abc")
    with pytest.raises(ValueError, match=name):
        read(tmp_path / "tiny", **{name: value})


@pytest.fixture
def masked(tmp_path):
    """A function that reads a text masked, and the same text plain.

    Its bytes are above 128: none is a random byte below, nor the zero of padding.
    """
    sizes = (str(tmp_path / "text"), 16, 0.25, 100_000)
    (tmp_path / "text").write_bytes(bytes(128 + number % 100 for number in range(40_001)))

    def load(masked_fraction=0.15, seed=0):
        return masked_text(*sizes, masked_fraction, seed)

    return load, text(*sizes)


def test_masked_targets_are_the_text_where_it_is_chosen(masked):
    load, plain = masked
    data = load()
    for part, original in ((data.train, plain.train), (data.test, plain.test)):
        inputs, targets = whole(part)
        shown, _ = whole(original)
        assert inputs.shape == targets.shape == (len(original), 16)
        chosen = targets != IGNORED
        assert torch.equal(targets[chosen], shown[chosen])
        assert torch.equal(inputs[~chosen], shown[~chosen])


def test_chosen_bytes_are_masked_or_replaced_or_kept_by_their_shares(masked):
    load, _ = masked
    inputs, targets = whole(load().train)
    chosen = targets != IGNORED
    shown = inputs[chosen]
    is_masked = shown == MASK
    is_kept = shown == targets[chosen]
    shares = [float(share.float().mean()) for share in (chosen, is_masked, is_kept)]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.02)
    random = shown[~is_masked & ~is_kept].unique()
    assert random.max() < BYTES
    assert len(random) > 100


def test_padding_is_never_chosen(masked):
    load, _ = masked
    _, targets = whole(load(1.0).test)  # ends inside a window
    assert int((targets[-1] != IGNORED).sum()) < 16


def test_bytes_are_chosen_anew_for_each_window(masked):
    load, _ = masked
    _, targets = whole(load().train)
    chosen = targets != IGNORED
    assert not torch.equal(chosen[0], chosen[1])


def test_masking_draws_no_random_numbers_of_the_training(masked):
    load, _ = masked
    inputs, targets = whole(load().train)
    torch.rand(3)
    train = load().train
    assert all(map(torch.equal, (inputs, targets), whole(train)))
    assert torch.equal(train[7][0], inputs[7])


def test_another_seed_chooses_other_bytes(masked):
    load, _ = masked
    assert not torch.equal(whole(load(seed=1).train)[1], whole(load().train)[1])


def test_another_epoch_chooses_other_bytes(masked):
    load, _ = masked
    train = load().train
    _, targets = whole(train)
    train.set_epoch(1)
    assert not torch.equal(whole(train)[1], targets)


@pytest.mark.parametrize("fraction", [0.0, 1.1, float("nan")])
def test_a_wrong_masked_fraction_is_named(masked, fraction):
    load, _ = masked
    with pytest.raises(ValueError, match="masked_fraction"):
        load(fraction)
