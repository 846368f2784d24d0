import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from runner.data.dataset import DataUnavailable
from runner.data.digits import digits


def rows(data):
    return {tuple(image.flatten().tolist()) for image in data.inputs}


def test_images_are_the_real_ones_scaled_to_one():
    data = digits(test_fraction=0.2, seed=0)
    assert data.items == "samples"
    assert data.tokens_per_sample is None
    for part in (data.train, data.test):
        assert part.inputs.dtype == torch.float32
        assert part.inputs.shape[1:] == (1, 8, 8)
        assert part.targets.dtype == torch.int64
        assert part.inputs.min() == 0
        assert part.inputs.max() == 1
    ours = {
        (tuple(image.flatten().tolist()), int(target))
        for part in (data.train, data.test)
        for image, target in (part[index] for index in range(len(part)))
    }
    bunch = load_digits()
    theirs = {
        (tuple((image.flatten() / 16).tolist()), int(target))
        for image, target in zip(bunch.images, bunch.target, strict=True)
    }
    assert ours == theirs
    assert len(data.train) + len(data.test) == len(bunch.target)


def test_the_held_out_digits_are_a_fair_share_of_each_and_apart():
    data = digits(test_fraction=0.2, seed=0)
    assert len(data.test) == 360
    held_out = data.test.targets.bincount(minlength=10)
    everything = held_out + data.train.targets.bincount(minlength=10)
    assert ((held_out / everything - 0.2).abs() < 0.01).all()
    assert not rows(data.train) & rows(data.test)


def test_the_seed_decides_the_split():
    first, again, other = (digits(test_fraction=0.2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert rows(first.test) != rows(other.test)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.0001])
def test_a_fraction_that_leaves_a_side_empty_is_refused(fraction):
    with pytest.raises(ValueError, match=r"test_fraction|classes"):
        digits(test_fraction=fraction, seed=0)


@pytest.mark.parametrize("fraction", [0.2, 0.006, 0.1, 0.37, 0.5, 0.99])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_the_split_is_that_of_scikit_learn_to_the_bit(fraction, seed):
    bunch = load_digits()
    data = digits(test_fraction=fraction, seed=seed)
    chosen = train_test_split(
        np.arange(len(bunch.target)),
        test_size=fraction,
        random_state=seed,
        stratify=bunch.target,
    )
    for part, indices in zip((data.train, data.test), chosen, strict=True):
        images = torch.tensor(bunch.images[indices] / 16, dtype=torch.float32)
        assert torch.equal(part.inputs, images.unsqueeze(1))
        assert torch.equal(part.targets, torch.tensor(bunch.target[indices]))


def test_without_scikit_learn_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("runner.data.digits.find_spec", lambda name: None)
    with pytest.raises(DataUnavailable, match="pip install scikit-learn"):
        digits(test_fraction=0.2, seed=0)
