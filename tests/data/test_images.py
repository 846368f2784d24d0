"""CIFAR-10 as torchvision reads it, its crops and flips, and folders of images."""

import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, FakeData
from torchvision.transforms import functional as reference

from runner.data import DataUnavailable
from runner.data.images import CIFAR_STATISTICS, STATISTICS, cifar10, image_folder


class Fake(FakeData):
    """Random images in place of CIFAR-10's."""

    base_folder = CIFAR10.base_folder

    def __init__(self, root, train=True, download=False):
        super().__init__(30 if train else 6, (3, 32, 32), random_offset=0 if train else 100)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.data.images.CIFAR10", Fake)
    monkeypatch.setenv("DATA", str(tmp_path))
    return lambda **changes: cifar10(**{"root": None, "download": True, "seed": 0, **changes})


def test_images_are_torchvisions_normalised(load):
    data = load(augment=False)
    for ours, theirs in ((data.train, Fake("")), (data.test, Fake("", train=False))):
        assert len(ours) == len(theirs)
        for index in range(len(theirs)):
            image, target = theirs[index]
            wanted = reference.normalize(reference.to_tensor(image), *CIFAR_STATISTICS)
            torch.testing.assert_close(ours[index][0], wanted)
            assert ours[index][1] == target


def test_only_training_images_are_cropped_and_flipped(load):
    plain, augmented = load(augment=False), load(augment=True)
    shown = [augmented.train[index][0] for index in range(8)]
    assert not all(torch.equal(one, plain.train[at][0]) for at, one in enumerate(shown))
    padded = torch.nn.functional.pad(plain.train[0][0], [4] * 4, value=float("nan"))
    crops = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    ways = shown[0], shown[0].flip(2)
    assert any((one.isnan() | (one == way)).all() for one in crops for way in ways)
    assert torch.equal(plain.test[0][0], augmented.test[0][0])


def test_data_that_is_absent_names_the_folder_and_the_ways_forward(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    with pytest.raises(DataUnavailable) as caught:
        cifar10(str(folder), download=False, augment=True, seed=0)
    for part in (f"data.root={folder}", "$DATA", "cifar-10-batches-py", "data.download=true"):
        assert part in str(caught.value)
    assert not folder.exists()
    monkeypatch.delenv("DATA", raising=False)
    with pytest.raises(DataUnavailable, match=r"data\.root is not set"):
        cifar10(None, download=False, augment=True, seed=0)


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
    return lambda root=tmp_path, seed=0: image_folder(str(root), 8, augment=True, seed=seed)


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


def test_wrong_folders_are_named(images, tmp_path):
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "green")
    elsewhere = tmp_path / "val"
    for root, message in (
        (tmp_path, "green, red"),
        (elsewhere, rf"{elsewhere}.*train/<class>/<image>"),
    ):
        with pytest.raises(DataUnavailable, match=message):
            images(root)
