"""``python -m runner new NAME``: write a folder with a model, data, a recipe and a test to edit."""

from __future__ import annotations

import keyword
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from runner.cli import command_parser
from runner.config.folders import find, obstacle, options
from runner.config.problem import Problem, RequestError
from runner.telemetry.sinks.console import print_line

VALUES = ("true", "false", "null", "none", "nan", "inf")
"""What an override reads as a value, not as a name."""

TEMPLATE = Path(__file__).parent / "template"
"""The files to write, with ``NAME`` for the name of the folder, as package data."""


def new(words: Sequence[str]) -> int:
    """Write the folder NAME with a model and a data set of your own to edit.

    Their code is in NAME.py, the options model=NAME and data=NAME and the recipe NAME in conf, and
    a test beside it. It trains as it is:

      python -m runner new demo
      cd demo
      python -m runner --config-dir conf recipe=demo
      python -m pytest
    """
    parser = command_parser(new)
    parser.add_argument("name", metavar="NAME", help="folder, module and options to write")
    name = parser.parse_args(words).name
    folder = Path(name).absolute()
    recipes = [file.stem for file in find("recipes").glob("*.yaml")]
    message = obstacle(folder)
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        message = "must be a Python identifier in ASCII, such as my_model"
    elif name.lower() in (*VALUES, *options("model"), *options("data"), *recipes):
        message = "is an option or a recipe already; choose another name"
    elif os.path.lexists(name) or find_spec(name) is not None:
        message = "exists already, or is a module that Python finds; choose another name"
    if message:
        raise RequestError([Problem("NAME", name, message)])
    for source in sorted(TEMPLATE.rglob("*.txt")):
        file = str(source.relative_to(TEMPLATE)).removesuffix(".txt").replace("NAME", name)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text("utf-8").replace("NAME", name), encoding="utf-8")
        print_line(f"{name}/{file}")
    print_line(f"\ncd {name}\npython -m runner --config-dir conf recipe={name}\npython -m pytest")
    return 0
