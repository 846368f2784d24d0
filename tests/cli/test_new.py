"""``python -m runner new NAME`` writes a folder that trains as it is, and whose test passes."""

import json
import subprocess
import sys

import pytest

from runner.cli.main import main
from tests.process import python

WRITTEN = {
    *("demo.py", "test_demo.py", "conf/model/demo.yaml", "conf/data/demo.yaml"),
    "conf/recipe/demo.yaml",
}


def test_the_folder_trains_as_it_is_and_its_own_test_passes(
    tmp_path, environment, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "demo"]) == 0
    folder = tmp_path / "demo"
    assert {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()} == WRITTEN
    home, train, test = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert (home, test) == ("cd demo", "python -m pytest")
    words = train.split()[1:]
    assert words == ["-m", "runner", "--config-dir", "conf", "recipe=demo"]
    python(*words, cwd=folder, env=environment)
    [summary] = (tmp_path / "outputs" / "runs").glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert found["final"]["eval/accuracy"] > 0.9
    assert 0 < found["clip/ratio_total"] < 1
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "3 passed" in python(*tests, cwd=folder, env=environment).stdout
    lint = ["ruff", "check", "--isolated", "--select", "E,F,W,I,UP,B", "--line-length", "100", "."]
    subprocess.run([sys.executable, "-m", *lint], cwd=folder, check=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my-model", "such as my_model"),
        ("größe", "must be a Python identifier in ASCII"),
        ("torch", "is a module that Python finds"),
        ("gpt", "is an option or a recipe already"),
        ("sweep_norm", "is an option or a recipe already"),
        ("there", "exists already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["new", name]) == 2
    assert expected in capsys.readouterr().err
    assert {one.name for one in tmp_path.iterdir()} == {"there"}
