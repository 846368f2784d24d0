"""The shape of the house: circles, the way of a threshold, private interfaces."""

import ast
import re
import traceback
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import runner
from runner.cli.main import main
from runner.clip.norm import NormClip
from tests.process import ROOT

HOUSE = Path(runner.__file__).parent


@cache
def tree(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def module_name(file):
    parts = file.relative_to(HOUSE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file, known):
    """The modules of the house that ``file`` imports, wherever in it."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def test_no_room_has_a_circle():
    modules = {module_name(file): file for file in HOUSE.rglob("*.py")}
    for room in sorted(path.name for path in HOUSE.iterdir() if path.is_dir()):
        inside = {name: file for name, file in modules.items() if name.split(".")[1:2] == [room]}
        needs = {
            name: {*imported(file, inside)} & {*inside} - {name} for name, file in inside.items()
        }
        [*TopologicalSorter(needs).static_order()]  # raises CycleError


@pytest.mark.usefixtures("outputs")
def test_the_way_of_a_threshold_is_the_one_that_contributing_lists(monkeypatch):
    """README's first command, from its words to the coefficient of a step."""
    way: dict[str, None] = {}
    decide = NormClip.decide_finite

    def noting(*arguments):
        for frame in traceback.extract_stack():
            if Path(frame.filename).is_relative_to(HOUSE):
                way[str(Path(frame.filename).relative_to(HOUSE))] = None
        return decide(*arguments)

    monkeypatch.setattr(NormClip, "decide_finite", noting)
    words = ["clip=norm", "clip.threshold=0.25", "train.max_duration=1ba"]
    assert main([*words, "device=cpu", "tracker=none"]) == 0
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("The way of a threshold")[2]
    listed = re.findall(r"`([\w/]+\.py)`", section.partition("\n\n")[0])
    assert listed == ["__main__.py", *way, "clip/norm.py"]
    assert len(listed) <= 14


def private_names(file):
    """Private modules, imports and attributes of libraries that a module names."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if match := re.match(
                r"((?:torch|hydra|wandb|omegaconf)(?:\.\w+)*?\.(_(?!_)\w+))", name
            ):
                yield match[1]


def test_private_interfaces_are_those_that_contributing_lists():
    used = {name for file in HOUSE.rglob("*.py") for name in private_names(file)}
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Private interfaces")[2]
    listed = re.findall(r"^\| `([\w.*]+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert len(listed) <= 8
    assert not [name for name in used if not name.startswith("torch")]
    for name in used:
        assert any(
            re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\w*"), name)
            for pattern in listed
        ), name
