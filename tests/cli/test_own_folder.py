"""Code and configuration in a folder of a user's own, from every command, as a user types them."""

import json
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from runner.cli.main import main
from tests.process import python

# Choices of options come first, as Hydra composes them.
WORDS = ["--config-dir", "conf", "recipe=demo", "tracker=none", "plugin=ddp", "plugin.nproc=2"]
WORDS += ["train.max_duration=3ba", "device=cpu"]


def test_the_console_script_finds_code_here_on_every_rank_and_its_page_repeats_it(
    tmp_path, environment, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "demo"]) == 0
    own = tmp_path / "demo"
    script = Path(sys.executable).with_name("clip-runner")
    command = [str(script)] if script.is_file() else [sys.executable, "-m", "runner"]
    swept = [*command, "-m", *WORDS, "seed=1,2"]
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run(swept, cwd=own, env=environment, timeout=300, **pipes)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = Path(environment["RUNNER_OUTPUTS"])
    summaries = sorted(outputs.rglob("summary.json"))
    first, second = [json.loads(file.read_text()) for file in summaries]
    assert (first["steps"], first["world_size"]) == (3, 2)
    [page] = (outputs / "sweeps").glob("*/report.html")
    shown = re.findall(r"<code>(python -m runner [^<]*)</code>", page.read_text())
    commands = [shlex.split(unescape(text)) for text in shown]
    assert commands == [["python", "-m", "runner", *WORDS, f"seed={seed}"] for seed in (1, 2)]
    python(*commands[1][1:], cwd=own, env=environment)
    [alone] = (outputs / "runs").glob("*/summary.json")
    assert json.loads(alone.read_text())["final"]["eval/loss"] == second["final"]["eval/loss"]
    shown = re.findall(r"<pre>(python -m [^<]*)</pre>", (alone.parent / "report.html").read_text())
    assert unescape(shown[0]) == shlex.join(commands[1])
    # An evaluation takes options of the folder too.
    words = ["evaluate", str(alone.parent), "data=demo", "data.batch_size=4", "plugin=single"]
    done = python("-m", "runner", *words, "--config-dir", "conf", cwd=own, env=environment)
    loss = re.search(r"eval/loss +(\S+)", done.stdout)
    assert float(loss[1]) == pytest.approx(second["final"]["eval/loss"])
