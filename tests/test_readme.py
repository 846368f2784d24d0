"""What the documents tell a reader to type is what the program and the gate know."""

import re
from pathlib import Path

import pytest
import yaml

from runner.config.folders import find, options

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GATE = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PYTEST = re.compile(r"python -m (pytest[^&#\n]*)")


def table():
    """The options of each group that the table of README lists, in its order."""
    _, _, text = README.partition("## What to choose")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text.partition("\n\n`train.")[0], re.MULTILINE)
    return {group: re.findall(r"`(\w+)`", listed) for group, listed in rows}


def defaults():
    """The option of each group that holds where nothing is chosen."""
    listed = yaml.safe_load((find("conf") / "config.yaml").read_text())["defaults"]
    entries = [entry for entry in listed if isinstance(entry, dict)]
    return {group: option for entry in entries for group, option in entry.items()}


def test_readme_lists_every_group():
    groups = {folder.name for folder in find("conf").iterdir() if folder.is_dir()} - {"hydra"}
    assert table().keys() == groups | {"recipe"}


@pytest.mark.parametrize("group", sorted(table()))
def test_readme_lists_every_option_the_default_first(group):
    recipes = {"none", *(file.stem for file in find("recipes").glob("*.yaml"))}
    existing = recipes if group == "recipe" else set(options(group))
    listed = table()[group]
    assert sorted(listed) == sorted(existing)
    assert listed[0] == defaults()[group]


def test_the_second_command_of_readme_runs_the_tests_of_the_gate():
    commands = [line for line in README.splitlines() if line.startswith("    python3.11 -m venv")]
    assert len(commands) == 2
    shown = [command.strip() for command in PYTEST.findall(commands[1])]
    gate = [command.strip() for command in PYTEST.findall(GATE)]
    assert shown == gate == ["pytest -q -n 2 --dist loadgroup", "pytest -q -m timing"]


def test_contributing_names_the_same_tests_and_every_mark(pytestconfig):
    shown = [command.strip() for command in PYTEST.findall(CONTRIBUTING)]
    assert shown[:2] == [command.strip() for command in PYTEST.findall(GATE)]
    marks = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    for mark in {"gpu", "timing", "slow"} & set(marks):
        assert f"pytest -m {mark}" in shown


def test_pytest_leaves_out_what_the_gate_does(pytestconfig):
    words = pytestconfig.getini("addopts")
    assert words[words.index("-m") + 1] == "not timing and not gpu and not slow"
