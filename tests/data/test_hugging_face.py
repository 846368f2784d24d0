"""Folders of Hugging Face's datasets are read as the library itself reads them, and train."""

import json

import pytest
import torch

from runner.cli.main import main
from runner.data import DataUnavailable
from runner.data.hugging_face import datasets

library = pytest.importorskip("datasets")

ROWS = [{"pixels": [float(n), n / 2], "label": n % 3, "name": str(n)} for n in range(40)]


def saved(folder, form):
    table = library.Dataset.from_list(ROWS)
    splits = {"train": table.select(range(30)), "test": table.select(range(30, 40))}
    folder.mkdir()
    match form:
        case "one":
            table.save_to_disk(str(folder))
        case "splits":
            library.DatasetDict(splits).save_to_disk(str(folder))
        case "parquet":
            for name, split in splits.items():
                split.to_parquet(str(folder / f"{name}-0.parquet"))
        case "jsonl":
            lines = "\n".join(map(json.dumps, ROWS))
            (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def listed(part):
    return [
        (inputs.tolist(), int(target)) for inputs, target in (part[i] for i in range(len(part)))
    ]


@pytest.mark.parametrize("form", ["one", "splits", "parquet", "jsonl"])
def test_samples_are_the_rows_that_were_saved(tmp_path, form):
    data = datasets(str(saved(tmp_path / form, form)), "pixels", "label")
    train, test = listed(data.train), listed(data.test)
    wanted = [(row["pixels"], row["label"]) for row in ROWS]
    if form in ("splits", "parquet"):
        assert (train, test) == (wanted[:30], wanted[30:])
    else:
        assert sorted(train + test) == wanted
        assert len(test) == 4
    batch = data.train.__getitems__([2, 1])
    assert [(inputs.tolist(), int(target)) for inputs, target in batch] == [train[2], train[1]]
    assert batch[0][0].dtype == torch.float32


def test_without_inputs_samples_are_dictionaries_of_the_chosen_columns(tmp_path):
    data = datasets(str(saved(tmp_path / "one", "splits")), columns=["label", "pixels"])
    assert {name: value.tolist() for name, value in data.train[3].items()} == {
        "label": 0,
        "pixels": [3.0, 1.5],
    }


def test_a_missing_column_split_folder_or_package_is_named(tmp_path, monkeypatch):
    folder = str(saved(tmp_path / "one", "splits"))
    with pytest.raises(DataUnavailable, match=r"no column labels: it has pixels, label, name"):
        datasets(folder, "pixels", "labels")
    with pytest.raises(DataUnavailable, match=r"data\.eval_split=dev: .* splits train, test"):
        datasets(folder, "pixels", "label", eval_split="dev")
    with pytest.raises(DataUnavailable, match=r"holds no data set\. Set data.root"):
        datasets(str(tmp_path))
    with pytest.raises(ValueError, match="go together"):
        datasets(folder, "pixels")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataUnavailable, match=r'pip install "clip-runner\[data\]"'):
        datasets(folder)


def test_a_folder_trains_by_one_command(tmp_path, outputs, monkeypatch):
    torch.manual_seed(0)
    rows = [{"image": torch.rand(1, 8, 8).tolist(), "label": n % 10} for n in range(64)]
    library.Dataset.from_list(rows).save_to_disk(str(tmp_path / "images"))
    folder = f"data.root={tmp_path / 'images'}"
    short = ["train.max_duration=2ep", "tracker=none", "data.batch_size=16"]
    assert main(["data=datasets", folder, "data.inputs=image", "data.targets=label", *short]) == 0
    [written] = outputs.glob("runs/*/metrics.jsonl")
    last = json.loads(written.read_text().splitlines()[-1])
    assert last["train/samples"] == 2 * 58
    assert "eval/accuracy" in last
