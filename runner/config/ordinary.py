"""Names and paths of this program, which are shown even if a secret is equal to one of them.

With ``PASSWORD=adaptive`` in the environment every record would else hold ``clip=***``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from runner.config.folders import find

_NAME = re.compile(r"[A-Za-z_][\w-]*")

_paths: set[str] = set()


def show_path(path: Path) -> None:
    """Show the path of a run, a sweep or a folder of options from now on."""
    _paths.add(str(path))


def is_ordinary(text: str) -> bool:
    """Return whether a text is the name of an option or of a key, or stands in a shown path."""
    return text in _names() or any(text in path for path in _paths)


@cache
def _names() -> frozenset[str]:
    """Return the names of all options, and the words of keys and values in their files."""
    names = set[str]()
    for home in ("conf", "recipes"):
        for file in find(home).rglob("*.yaml"):
            names.add(file.stem)
            for line in file.read_text(encoding="utf-8").splitlines():
                names.update(_NAME.findall(line.partition("#")[0]))
    return frozenset(names)
