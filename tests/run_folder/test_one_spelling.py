"""Metric keys and names of a run's files are spelled in one module of ``runner/`` each."""

import ast
import re
from pathlib import Path

import runner
from runner.run_folder import files, keys

ROOT = Path(runner.__file__).parent


def constants(module):
    return {value for name, value in vars(module).items() if name.isupper()}


WORDS = {name for name in constants(files) if re.fullmatch("[a-z]+", name)}
"""File names that are also ordinary words: they count only as a part of a path."""


def spelled(source):
    """Return the metric keys and file names that a module spells, docstrings left out."""
    nodes, found = [*ast.walk(ast.parse(source))], set()
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    paths = {
        id(node.right)
        for node in nodes
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    }
    for node in nodes:
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if not isinstance(text, str) or id(node) in skipped:
            continue
        found |= {one for one in constants(keys) if re.search(rf"(?<![\w/]){re.escape(one)}", text)}
        parts = text.split("/") if id(node) in paths else []
        found |= {one for one in constants(files) if one in parts}
        found |= {one for one in constants(files) - WORDS if one in text and not parts}
    return found


def test_each_name_is_spelled_in_one_module():
    assert spelled("f'loss {row[\"train/loss\"]}'; a = folder / 'wandb'") == {"train/loss", "wandb"}
    assert spelled('"""Writes status.json."""; name == "wandb"; a = "conf/train/loss"') == set()
    for module in (keys, files):
        for file in ROOT.rglob("*.py"):
            own = spelled(file.read_text(encoding="utf-8")) & constants(module)
            assert not own or file == Path(module.__file__), (file, own)
