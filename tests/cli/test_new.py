"""``python -m runner new NAME``: code and options in a folder of a user's own."""

import json
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from runner.cli.main import main
from tests.process import python, run_here

WRITTEN = {
    *("demo.py", "test_demo.py", "conf/model/demo.yaml", "conf/data/demo.yaml"),
    "conf/recipe/demo.yaml",
    "pytest.ini",
}


def test_the_folder_trains_on_ranks_its_page_repeats_the_command_and_its_own_test_passes(
    tmp_path, environment, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "demo"]) == 0
    folder = tmp_path / "demo"
    assert {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()} == WRITTEN
    home, train, test = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert (home, test) == ("cd demo", "python -m pytest")
    before = {one: one.stat().st_mtime_ns for one in folder.rglob("*")}
    assert main(["new", "demo"]) == 2
    assert {one: one.stat().st_mtime_ns for one in folder.rglob("*")} == before
    assert "exists already" in capsys.readouterr().err
    words = train.split()
    assert words == ["python", "-m", "runner", "--config-dir", "conf", "recipe=demo"]
    # The console script finds the code here, on every rank.
    script = Path(sys.executable).with_name("clip-runner")
    command = [str(script)] if script.is_file() else [sys.executable, "-m", "runner"]
    more = ["tracker=none", "plugin=ddp", "plugin.nproc=2"]
    typed = [*command, *words[3:], *more]
    subprocess.run(typed, cwd=folder, env=environment, timeout=600, check=True)
    [summary] = Path(environment["RUNNER_OUTPUTS"]).glob("runs/*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["final"]["eval/accuracy"] > 0.9, found["world_size"]) == (True, 2)
    assert 0 < found["clip/ratio_total"] < 1
    page = (summary.parent / "report.html").read_text()
    again = [*words[:4], str(folder / "conf"), *words[5:], *more]
    commands = re.findall(r"<code>(python -m [^<]*)</code>", page)
    assert shlex.join(again) in [unescape(command) for command in commands]
    # An evaluation takes options of the folder too.
    asked = ["evaluate", str(summary.parent), "data=demo", "data.batch_size=4", "plugin=single"]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    out, _ = run_here(*asked, "--config-dir", "conf")
    del sys.modules["demo"]
    loss = re.search(r"eval/loss +(\S+)", out)
    assert float(loss[1]) == pytest.approx(found["final"]["eval/loss"])
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "3 passed" in python(*tests, cwd=folder, env=environment).stdout
    lint = ["ruff", "check", "--isolated", "--select", "E,F,W,I,UP,B", "--line-length", "100", "."]
    subprocess.run([sys.executable, "-m", *lint], cwd=folder, check=True, timeout=600)
