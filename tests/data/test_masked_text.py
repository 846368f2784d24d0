import pytest
import torch

from runner.data import IGNORED
from runner.data.masked_text import BYTES, MASK, masked_text
from runner.data.text import text

LENGTH = 16
SIZES = {"sequence_length": LENGTH, "test_fraction": 0.25}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text"
    # Above 128, so that no byte of the text is a random byte below, nor the zero of padding.
    path.write_bytes(bytes(128 + number % 100 for number in range(40_001)))
    return path


def load(file, **changes):
    options = {"max_bytes": 100_000, "masked_fraction": 0.15, "seed": 0, **SIZES, **changes}
    return masked_text(str(file), **options)


def whole(part):
    return part.__getitems__(list(range(len(part))))


def test_targets_are_the_text_where_it_is_chosen_and_ignored_elsewhere(file):
    data = load(file)
    plain = text(str(file), max_bytes=100_000, **SIZES)
    for masked, read in ((data.train, plain.train), (data.test, plain.test)):
        assert len(masked) == len(read)
        inputs, targets = whole(masked)
        original, _ = whole(read)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (len(masked), LENGTH)
        chosen = targets != IGNORED
        assert torch.equal(targets[chosen], original[chosen])
        assert torch.equal(inputs[~chosen], original[~chosen])


def test_of_the_chosen_four_in_five_are_masked_and_one_in_ten_is_random(file):
    data = load(file)
    inputs, targets = whole(data.train)
    chosen = targets != IGNORED
    assert float(chosen.float().mean()) == pytest.approx(0.15, abs=0.01)
    shown = inputs[chosen]
    masked, kept = shown == MASK, shown == targets[chosen]
    random = shown[~masked & ~kept]
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.02)
    assert len(random) / len(shown) == pytest.approx(0.1, abs=0.02)
    assert random.max() < BYTES
    assert len(random.unique()) > 100


def test_padding_is_never_chosen(file):
    file.write_bytes(bytes(range(128, 128 + 44)))
    data = load(file, masked_fraction=1.0)
    _, targets = data.train[len(data.train) - 1]
    # 33 bytes to train on: two windows of 16, whose every byte has one that follows.
    assert (targets != IGNORED).all()
    _, targets = data.test[0]
    assert int((targets != IGNORED).sum()) == 10


def test_the_choice_depends_on_seed_epoch_and_sample_alone(file):
    data, again, other = load(file), load(file), load(file, seed=1)
    expected = whole(data.train)
    torch.rand(3)
    for one, two in zip(expected, whole(again.train), strict=True):
        assert torch.equal(one, two)
    alone, _ = data.train[7]
    assert torch.equal(alone, expected[0][7])
    assert not torch.equal(whole(other.train)[1], expected[1])
    data.train.set_epoch(1)
    assert not torch.equal(whole(data.train)[1], expected[1])


def test_neighbouring_windows_are_masked_apart(file):
    _, targets = whole(load(file).train)
    chosen = targets != IGNORED
    assert not torch.equal(chosen[0], chosen[1])


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(file, fraction):
    with pytest.raises(ValueError, match="masked_fraction"):
        load(file, masked_fraction=fraction)
