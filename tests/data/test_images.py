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

PER_FILE = 6
NAN = float("nan")
FOLDER = CIFAR10.base_folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small CIFAR-10 in the format of the real one, whose checksums torchvision expects."""
    (tmp_path / FOLDER).mkdir()
    random = np.random.default_rng(0)

    def write(name, content):
        raw = pickle.dumps(content, protocol=2)
        (tmp_path / FOLDER / name).write_bytes(raw)
        return [name, hashlib.md5(raw, usedforsecurity=False).hexdigest()]

    def batch(name):
        pixels = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        return write(name, {"data": pixels, "labels": random.integers(0, 10, PER_FILE).tolist()})

    batches = [batch(f"data_batch_{part}") for part in range(1, 6)]
    monkeypatch.setattr(CIFAR10, "train_list", batches)
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    labels = write("batches.meta", {"label_names": [f"class {label}" for label in range(10)]})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": labels[1]})
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
            expected = reference.normalize(reference.to_tensor(image), *CIFAR_STATISTICS)
            torch.testing.assert_close(ours[index][0], expected)
            assert ours[index][1] == target


def test_a_training_image_is_a_crop_of_its_padded_image_or_of_its_mirror_image(root):
    plain = load(root)
    augmented = load(root, augment=True)
    shown = [augmented.train[index][0] for index in range(8)]
    originals = [plain.train[index][0] for index in range(8)]
    assert not torch.equal(torch.stack(shown), torch.stack(originals))
    padded = torch.nn.functional.pad(originals[0], [4] * 4, value=NAN)
    crops = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    assert any(
        (crop.isnan() | (crop == image)).all()
        for crop in crops
        for image in (shown[0], shown[0].flip(2))
    )


def test_a_held_out_image_is_not_augmented(root):
    assert torch.equal(load(root).test[0][0], load(root, augment=True).test[0][0])


@pytest.mark.parametrize("damaged", [None, "data_batch_3", "batches.meta"])
def test_incomplete_data_is_refused_with_the_ways_forward(root, damaged):
    folder = root if damaged else root / "elsewhere"
    if damaged:
        (root / FOLDER / damaged).write_bytes(b"truncated")
    with pytest.raises(DataUnavailable) as caught:
        load(folder)
    for part in (f"data.root={folder}", "$DATA", "cifar-10-batches-py", "data.download=true"):
        assert part in str(caught.value)
    assert folder.exists() == (damaged is not None)


@pytest.mark.usefixtures("root")
def test_a_folder_that_is_not_given_is_asked_for():
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


def test_a_folder_is_a_class(images):
    assert [int(images().train[index][1]) for index in range(6)] == [0, 0, 0, 1, 1, 1]


def test_images_of_folders_are_normalised_squares(images):
    blue, _ = images().test[0]
    assert (blue.shape, blue.dtype) == ((3, 8, 8), torch.float32)
    mean, std = map(torch.tensor, STATISTICS)
    for column, colour in ((0, (0.0, 0.0, 0.0)), (-1, (0.0, 0.0, 1.0))):
        expected = (torch.tensor(colour) - mean) / std
        torch.testing.assert_close(blue[:, 4, column], expected)


def test_augmentation_draws_no_random_numbers_of_the_training(images):
    state = torch.get_rng_state()
    image = images().train[1][0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(images().train[1][0], image)


def test_another_seed_augments_in_another_way(images):
    assert not torch.equal(images(seed=1).train[1][0], images().train[1][0])


def test_each_epoch_augments_in_a_way_of_its_own(images):
    train = images().train
    first = train[1][0]
    train.set_epoch(1)
    assert not torch.equal(train[1][0], first)
    train.set_epoch(0)
    assert torch.equal(train[1][0], first)


def test_an_image_that_is_not_augmented_is_the_same_in_each_epoch(images):
    train = images(augment=False).train
    first = train[0][0]
    train.set_epoch(1)
    assert torch.equal(train[0][0], first)


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
