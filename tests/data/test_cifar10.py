import hashlib
import pickle
import socket
import tarfile
import threading
import urllib.error
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10
from torchvision.transforms import functional as reference

from runner.data import DataUnavailable
from runner.data.cifar10 import MEAN, STD, NormalisedImages, cifar10, crop_and_flip

PER_FILE = 6
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small CIFAR-10 in the format of the real one, whose checksums torchvision expects."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    random = np.random.default_rng(0)

    def write(name, content):
        raw = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(raw)
        return hashlib.md5(raw, usedforsecurity=False).hexdigest()

    def batch(name):
        content = {
            "data": random.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8),
            "labels": random.integers(0, 10, PER_FILE).tolist(),
        }
        return [name, write(name, content)]

    names = [f"data_batch_{part}" for part in range(1, 6)]
    monkeypatch.setattr(CIFAR10, "train_list", [batch(name) for name in names])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    labels = write("batches.meta", {"label_names": [f"class {label}" for label in range(10)]})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": labels})
    monkeypatch.delenv("DATA", raising=False)
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def load(root, **changes):
    return cifar10(**{"root": root, "download": False, "augment": False, "seed": 0, **changes})


def normalised(image):
    return reference.normalize(reference.to_tensor(image), MEAN, STD)


@pytest.mark.parametrize("part", ["train", "test"])
def test_images_are_torchvisions_normalised(root, part):
    data = load(str(root))
    assert data.items == "samples"
    ours = getattr(data, part)
    theirs = CIFAR10(root, train=part == "train")
    assert len(ours) == len(theirs) == PER_FILE * (5 if part == "train" else 1)
    images, targets = ours.__getitems__(list(range(len(ours))))
    assert images.dtype == torch.float32
    assert images.shape[1:] == (3, 32, 32)
    for index, (image, target) in enumerate(theirs):
        torch.testing.assert_close(images[index], normalised(image))
        torch.testing.assert_close(ours[index][0], normalised(image))
        assert targets[index] == ours[index][1] == target


def test_the_folder_is_that_of_the_environment_when_none_is_set(root, monkeypatch):
    monkeypatch.setenv("DATA", str(root))
    assert len(load(None).test) == PER_FILE


def test_crop_and_flip_is_torchvisions_on_a_padded_image():
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    choices = torch.stack(
        [torch.randint(9, (40,)), torch.randint(9, (40,)), torch.arange(40) % 2], dim=1
    )
    ours = crop_and_flip(images, choices)
    assert ours.dtype == torch.uint8
    for image, result, (top, left, flipped) in zip(images, ours, choices.tolist(), strict=True):
        expected = reference.crop(reference.pad(image, [4]), top, left, 32, 32)
        assert torch.equal(result, reference.hflip(expected) if flipped else expected)


def test_only_training_images_are_augmented_and_keep_their_targets(root):
    plain, augmented = load(str(root)), load(str(root), augment=True)
    everything = list(range(PER_FILE * 5))
    before, targets = plain.train.__getitems__(everything)
    after, same_targets = augmented.train.__getitems__(everything)
    assert not torch.equal(before, after)
    assert torch.equal(targets, same_targets)
    test = list(range(PER_FILE))
    assert torch.equal(plain.test.__getitems__(test)[0], augmented.test.__getitems__(test)[0])


def test_crops_and_flips_cover_their_range_evenly():
    count = 9_000
    ramp = torch.arange(32 * 32).view(1, 1, 32, 32).expand(count, 3, 32, 32) // 4
    data = NormalisedImages(ramp.to(torch.uint8), torch.zeros(count).long(), True, seed=0)
    data.set_epoch(0)
    table = data._choices
    for column, values in ((0, 9), (1, 9), (2, 2)):
        share = table[:, column].bincount(minlength=values) / count
        assert len(share) == values
        assert ((share - 1 / values).abs() < 0.02).all()


def test_a_samples_crop_depends_on_seed_and_epoch_not_on_who_reads_it(root):
    def train(epoch, seed=0):
        data = load(str(root), augment=True, seed=seed).train
        data.set_epoch(epoch)
        return data

    everything = list(range(PER_FILE * 5))
    whole, _ = train(epoch=3).__getitems__(everything)
    part, _ = train(epoch=3).__getitems__([20, 4])
    assert torch.equal(part, whole[[20, 4]])
    assert not torch.equal(whole, train(epoch=4).__getitems__(everything)[0])
    assert not torch.equal(whole, train(epoch=3, seed=1).__getitems__(everything)[0])


def test_without_an_epoch_every_reading_is_cropped_anew(root):
    data = load(str(root), augment=True).train
    everything = list(range(PER_FILE * 5))
    assert not torch.equal(data.__getitems__(everything)[0], data.__getitems__(everything)[0])


def test_no_folder_at_all_names_the_key_and_the_ways_forward(root):
    with pytest.raises(DataUnavailable) as caught:
        load(None)
    for words in ("data.root", "$DATA", "cifar-10-batches-py", "data.download=true"):
        assert words in str(caught.value)


def damage_nothing(folder):
    return folder / "elsewhere"


def damage_missing_file(folder):
    (folder / CIFAR10.base_folder / "data_batch_3").unlink()
    return folder


def damage_content(folder):
    (folder / CIFAR10.base_folder / "test_batch").write_bytes(b"truncated")
    return folder


def damage_labels(folder):
    (folder / CIFAR10.base_folder / "batches.meta").unlink()
    return folder


@pytest.mark.parametrize(
    "damage", [damage_nothing, damage_missing_file, damage_content, damage_labels]
)
def test_incomplete_data_names_the_folder_and_the_ways_forward(root, damage):
    folder = damage(root)
    with pytest.raises(DataUnavailable) as caught:
        load(str(folder))
    for words in (f"data.root={folder}", "$DATA", "cifar-10-batches-py", "data.download=true"):
        assert words in str(caught.value)
    assert folder.exists() == (damage is not damage_nothing)


def test_a_download_without_a_network_says_so(tmp_path, no_network):
    before = socket.getdefaulttimeout()
    with pytest.raises(DataUnavailable, match=r"download failed .*no network here"):
        load(str(tmp_path / "new"), download=True)
    assert socket.getdefaulttimeout() == before


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.data.cifar10.SILENCE", 0.2)
    for proxy in PROXIES:
        monkeypatch.delenv(proxy, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{port}/cifar-10-python.tar.gz")
        with pytest.raises(DataUnavailable, match=r"download failed .*timed out"):
            load(str(tmp_path), download=True)


def test_a_place_that_cannot_be_made_is_no_place_to_download_to(tmp_path, no_network):
    (tmp_path / "file").touch()
    with pytest.raises(DataUnavailable, match="download failed"):
        load(str(tmp_path / "file" / "below"), download=True)


def test_download_leaves_complete_data_alone(root, no_network):
    before = sorted(root.rglob("*"))
    assert len(load(str(root), download=True).train) == PER_FILE * 5
    assert sorted(root.rglob("*")) == before


@pytest.fixture
def served(root, tmp_path_factory, monkeypatch):
    """The small CIFAR-10 as an archive on a loopback server that torchvision downloads from."""
    folder = tmp_path_factory.mktemp("served")
    archive = folder / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root / CIFAR10.base_folder, CIFAR10.base_folder)
    checksum = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(CIFAR10, "tgz_md5", checksum)
    for proxy in PROXIES:
        monkeypatch.delenv(proxy, raising=False)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/{CIFAR10.filename}"
        monkeypatch.setattr(CIFAR10, "url", address)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield archive
        server.shutdown()
        thread.join()


# torchvision unpacks without naming a filter, which later Pythons warn of.
@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_what_is_downloaded_is_unpacked_and_read(root, served, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty") / "below"
    fetched, original = load(str(empty), download=True), load(str(root))
    assert torch.equal(fetched.train.images, original.train.images)
    assert torch.equal(fetched.test.targets, original.test.targets)


# torchvision unpacks without naming a filter, which later Pythons warn of.
@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_a_damaged_download_is_refused(served, tmp_path_factory):
    raw = served.read_bytes()
    served.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataUnavailable, match="download failed"):
        load(str(tmp_path_factory.mktemp("empty")), download=True)
