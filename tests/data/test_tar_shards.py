"""Tar shards are read by webdataset: each sample once over ranks and workers, and they train."""

import io
import json
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from runner.cli.main import main
from runner.data import DataUnavailable
from runner.data.stream_loader import StreamLoader
from runner.data.tar_shards import webdataset

pytest.importorskip("webdataset")

KEYS = {
    "train": "train*.tar",
    "eval": "val*.tar",
    "inputs": "npy",
    "targets": "cls",
    "size": 8,
    "augment": False,
    "buffer": 5,
    "seed": 3,
}


def entries(number, images):
    stream = io.BytesIO()
    if images:
        pixels = np.full((12, 10, 3), 20 * (number % 10), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "PNG")
    else:
        np.save(stream, np.array([number, 0.5], dtype=np.float32))
    yield "png" if images else "npy", stream.getvalue()
    yield "cls", str(number % 10).encode()


def write(file, numbers, images=False):
    with tarfile.open(file, "w") as tar:
        for number in numbers:
            for ending, content in entries(number, images):
                info = tarfile.TarInfo(f"{number:04d}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    for shard in range(4):  # of unequal length
        write(tmp_path / f"train-{shard}.tar", range(shard * 10, shard * 10 + 6 + shard))
    write(tmp_path / "val-0.tar", range(100, 105))
    return tmp_path


def numbers(data):
    return [int(inputs[0]) for inputs, _ in data]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(folder):
    data = webdataset(str(folder), **KEYS)
    every = [shard * 10 + n for shard in range(4) for n in range(6 + shard)]
    first = numbers(data.train)
    assert sorted(first) == every != first
    assert numbers(data.train) == first
    data.train.set_epoch(1)
    second = numbers(data.train)
    assert sorted(second) == every
    assert second != first
    assert numbers(data.test) == [100, 101, 102, 103, 104]
    unshuffled = webdataset(str(folder), **(KEYS | {"buffer": 0}))
    assert numbers(unshuffled.train) == every
    assert [target for _, target in unshuffled.test] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (2, 2), (3, 2)])
def test_ranks_and_workers_read_each_sample_once(folder, ranks, workers):
    """With six processes and four files, samples are divided instead of files."""
    train = webdataset(str(folder), **KEYS).train
    seen, rows = [], []
    for rank in range(ranks):
        loader = StreamLoader(
            train,
            3,
            rank=rank,
            world_size=ranks,
            drop_last=False,
            seed=0,
            num_workers=workers,
        )
        loader.dataset.set_epoch(0)
        for number, (inputs, _) in enumerate(loader):
            if not loader.weightless(number):
                seen += [int(one) for one in inputs[:, 0]]
        rows.append(loader.dataset.divided_by)
    assert sorted(seen) == sorted(numbers(train))
    assert set(rows) == {"runner" if ranks * max(1, workers) > 4 else "shard"}


def test_images_have_the_values_of_the_folder_of_images(tmp_path):
    write(tmp_path / "train.tar", range(3), images=True)
    images = KEYS | {"inputs": "jpg;png", "buffer": 0}
    data = webdataset(str(tmp_path), **images)
    assert data.test is None
    for number, (image, target) in enumerate(data.train):
        assert target == number
        wanted = torch.tensor([20 * number / 255]).expand(3) - torch.tensor([0.485, 0.456, 0.406])
        wanted = (wanted / torch.tensor([0.229, 0.224, 0.225]))[:, None, None].expand(3, 8, 8)
        torch.testing.assert_close(image, wanted)
    cropped = webdataset(str(tmp_path), **(images | {"augment": True}))
    assert [image.shape for image, _ in cropped.train] == [(3, 8, 8)] * 3


def test_what_is_missing_is_named(folder, monkeypatch):
    with pytest.raises(DataUnavailable, match=r"has no file other\*\.tar\. Set data\.root"):
        webdataset(str(folder), **(KEYS | {"train": "other*.tar"}))
    with pytest.raises(ValueError, match=r"find .*jpg.* in .*npy"):
        next(iter(webdataset(str(folder), **(KEYS | {"inputs": "jpg"})).train))
    with pytest.raises(ValueError, match="buffer -1"):
        webdataset(str(folder), **(KEYS | {"buffer": -1}))
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(DataUnavailable, match=r'pip install "clip-runner\[data\]"'):
        webdataset(str(folder), **KEYS)


def test_tar_files_train_by_one_command(tmp_path, outputs):
    for shard in range(2):
        write(tmp_path / f"train-{shard}.tar", range(shard * 20, shard * 20 + 20), images=True)
    write(tmp_path / "val-0.tar", range(10), images=True)
    chosen = ["data=webdataset", f"data.root={tmp_path}", "data.size=32", "data.batch_size=5"]
    chosen += ["data.num_workers=1", "model=resnet18", "plugin=ddp", "plugin.nproc=2"]
    assert main([*chosen, "train.max_duration=6ba", "device=cpu", "tracker=none"]) == 0
    [written] = outputs.glob("runs/*/metrics.jsonl")
    last = json.loads(written.read_text().splitlines()[-1])
    assert last["train/samples"] == 60
    assert "eval/accuracy" in last
