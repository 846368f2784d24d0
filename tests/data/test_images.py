"""CIFAR-10 as torchvision reads it, its crops and flips, and folders of images."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.transforms import functional as reference

from runner.data import DataUnavailable
from runner.data.images import CIFAR_STATISTICS, STATISTICS, cifar10, image_folder

PER_FILE, NAN = 6, float("nan")
FOLDER = CIFAR10.base_folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small CIFAR-10 in the format of the real one, whose checksums torchvision expects."""
    (tmp_path / FOLDER).mkdir()
    random, sums = np.random.default_rng(0), {}
    names = [f"data_batch_{part}" for part in range(1, 6)]
    for name in (*names, "test_batch", "batches.meta"):
        pixels = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        content = {"data": pixels, "labels": random.integers(0, 10, PER_FILE).tolist()}
        raw = pickle.dumps(content | {"label_names": [*"abcdefghij"]}, protocol=2)
        (tmp_path / FOLDER / name).write_bytes(raw)
        sums[name] = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in names])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    monkeypatch.delenv("DATA", raising=False)
    return tmp_path


def load(root, **changes):
    options = {"download": False, "augment": False, "seed": 0, **changes}
    return cifar10(root=None if root is None else str(root), **options)


def test_images_are_torchvisions_normalised(root, monkeypatch):
    monkeypatch.setenv("DATA", str(root))
    data = load(None, download=True)  # nothing is missing
    for ours, train in ((data.train, True), (data.test, False)):
        theirs = CIFAR10(root, train=train)
        assert len(ours) == len(theirs) == PER_FILE * (5 if train else 1)
        for index, (image, target) in enumerate(theirs):
            wanted = reference.normalize(reference.to_tensor(image), *CIFAR_STATISTICS)
            torch.testing.assert_close(ours[index][0], wanted)
            assert ours[index][1] == target


def test_only_training_images_are_cropped_and_flipped(root):
    plain, augmented = load(root), load(root, augment=True)
    shown = [augmented.train[index][0] for index in range(8)]
    assert not all(torch.equal(one, plain.train[at][0]) for at, one in enumerate(shown))
    padded = torch.nn.functional.pad(plain.train[0][0], [4] * 4, value=NAN)
    crops = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    ways = shown[0], shown[0].flip(2)
    assert any((one.isnan() | (one == way)).all() for one in crops for way in ways)
    assert torch.equal(plain.test[0][0], augmented.test[0][0])


def test_incomplete_data_names_the_folder_and_the_ways_forward(root):
    (root / FOLDER / "data_batch_3").write_bytes(b"truncated")
    for folder in (root, root / "elsewhere"):
        with pytest.raises(DataUnavailable) as caught:
            load(folder)
        for part in (f"data.root={folder}", "$DATA", "cifar-10-batches-py", "data.download=true"):
            assert part in str(caught.value)
    assert not folder.exists()
    with pytest.raises(DataUnavailable, match=r"data\.root"):
        load(None)


@pytest.fixture
def images(tmp_path):
    """Two classes, three training images and one held-out image each, left half black."""
    for part, count in {"train": 3, "val": 1}.items():
        for name, colour in {"blue": (0, 0, 255), "red": (255, 0, 0)}.items():
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (40, 30), colour)
                image.paste((0, 0, 0), (0, 0, 20, 30))
                image.save(folder / f"{number}.png")

    def load(root=str(tmp_path), **changes):
        return image_folder(**{"root": root, "size": 8, "augment": True, "seed": 0, **changes})

    return load


def test_folders_are_normalised_squares_that_depend_on_seed_epoch_and_sample_alone(images):
    data = images()
    assert [int(data.train[index][1]) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    blue, _ = data.test[0]
    assert (blue.shape, blue.dtype) == ((3, 8, 8), torch.float32)
    mean, std = map(torch.tensor, STATISTICS)
    for at, colour in ((0, (0.0, 0.0, 0.0)), (-1, (0.0, 0.0, 1.0))):
        torch.testing.assert_close(blue[:, 4, at], (torch.tensor(colour) - mean) / std)
    state = torch.get_rng_state()
    before = data.train[1][0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(images().train[1][0], before)
    assert not torch.equal(images(seed=1).train[1][0], before)
    for epoch in (1, 0):
        data.train.set_epoch(epoch)
        assert torch.equal(data.train[1][0], before) == (epoch == 0)


def test_wrong_folders_are_named(images, tmp_path, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "green")
    elsewhere = str(tmp_path / "val")
    for root, message in (
        (None, r"data\.root is not set"),
        (str(tmp_path), "green, red"),
        (elsewhere, rf"{elsewhere}.*train/<class>/<image>"),
    ):
        with pytest.raises(DataUnavailable, match=message):
            images(root)
