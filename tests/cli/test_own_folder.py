"""Code and configuration in a folder of a user's own, from every command, as a user types them."""

import json
import os
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tests.process import python

CODE = """\
import torch
from torch import nn
from runner.data import Data, TensorPairs


class Net(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def points() -> Data:
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    train, test = ([x[part] for x in (inputs, targets)] for part in (slice(16, 48), slice(16)))
    return Data(TensorPairs(*train), TensorPairs(*test), "samples")
"""


@pytest.fixture
def own(tmp_path):
    for name, text in {
        "own_code.py": CODE,
        "conf/model/mine.yaml": "_target_: own_code.Net\nwidth: 8\n",
        "conf/data/mine.yaml": "_target_: own_code.points\nbatch_size: 8\n",
        "conf/recipe/mine.yaml": (
            "defaults:\n  - override /model: mine\n  - override /data: mine\n"
            "  - override /tracker: none\ntrain: {max_duration: 3ba}\n"
        ),
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def summaries(own):
    return sorted((own / "outputs").rglob("summary.json"))


def test_the_console_script_finds_code_here_on_every_rank_and_its_page_repeats_it(own, environment):
    script = Path(sys.executable).with_name("clip-runner")
    if not script.is_file():
        pytest.skip("the package is not installed")
    words = ["--config-dir", "conf", "recipe=mine", "plugin=ddp", "plugin.nproc=2"]
    sweep = [str(script), "-m", *words, "seed=1,2"]
    done = subprocess.run(
        sweep, cwd=own, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = [json.loads(file.read_text()) for file in summaries(own)]
    assert (first["steps"], first["world_size"]) == (3, 2)
    [page] = (own / "outputs" / "sweeps").glob("*/report.html")
    commands = [
        shlex.split(unescape(text))
        for text in re.findall(r"<code>(python -m runner [^<]*)</code>", page.read_text())
    ]
    assert commands == [["python", "-m", "runner", *words, f"seed={seed}"] for seed in (1, 2)]
    python(*commands[1][1:], cwd=own, env=environment)
    [alone] = (own / "outputs" / "runs").glob("*/summary.json")
    assert json.loads(alone.read_text())["final"]["eval/loss"] == second["final"]["eval/loss"]
    shown = re.findall(
        r"<pre>(python -m runner [^<]*)</pre>", (alone.parent / "report.html").read_text()
    )
    assert unescape(shown[0]) == shlex.join(commands[1])


@pytest.mark.parametrize(
    "command",
    ["verify verify.steps=2", "calibrate calibrate.steps=3", "plan"],
)
@pytest.mark.product(every=3)
def test_every_command_takes_the_folder(command, own, environment):
    code = own / "elsewhere"
    code.mkdir()
    (own / "own_code.py").rename(code / "own_code.py")
    path = os.pathsep.join([environment["PYTHONPATH"], str(code)])
    first, *rest = command.split()
    words = ["-m", "runner", first, "--config-dir", "conf", "recipe=mine", *rest]
    done = python(*words, cwd=own, env=environment | {"PYTHONPATH": path})
    if first == "calibrate":
        assert "python -m runner --config-dir conf recipe=mine " in done.stdout
    wrong = python(*words, "model.widht=2", code=2, cwd=own, env=environment)
    assert "did you mean model.width?" in wrong.stderr


def test_an_evaluation_takes_options_of_the_folder(own, environment):
    python("-m", "runner", "--config-dir", "conf", "recipe=mine", cwd=own, env=environment)
    [summary] = summaries(own)
    words = ["-m", "runner", "evaluate", str(summary.parent), "data=mine", "data.batch_size=4"]
    done = python(*words, "--config-dir", "conf", cwd=own, env=environment)
    loss = re.search(r"eval/loss +(\S+)", done.stdout)
    assert float(loss[1]) == pytest.approx(json.loads(summary.read_text())["final"]["eval/loss"])
    wrong = python(*words, "--config-dir", "cnof", code=2, cwd=own, env=environment)
    assert "--config-dir" in wrong.stderr
    assert "must be a folder that exists" in wrong.stderr
