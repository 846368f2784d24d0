"""Code and configuration in a folder of a user's own, from every command, as a user types them."""

import json
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
FILES = {
    "own_code.py": CODE,
    "conf/model/mine.yaml": "_target_: own_code.Net\nwidth: 8\n",
    "conf/data/mine.yaml": "_target_: own_code.points\nbatch_size: 8\n",
    "conf/recipe/mine.yaml": (
        "defaults:\n  - override /model: mine\n  - override /data: mine\n"
        "  - override /tracker: none\ntrain: {max_duration: 3ba}\n"
    ),
}
MINE = ["--config-dir", "conf", "recipe=mine"]


@pytest.fixture
def own(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_the_console_script_finds_code_here_on_every_rank_and_its_page_repeats_it(own, environment):
    script = Path(sys.executable).with_name("clip-runner")
    command = [str(script)] if script.is_file() else [sys.executable, "-m", "runner"]
    words = [*MINE, "plugin=ddp", "plugin.nproc=2"]
    done = subprocess.run(
        [*command, "-m", *words, "seed=1,2"],
        cwd=own,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = sorted((own / "outputs").rglob("summary.json"))
    first, second = [json.loads(file.read_text()) for file in summaries]
    assert (first["steps"], first["world_size"]) == (3, 2)
    [page] = (own / "outputs" / "sweeps").glob("*/report.html")
    shown = re.findall(r"<code>(python -m runner [^<]*)</code>", page.read_text())
    commands = [shlex.split(unescape(text)) for text in shown]
    assert commands == [["python", "-m", "runner", *words, f"seed={seed}"] for seed in (1, 2)]
    python(*commands[1][1:], cwd=own, env=environment)
    [alone] = (own / "outputs" / "runs").glob("*/summary.json")
    assert json.loads(alone.read_text())["final"]["eval/loss"] == second["final"]["eval/loss"]
    shown = re.findall(r"<pre>(python -m [^<]*)</pre>", (alone.parent / "report.html").read_text())
    assert unescape(shown[0]) == shlex.join(commands[1])
    # An evaluation takes options of the folder too.
    words = ["evaluate", str(alone.parent), "data=mine", "data.batch_size=4", "plugin=single"]
    done = python("-m", "runner", *words, "--config-dir", "conf", cwd=own, env=environment)
    loss = re.search(r"eval/loss +(\S+)", done.stdout)
    assert float(loss[1]) == pytest.approx(second["final"]["eval/loss"])
