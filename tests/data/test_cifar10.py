"""CIFAR-10 as torchvision reads it, its crops and flips, and its download."""

import hashlib
import pickle
import socket
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10
from torchvision.transforms import functional as reference

from runner.data import DataUnavailable
from runner.data.cifar10 import MEAN, STD, cifar10, crop_and_flip

PER_FILE = 6
EVERYTHING = list(range(PER_FILE * 5))
FOLDER = CIFAR10.base_folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small CIFAR-10 in the format of the real one, whose checksums torchvision expects."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    random = np.random.default_rng(0)

    def write(name, content):
        raw = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(raw)
        return [name, hashlib.md5(raw, usedforsecurity=False).hexdigest()]

    def batch(name):
        pixels = random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        return write(name, {"data": pixels, "labels": random.integers(0, 10, PER_FILE).tolist()})

    names = [f"data_batch_{part}" for part in range(1, 6)]
    monkeypatch.setattr(CIFAR10, "train_list", [batch(name) for name in names])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    labels = write("batches.meta", {"label_names": [f"class {label}" for label in range(10)]})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": labels[1]})
    for name in ("DATA", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def load(root, **changes):
    options = {"download": False, "augment": False, "seed": 0, **changes}
    return cifar10(root=None if root is None else str(root), **options)


def test_images_are_torchvisions_normalised(root, monkeypatch):
    monkeypatch.setenv("DATA", str(root))
    data = load(None)
    assert data.items == "samples"
    for ours, train in ((data.train, True), (data.test, False)):
        theirs = CIFAR10(root, train=train)
        assert len(ours) == len(theirs) == PER_FILE * (5 if train else 1)
        images, targets = ours.__getitems__(list(range(len(ours))))
        assert (images.dtype, images.shape[1:]) == (torch.float32, (3, 32, 32))
        for index, (image, target) in enumerate(theirs):
            wanted = reference.normalize(reference.to_tensor(image), MEAN, STD)
            torch.testing.assert_close(images[index], wanted)
            torch.testing.assert_close(ours[index][0], wanted)
            assert targets[index] == ours[index][1] == target


def test_crop_and_flip_is_torchvisions_on_a_padded_image():
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    places = [torch.randint(9, (40,)), torch.randint(9, (40,)), torch.arange(40) % 2]
    choices = torch.stack(places, dim=1)
    for image, result, (top, left, flipped) in zip(
        images, crop_and_flip(images, choices), choices.tolist(), strict=True
    ):
        expected = reference.crop(reference.pad(image, [4]), top, left, 32, 32)
        assert torch.equal(result, reference.hflip(expected) if flipped else expected)


def test_only_training_images_are_augmented_by_seed_and_epoch_alone(root):
    def train(epoch, seed=0):
        data = load(root, augment=True, seed=seed).train
        data.set_epoch(epoch)
        return data

    plain, augmented = load(root), load(root, augment=True)
    whole, targets = train(epoch=3).__getitems__(EVERYTHING)
    before, same_targets = plain.train.__getitems__(EVERYTHING)
    assert not torch.equal(before, whole)
    assert torch.equal(targets, same_targets)
    assert torch.equal(train(epoch=3).__getitems__([20, 4])[0], whole[[20, 4]])
    for other in (train(epoch=4), train(epoch=3, seed=1)):
        assert not torch.equal(whole, other.__getitems__(EVERYTHING)[0])
    # Without an epoch every reading is cropped anew.
    first, second = (augmented.train.__getitems__(EVERYTHING)[0] for _ in range(2))
    assert not torch.equal(first, second)
    held_out = [part.test.__getitems__([0, 1, 2])[0] for part in (plain, augmented)]
    assert torch.equal(*held_out)


@pytest.mark.parametrize("damaged", [None, "data_batch_3", "test_batch", "batches.meta"])
def test_incomplete_data_names_the_folder_and_the_ways_forward(root, damaged):
    folder = root if damaged else root / "elsewhere"
    if damaged:
        (root / FOLDER / damaged).write_bytes(b"truncated")
    with pytest.raises(DataUnavailable) as caught:
        load(folder)
    for part in (f"data.root={folder}", "$DATA", "cifar-10-batches-py", "data.download=true"):
        assert part in str(caught.value)
    assert folder.exists() == (damaged is not None)
    with pytest.raises(DataUnavailable, match=r"data\.root"):
        load(None)


def test_a_download_without_a_network_or_a_place_fails(root, tmp_path, no_network):
    before = socket.getdefaulttimeout()
    files = sorted(root.rglob("*"))
    assert len(load(root, download=True).train) == PER_FILE * 5  # nothing is missing
    assert sorted(root.rglob("*")) == files
    with pytest.raises(DataUnavailable, match=r"download failed .*no network here"):
        load(tmp_path / "new", download=True)
    assert socket.getdefaulttimeout() == before
    (tmp_path / "file").touch()
    with pytest.raises(DataUnavailable, match="download failed"):
        load(tmp_path / "file" / "below", download=True)


def test_a_server_that_never_answers_is_given_up(root, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("runner.data.cifar10.SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{port}/cifar-10-python.tar.gz")
        with pytest.raises(DataUnavailable, match=r"download failed .*timed out"):
            load(tmp_path_factory.mktemp("empty"), download=True)
