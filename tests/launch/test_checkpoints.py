"""A run leaves its checkpoints, and says in them whose they are."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

from runner.checkpoint import folder as checkpoints
from tests.process import python

SHORT = ["train.max_duration=12ba", "eval.interval=4ba", "data.batch_size=16", "tracker=none"]


def run(environment, *words, code=0):
    done = python("-m", "runner", "device=cpu", *SHORT, *words, code=code, env=environment)
    (folder,) = (Path(environment["RUNNER_OUTPUTS"]) / "runs").iterdir()
    return folder, done.stdout + done.stderr


def held(checkpoint):
    """Shapes of the whole tensors in the files of a checkpoint."""
    shapes = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (it is no dict)
                offsets = content.get_slice(name).get_shape()
                rows = shapes.get(name, [0, *offsets[1:]])[0] + (offsets or [1])[0]
                shapes[name] = [rows, *offsets[1:]]
    return shapes


@pytest.mark.parametrize(
    ("plugin", "ranks"),
    [
        (["plugin=single"], 1),
        (["plugin=ddp", "plugin.nproc=2", "checkpoint.asynchronous=true"], 2),
        (["plugin=fsdp", "plugin.nproc=2"], 2),
    ],
)
@pytest.mark.product(every=3)
def test_the_checkpoints_of_a_run(environment, plugin, ranks):
    folder, _ = run(environment, *plugin, "checkpoint.interval=5ba")
    home = folder / "checkpoints"
    names = ["final", "step_000000005", "step_000000010"]
    assert sorted(one.name for one in home.iterdir()) == names
    status = json.loads((folder / "status.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name, evaluated in zip(names, (12, 4, 8), strict=True):
        about = checkpoints.require_whole(home / name)
        assert about["config"] == yaml.safe_load((folder / "config.yaml").read_text())
        assert about["config_hash"] == status["config_hash"]
        assert about["wandb_run_id"] is None
        assert about["world_size"] == ranks
        assert about["plugin"] == plugin[0].removeprefix("plugin=")
        assert about["metrics"]["eval/loss"] == rows[evaluated - 1]["eval/loss"]
    weights = held(home / "final")
    assert (
        sum(torch.Size(shape).numel() for shape in weights.values())
        == (json.loads((folder / "summary.json").read_text())["parameters"])
    )
    tensors = held(home / "step_000000010")
    assert tensors.items() >= weights.items()
    momenta = {f"optimizer/0/{name}/momentum_buffer" for name in weights}
    assert set(tensors) == {*weights, *momenta}


def test_a_run_may_save_nothing(environment):
    folder, _ = run(environment, "checkpoint=none")
    assert not (folder / "checkpoints").exists()


def test_a_wrong_interval_is_refused(environment):
    words = ["checkpoint.interval=10m", "checkpoint.keep=-1", "train.max_duration=10min"]
    done = python("-m", "runner", *words, code=2, env=environment)
    assert "min (minutes)" in done.stderr
    assert "checkpoint.keep=-1" in done.stderr
    assert "train.max_duration=10min" in done.stderr
