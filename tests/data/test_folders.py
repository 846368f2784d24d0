"""Folders of images, tar files and data sets of Hugging Face."""

import io
import json
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from runner.data import DataUnavailable
from runner.data.hugging_face import datasets
from runner.data.image_folder import MEAN, STD, image_folder
from runner.data.stream_loader import StreamLoader
from runner.data.tar_shards import webdataset


def normalised(*colour):
    """The normalised values of a colour of three numbers from 0 to 1."""
    return (torch.tensor(colour) - torch.tensor(MEAN)) / torch.tensor(STD)


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


def test_images_are_normalised_squares_that_depend_on_seed_epoch_and_sample_alone(images):
    data = images()
    assert (len(data.train), len(data.test), data.items) == (6, 2, "samples")
    assert [int(data.train[index][1]) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    blue, _ = data.test[0]
    assert (blue.shape, blue.dtype) == ((3, 8, 8), torch.float32)
    torch.testing.assert_close(blue[:, 4, 0], normalised(0.0, 0.0, 0.0))
    torch.testing.assert_close(blue[:, 4, -1], normalised(0.0, 0.0, 1.0))
    state = torch.get_rng_state()
    before = data.train[1][0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(images().train[1][0], before)
    assert not torch.equal(images(seed=1).train[1][0], before)
    for epoch in (1, 0):
        data.train.set_epoch(epoch)
        assert torch.equal(data.train[1][0], before) == (epoch == 0)
    plain = images(augment=False).train
    before = plain[0][0]
    plain.set_epoch(1)
    assert torch.equal(plain[0][0], before)


# -- tar files

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


def write(file, numbers, pictures=False):
    """Write a tar file of samples whose target is the last digit of their number."""
    with tarfile.open(file, "w") as tar:
        for number in numbers:
            stream = io.BytesIO()
            if pictures:
                pixels = np.full((12, 10, 3), 20 * (number % 10), dtype=np.uint8)
                Image.fromarray(pixels).save(stream, "PNG")
            else:
                np.save(stream, np.array([number, 0.5], dtype=np.float32))
            parts = {"png" if pictures else "npy": stream.getvalue()}
            for ending, content in {**parts, "cls": str(number % 10).encode()}.items():
                info = tarfile.TarInfo(f"{number:04d}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def tars(tmp_path):
    pytest.importorskip("webdataset")
    for shard in range(4):  # of unequal length
        write(tmp_path / f"train-{shard}.tar", range(shard * 10, shard * 10 + 6 + shard))
    write(tmp_path / "val-0.tar", range(100, 105))
    return lambda **changes: webdataset(str(tmp_path), **{**KEYS, **changes})


def numbers(data):
    return [int(inputs[0]) for inputs, _ in data]


def test_an_epoch_of_tar_files_has_every_sample_once_in_an_order_of_its_own(tars, tmp_path):
    data, every = tars(), [shard * 10 + n for shard in range(4) for n in range(6 + shard)]
    first = numbers(data.train)
    assert sorted(first) == every != first
    assert numbers(data.train) == first
    data.train.set_epoch(1)
    second = numbers(data.train)
    assert sorted(second) == every
    assert second != first
    unshuffled = tars(buffer=0)
    assert numbers(unshuffled.train) == every
    assert [(int(x[0]), y) for x, y in unshuffled.test] == [(100 + n, n) for n in range(5)]
    write(tmp_path / "pictures.tar", range(5, 7), pictures=True)
    image, target = next(iter(tars(train="pictures.tar", inputs="jpg;png", buffer=0).train))
    assert (target, image.shape) == (5, (3, 8, 8))
    torch.testing.assert_close(image[:, 0, 0], normalised(*[100 / 255] * 3))


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2), (3, 2)])
def test_ranks_and_workers_read_each_sample_of_tar_files_once(tars, ranks, workers):
    """With six processes and four files, samples are divided instead of files."""
    train, seen, divided = tars().train, [], set()
    for rank in range(ranks):
        split = {"rank": rank, "world_size": ranks, "drop_last": False, "seed": 0}
        loader = StreamLoader(train, 3, **split, num_workers=workers)
        loader.dataset.set_epoch(0)
        for number, (inputs, _) in enumerate(loader):
            if not loader.weightless(number):
                seen += [int(one) for one in inputs[:, 0]]
        divided.add(loader.dataset.divided_by)
    assert sorted(seen) == sorted(numbers(train))
    assert divided == {"runner" if ranks * max(1, workers) > 4 else "shard"}


# -- Hugging Face

ROWS = [{"pixels": [float(n), n / 2], "label": n % 3, "name": str(n)} for n in range(40)]


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Return a function that saves the rows in a form, and returns the folder."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def save(form):
        folder, table = tmp_path / form, library.Dataset.from_list(ROWS)
        folder.mkdir()
        splits = {"train": table.select(range(30)), "test": table.select(range(30, 40))}
        match form:
            case "one":
                table.save_to_disk(str(folder))
            case "splits":
                library.DatasetDict(splits).save_to_disk(str(folder))
            case "parquet":
                for name, split in splits.items():
                    split.to_parquet(str(folder / f"{name}-0.parquet"))
            case "jsonl":
                (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        return str(folder)

    return save


@pytest.mark.parametrize("form", ["one", "splits", "parquet", "jsonl"])
def test_samples_of_hugging_face_are_the_rows_that_were_saved(saved, form):
    data = datasets(saved(form), "pixels", "label")
    train, test = (
        [
            (inputs.tolist(), int(target))
            for inputs, target in part.__getitems__([*range(len(part))])
        ]
        for part in (data.train, data.test)
    )
    wanted = [(row["pixels"], row["label"]) for row in ROWS]
    if form in ("splits", "parquet"):
        assert (train, test) == (wanted[:30], wanted[30:])
    else:
        assert sorted(train + test) == wanted
        assert len(test) == 4
    inputs, target = data.train[2]
    assert (inputs.tolist(), int(target), inputs.dtype) == (*train[2], torch.float32)


def test_wrong_folders_and_columns_are_named(saved, tars, images, tmp_path, monkeypatch):
    monkeypatch.delenv("DATA", raising=False)
    folder = saved("splits")
    (tmp_path / "empty").mkdir()
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "green")
    for wrong, message in [
        (lambda: datasets(folder, "pixels", "labels"), r"no column labels: it has pixels, label"),
        (lambda: datasets(folder, "pixels", "label", eval_split="dev"), r"data\.eval_split=dev: "),
        (lambda: datasets(str(tmp_path / "empty")), r"holds no data set\. Set data.root"),
        (lambda: datasets(folder, "pixels"), "go together"),
        (lambda: tars(train="other*.tar"), r"has no file other\*\.tar\. Set data\.root"),
        (lambda: next(iter(tars(inputs="jpg").train)), r"find .*jpg.* in .*npy"),
        (lambda: images(None), r"data\.root is not set"),
        (lambda: images(), "green, red"),
        (lambda: images(folder), rf"{folder}.*train/<class>/<image>"),
    ]:
        with pytest.raises((DataUnavailable, ValueError), match=message):
            wrong()
    for package, wrong in (("datasets", lambda: datasets(folder)), ("webdataset", tars)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataUnavailable, match=r'pip install "clip-runner\[data\]"'):
            wrong()
