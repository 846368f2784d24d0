"""Models and data of a user, named on the command line, train."""

import random

import pytest

from tests.launch.ends import read, rows_of
from tests.process import overriding, run_here

OTHERS = "model._target_=tests.own_code.{} data._target_=tests.own_code.made data.kind={}"
FLOW = (
    "data=own data.train._target_=tests.own_code.Flow data.train.samples=2000 data.num_workers=2 "
    "model._target_=torch.nn.Linear model.in_features=20 model.out_features=2 "
    "plugin=ddp plugin.nproc=2 train.max_duration=100ba"
)


def trained(folder, *words):
    """The rows and the summary of a run."""
    run_here(*words, "tracker=none", "device=cpu", f"hydra.run.dir={folder}")
    return rows_of(folder), read(folder, "summary.json")


@pytest.mark.parametrize(
    ("words", "logged", "least"),
    [
        (OTHERS.format("Tagger", "tags"), "eval/accuracy", 0.5),
        (
            OTHERS.format("Line", "line") + " loss._target_=torch.nn.MSELoss eval.metrics=[mae,r2]",
            *("eval/r2", 0.5),
        ),
        (OTHERS.format("TwoInputs", "pairs") + " eval.metrics=[f1]", "eval/f1", 0.5),
        (FLOW, "world_size", 2),
    ],
    ids=("dictionaries", "regression", "two inputs", "a stream"),
)
def test_own_code_trains(tmp_path, words, logged, least):
    overrides = overriding(["train.max_duration=96ba"], words.split())
    rows, summary = trained(tmp_path / "run", *overrides)
    assert (summary | summary["final"])[logged] >= least
    assert "ddp" not in words or (summary["steps"], summary["world_size"]) == (100, 2)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / 2


def test_a_folder_of_datasets_trains(tmp_path):
    library = pytest.importorskip("datasets")
    draw = random.Random(0)
    labels = [draw.randrange(10) for _ in range(320)]
    rows = [{"image": [[[draw.gauss(0, 1) + label] * 8] * 8], "label": label} for label in labels]
    (tmp_path / "folder").mkdir()
    library.Dataset.from_list(rows).to_parquet(str(tmp_path / "folder" / "train.parquet"))
    words = ["data=datasets", f"data.train.path={tmp_path / 'folder'}"]
    rows, summary = trained(tmp_path / "run", *words, "data.columns=[image,label]")
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    assert "eval/accuracy" in summary["final"]
