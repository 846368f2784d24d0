"""Metric keys and names of a run's files are spelled in one module of ``runner/`` each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner
from runner.run_folder import files, keys

ROOT = Path(runner.__file__).parent
KEYS = ROOT / "run_folder" / "keys.py"
FILES = ROOT / "run_folder" / "files.py"


def constants(module: object) -> set[str]:
    """Return the values of a module's constants."""
    return {value for name, value in vars(module).items() if name.isupper()}


WORDS = {name for name in constants(files) if re.fullmatch("[a-z]+", name)}
"""File names that are also ordinary words: they count only as a part of a path."""


def texts(source: str) -> Iterator[tuple[str, bool]]:
    """Yield each string of a module, docstrings left out, and whether it is a part of a path."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    in_path = {
        id(node.right)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    }
    for node in ast.walk(tree):
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in docstrings:
            yield text, id(node) in in_path


def spelled(source: str) -> set[str]:
    """Return the metric keys and file names that a module spells, in a message too."""
    found = set()
    for text, in_path in texts(source):
        for name in constants(keys):
            if re.search(rf"(?<![\w/]){re.escape(name)}", text):
                found.add(name)
        for name in constants(files):
            part = name in text.split("/") if in_path else name not in WORDS and name in text
            if part:
                found.add(name)
    return found


@pytest.mark.parametrize("place", [KEYS, FILES], ids=["keys", "files"])
def test_each_name_is_spelled_in_one_module(place: Path) -> None:
    own = constants(keys if place == KEYS else files)
    elsewhere = {
        str(file.relative_to(ROOT)): found
        for file in ROOT.rglob("*.py")
        if file != place
        for found in [spelled(file.read_text(encoding="utf-8")) & own]
        if found
    }
    assert elsewhere == {}


def test_no_name_is_spelled_twice_in_its_own_module() -> None:
    for place in (KEYS, FILES):
        every = [text for text, _ in texts(place.read_text(encoding="utf-8"))]
        assert len(every) == len(set(every))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('row["train/loss"]', "train/loss"),
        ("f'loss {row[\"train/loss\"]}'", "train/loss"),
        ('f"clip/what_if/{threshold}"', "clip/what_if/"),
        ('key.startswith("eval/")', "eval/"),
        ('raise ValueError("see status.json")', "status.json"),
        ('folder / ".hydra/overrides.yaml"', ".hydra"),
        ('folder / "wandb"', "wandb"),
    ],
)
def test_a_second_spelling_is_found(source: str, name: str) -> None:
    assert name in spelled(source)


@pytest.mark.parametrize(
    "source", ['"""Writes status.json."""', 'config.tracker.name == "wandb"', '"conf/train/loss"']
)
def test_other_texts_are_no_spelling(source: str) -> None:
    assert spelled(source) == set()
