import math

import pytest
import torch

from runner.data import IGNORED
from runner.data.synthetic import SUCCESSORS, synthetic


def make(**changes):
    return synthetic(
        **{
            "kind": "images",
            "samples": 200,
            "test_samples": 50,
            "shape": [3, 4, 5],
            "num_classes": 7,
            "sequence_length": 6,
            "vocabulary": 11,
            "ignored_fraction": 0.0,
            "seed": 0,
            **changes,
        }
    )


@pytest.mark.parametrize(("kind", "shape"), [("images", [3, 4, 5]), ("vectors", [9])])
def test_images_and_vectors_have_their_shape_and_classes(kind, shape):
    data = make(kind=kind, shape=shape)
    assert (len(data.train), len(data.test)) == (200, 50)
    assert data.items == "samples"
    assert data.tokens_per_sample is None
    inputs, targets = data.train.__getitems__(list(range(200)))
    assert inputs.shape == (200, *shape)
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert set(targets.tolist()) == set(range(7))


def test_tokens_have_their_length_and_vocabulary():
    data = make(kind="tokens")
    assert data.items == "tokens"
    assert data.tokens_per_sample == 6
    inputs, targets = data.train.__getitems__(list(range(200)))
    assert inputs.shape == targets.shape == (200, 6)
    assert inputs.dtype == targets.dtype == torch.int64
    assert set(inputs.flatten().tolist()) == set(range(11))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_token_is_followed_by_few_others_so_the_next_one_can_be_learned():
    data = make(kind="tokens", samples=2000, vocabulary=64)
    inputs, targets = data.train.inputs, data.train.targets
    pairs = torch.zeros(64, 64).index_put_(
        (inputs.flatten(), targets.flatten()), torch.ones(()), accumulate=True
    )
    assert (pairs > 0).sum(dim=1).max() <= SUCCESSORS
    chance = pairs / pairs.sum()
    entropy = -(chance * (chance / chance.sum(1, keepdim=True)).clamp(min=1e-30).log()).sum()
    assert entropy < math.log(SUCCESSORS) + 1e-3 < math.log(64)
    # The held-out walks are on the same graph.
    assert pairs[data.test.inputs.flatten(), data.test.targets.flatten()].min() > 0


def test_a_linear_model_learns_the_teacher_in_part_on_samples_it_never_saw():
    data = make(kind="vectors", shape=[16], samples=2000, test_samples=500)
    model = torch.nn.Linear(16, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.train.inputs), data.train.targets).backward()
        optimizer.step()
    hits = (model(data.test.inputs).argmax(dim=1) == data.test.targets).float().mean()
    assert hits > 0.8


def test_a_share_of_the_tokens_is_ignored():
    data = make(kind="tokens", samples=5000, ignored_fraction=0.3)
    ignored = (data.train.targets == IGNORED).float().mean()
    assert abs(ignored - 0.3) < 0.02
    assert data.train.inputs.min() >= 0


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_the_seed_decides_everything(kind):
    first, again, other = (make(kind=kind, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert torch.equal(first.train.targets, again.train.targets)
    assert not torch.equal(first.train.inputs, other.train.inputs)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"test_samples": 0},
        {"num_classes": 0},
        {"shape": [3, 0, 5]},
        {"shape": [3]},
        {"kind": "vectors"},
        {"kind": "sounds"},
        {"ignored_fraction": 0.1},
        {"kind": "tokens", "ignored_fraction": 1.0},
        {"kind": "tokens", "ignored_fraction": -0.1},
        {"kind": "tokens", "vocabulary": 0},
        {"kind": "tokens", "sequence_length": 0},
    ],
)
def test_what_makes_no_data_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match="shape" if wrong == {"kind": "vectors"} else [*wrong][-1]):
        make(**wrong)
