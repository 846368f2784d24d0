"""``python -m runner new NAME``: write a folder with a model, data, a recipe and a test to edit."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

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

_VALUES = {"true", "false", "null", "none", "nan", "inf"}
"""Words that are no text in an override: ``recipe=null`` chooses nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and print the commands to run next."""
    parser = argparse.ArgumentParser(
        prog="python -m runner new",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="folder, module and options to write")
    name = parser.parse_args(argv).name
    folder = Path(name).absolute()
    if message := _refused(name) or _taken(name) or obstacle(folder):
        raise RequestError([Problem("NAME", name, message)])
    try:
        folder.mkdir()
        for source in sorted(TEMPLATE.rglob("*.txt")):
            file = str(source.relative_to(TEMPLATE)).removesuffix(".txt").replace("NAME", name)
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source.read_text("utf-8").replace("NAME", name), encoding="utf-8")
            print_line(str(path.relative_to(folder.parent)))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise RequestError([Problem("NAME", name, message)]) from None
    print_line(f"\ncd {name}")
    print_line(f"python -m runner --config-dir conf recipe={name}")
    print_line("python -m pytest")
    return 0


def _refused(name: str) -> str | None:
    """Return why ``name`` cannot be that of a module and of options."""
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and not keyword.iskeyword(name):
        return "is no text in an override; choose another name" if name.lower() in _VALUES else None
    near = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    near = f"my_{near}" if near and (near[0].isdigit() or keyword.iskeyword(near)) else near
    hint = f"; did you mean {near}?" if near else ""
    return f"must be a Python identifier in ASCII, such as my_model{hint}"


def _taken(name: str) -> str | None:
    """Return what has the name ``name`` already."""
    if os.path.lexists(name):
        return "exists already; choose another name or remove it"
    for group in ("model", "data"):
        if name in options(group):
            return f"is an option of {group} already; choose another name"
    if (find("recipes") / f"{name}.yaml").is_file():
        return "is a recipe already; choose another name"
    elsewhere = [path for path in sys.path if path and Path(path) != Path.cwd()]
    found = PathFinder.find_spec(name, elsewhere)
    if name in sys.stdlib_module_names or (found is not None and found.origin is not None):
        return "is a module that Python finds already; choose another name"
    return None
