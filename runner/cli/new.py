"""``python -m runner new NAME``: write a folder with a model, data, a recipe and a test to edit."""

from __future__ import annotations

import keyword
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from runner.cli import command_parser
from runner.config.folders import find, obstacle, options
from runner.config.problem import Problem, RequestError
from runner.telemetry.sinks.console import print_line

DESCRIPTION = """\
Write the folder NAME with a model and a data set of your own to edit: their code in NAME.py, the
options model=NAME and data=NAME and the recipe NAME in conf, and a test. It trains as it is:

  python -m runner new demo
  cd demo
  python -m runner --config-dir conf recipe=demo
  python -m pytest"""

TEMPLATE = Path(__file__).parent / "template"
"""The files to write, with ``NAME`` for the name of the folder, as package data."""


def main(words: Sequence[str]) -> int:
    """Write the folder, and print the commands to run next."""
    parser = command_parser("new", DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="folder, module and options to write")
    name = parser.parse_args(words).name
    folder = Path(name).absolute()
    if message := _refused(name) or obstacle(folder):
        raise RequestError([Problem("NAME", name, message)])
    for source in sorted(TEMPLATE.rglob("*.txt")):
        file = str(source.relative_to(TEMPLATE)).removesuffix(".txt").replace("NAME", name)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text("utf-8").replace("NAME", name), encoding="utf-8")
        print_line(f"{name}/{file}")
    print_line(f"\ncd {name}\npython -m runner --config-dir conf recipe={name}\npython -m pytest")
    return 0


def _refused(name: str) -> str | None:
    """Return why ``name`` cannot be that of a module, of options and of a new folder."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or keyword.iskeyword(name):
        return "must be a Python identifier in ASCII, such as my_model"
    recipes = [file.stem for file in find("recipes").glob("*.yaml")]
    # The first six are values in an override, not names.
    taken = ("true", "false", "null", "none", "nan", "inf", *options("model"), *options("data"))
    if name.lower() in taken or name in recipes:
        return "is an option or a recipe already; choose another name"
    if os.path.lexists(name):
        return "exists already; choose another name or remove it"
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        return "is a module that Python finds already; choose another name"
    return None
