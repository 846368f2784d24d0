"""``python -m runner new NAME``: code and options in a folder of a user's own."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import chdir
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.cli.main import main
from tests.process import environment_at, python, run_here

pytestmark = pytest.mark.xdist_group("new")  # it trains once

WRITTEN = {
    *("demo.py", "test_demo.py", "conf/model/demo.yaml", "conf/data/demo.yaml"),
    "conf/recipe/demo.yaml",
    "pytest.ini",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder that the command wrote, what it printed, and an environment for runs of it."""
    home = tmp_path_factory.mktemp("new")
    with chdir(home):
        printed, _ = run_here("new", "demo")
    return SimpleNamespace(folder=home / "demo", printed=printed, environment=environment_at(home))


@pytest.fixture(scope="module")
def trained(demo):
    """The folder of a run that the console script trained on two ranks, and the typed words."""
    script = Path(sys.executable).with_name("clip-runner")
    command = [str(script)] if script.is_file() else [sys.executable, "-m", "runner"]
    words = ["recipe=demo", "tracker=none", "plugin=ddp", "plugin.nproc=2"]
    typed = [*command, "--config-dir", "conf", *words]
    subprocess.run(typed, cwd=demo.folder, env=demo.environment, timeout=600, check=True)
    [run] = Path(demo.environment["RUNNER_OUTPUTS"]).glob("runs/*")
    return run, words


def test_it_writes_all_files_that_a_training_needs(demo):
    files = [path for path in demo.folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(demo.folder)) for path in files} == WRITTEN


def test_it_prints_the_commands_to_type_next(demo):
    assert demo.printed.partition("\n\n")[2].splitlines() == [
        "cd demo",
        "python -m runner --config-dir conf recipe=demo",
        "python -m pytest",
    ]


def test_a_folder_that_exists_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "demo"]) == 0
    files = [*Path("demo").rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert main(["new", "demo"]) == 2
    assert [*Path("demo").rglob("*")] == files
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert "exists already" in capsys.readouterr().err


def test_the_console_script_finds_the_code_on_every_rank(trained):
    run, _ = trained
    summary = json.loads((run / "summary.json").read_text())
    assert summary["final"]["eval/accuracy"] > 0.9
    assert summary["world_size"] == 2
    assert 0 < summary["clip/ratio_total"] < 1


def test_the_page_repeats_the_command_with_the_whole_path_of_its_options(demo, trained):
    run, words = trained
    page = (run / "report.html").read_text()
    command = ["python", "-m", "runner", "--config-dir", str(demo.folder / "conf"), *words]
    commands = re.findall(r"<code>(python -m [^<]*)</code>", page)
    assert shlex.join(command) in [unescape(shown) for shown in commands]


def test_an_evaluation_takes_options_of_the_folder(demo, trained, monkeypatch):
    run, _ = trained
    words = ["evaluate", str(run), "data=demo", "data.batch_size=4", "plugin=single"]
    monkeypatch.chdir(demo.folder)
    monkeypatch.syspath_prepend(demo.folder)
    out, _ = run_here(*words, "--config-dir", "conf")
    del sys.modules["demo"]
    loss = re.search(r"eval/loss +(\S+)", out)
    summary = json.loads((run / "summary.json").read_text())
    assert float(loss[1]) == pytest.approx(summary["final"]["eval/loss"])


def test_its_own_tests_pass(demo):
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "3 passed" in python(*tests, cwd=demo.folder, env=demo.environment).stdout


def test_ruff_finds_no_fault_in_its_code(demo):
    lint = ["ruff", "check", "--isolated", "--select", "E,F,W,I,UP,B", "--line-length", "100", "."]
    subprocess.run([sys.executable, "-m", *lint], cwd=demo.folder, check=True, timeout=600)
