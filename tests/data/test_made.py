"""Digits of scikit-learn and synthetic samples."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from runner.data import IGNORED
from runner.data.dataset import SUCCESSORS, synthetic
from runner.data.digits import digits


@pytest.mark.parametrize(("fraction", "seed"), [(0.2, 0), (0.006, 1)])
def test_the_digits_are_split_as_scikit_learn_splits_them_to_the_bit(fraction, seed):
    bunch = load_digits()
    data = digits(test_fraction=fraction, seed=seed)
    assert (data.items, data.tokens_per_sample) == ("samples", None)
    split = {"test_size": fraction, "random_state": seed, "stratify": bunch.target}
    chosen = train_test_split(np.arange(len(bunch.target)), **split)
    for part, indices in zip((data.train, data.test), chosen, strict=True):
        images = torch.tensor(bunch.images[indices] / 16, dtype=torch.float32)
        assert torch.equal(part.inputs, images.unsqueeze(1))
        assert torch.equal(part.targets, torch.tensor(bunch.target[indices]))
        for rows, whole in zip(part.__getitems__([7, 2, 2]), part.tensors, strict=True):
            assert torch.equal(rows, whole[[7, 2, 2]])


def test_digits_that_cannot_be_made_are_refused():
    for fraction in (0.0, 1.0, 0.0001):
        with pytest.raises(ValueError, match="test_fraction"):
            digits(test_fraction=fraction, seed=0)


SIZES = {"samples": 200, "test_samples": 50, "shape": [3, 4, 5], "num_classes": 7, "seed": 0}
SIZES |= {"kind": "images", "sequence_length": 6, "vocabulary": 11, "ignored_fraction": 0.0}


def test_a_token_is_followed_by_few_others_so_the_next_one_can_be_learned():
    data = synthetic(**{**SIZES, "kind": "tokens", "samples": 2000, "vocabulary": 64})
    assert (data.items, data.tokens_per_sample) == ("tokens", 6)
    inputs = data.train.inputs
    targets = data.train.targets
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    seen = torch.zeros(64, 64)
    seen[inputs.flatten(), targets.flatten()] = 1
    assert 1 < seen.sum(dim=1).max() <= SUCCESSORS
    # The held-out walks are on the same graph.
    assert seen[data.test.inputs.flatten(), data.test.targets.flatten()].min() > 0


SHAPES = {"images": (200, 3, 4, 5), "vectors": (200, 9), "tokens": (200, 6)}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_seed_decides_every_kind(kind):
    sizes = SIZES | {"kind": kind} | ({"shape": [9]} if kind == "vectors" else {})
    first = synthetic(**sizes).train
    again = synthetic(**sizes).train
    another = synthetic(**sizes | {"seed": 1}).train
    assert first.inputs.shape == SHAPES[kind]
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, another.inputs)


def test_a_share_of_tokens_is_ignored():
    sizes = SIZES | {"kind": "tokens", "samples": 5000, "ignored_fraction": 0.3}
    ignored = synthetic(**sizes).train.targets == IGNORED
    assert float(ignored.float().mean()) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"samples": 0}, {"test_samples": 0}, {"num_classes": 0}, {"shape": [3, 0, 5]}),
        *({"kind": "sounds"}, {"ignored_fraction": 0.1}, {"vocabulary": 0}, {"sequence_length": 0}),
        *({"kind": "tokens", "ignored_fraction": value} for value in (1.0, -0.1)),
    ],
    ids=str,
)
def test_a_wrong_size_is_named(wrong):
    with pytest.raises(ValueError, match=[*wrong][-1]):
        synthetic(**SIZES | wrong)
