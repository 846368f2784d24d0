"""Secrets, and values of the environment, are in no file that a command leaves."""

from pathlib import Path

import pytest
import yaml

from tests.launch.ends import read
from tests.launch.secretive import RECORDED, Planted
from tests.process import python

pytestmark = pytest.mark.xdist_group("finished")


def leaks(planted, folder: Path):
    """Files in which a planted secret stands."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [one for one in files if any(each.encode() in one.read_bytes() for each in planted.all)]


def test_a_run_leaves_no_secret(single):
    folder = single.folder
    assert leaks(single.planted, folder) == []
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model.items() >= RECORDED.items()
    overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    assert "+model.api_key=***" in overrides
    assert read(folder / "checkpoints" / "final", "manifest.json")["config"]["model"] == model


def test_a_sweep_leaves_no_secret(environment):
    planted = Planted()
    words = ["device=cpu", "data.batch_size=32", "train.max_duration=3ba", "tracker.mode=offline"]
    sees = environment | planted.variables
    python("-m", "runner", "-m", "clip.threshold=1,2", *words, *planted.words, env=sees)
    outputs = Path(environment["RUNNER_OUTPUTS"])
    assert leaks(planted, outputs) == []
    (sweep,) = (outputs / "sweeps").iterdir()
    for entry in read(sweep, "sweep.json")["runs"]:
        assert "+model.api_key=***" in entry["words"]
