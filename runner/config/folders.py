"""Folders of the configuration, of the recipes and of the outputs."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from runner.config import disk

CONFIG_NAME = "config"
"""Name of the main configuration file in ``conf``, which chooses an option of each group."""

_PACKAGE = Path(__file__).resolve().parents[1]


def find(name: str) -> Path:
    """Return the folder ``conf`` or ``recipes``: inside the package in a wheel, else beside it."""
    bundled = _PACKAGE / f"_{name}"
    return bundled if bundled.is_dir() else _PACKAGE.parent / name


@cache
def options(group: str) -> tuple[str, ...]:
    """Return the options of a configuration group: the names of the files in its folder."""
    return tuple(sorted(file.stem for file in (find("conf") / group).glob("*.yaml")))


def outputs() -> Path:
    """Return the folder that holds all runs and sweeps."""
    if chosen := os.environ.get("RUNNER_OUTPUTS"):
        return Path(chosen).expanduser().absolute()
    checkout = _PACKAGE.parent
    if find("conf") == checkout / "conf" and (checkout / "pyproject.toml").is_file():
        return checkout / "outputs"
    return Path.cwd() / "outputs"


def obstacle(folder: Path) -> str | None:
    """Return why ``folder`` cannot be created and written; None if it can."""
    for parent in (folder, *folder.parents):
        if not os.path.lexists(parent):
            continue
        if not parent.is_dir():
            return f"must be a folder that can be written; {parent} is not a folder"
        if message := _unusable(folder, parent):
            return f"must be a folder that can be written; {message}"
        try:
            with tempfile.TemporaryDirectory(prefix=".writable-", dir=parent):
                return disk.shortage(parent)
        except OSError as error:
            return f"must be a folder that can be written; {parent}: {error.strerror}"
    return "must be a folder that can be written; no part of this path exists"


_INSIDE = 200
"""Bytes that the names of files in the folder of a run may add to its path."""


def _unusable(folder: Path, parent: Path) -> str | None:
    """Return why a folder below ``parent``, which exists, cannot have its name; None if it can."""
    longest = os.pathconf(parent, "PC_NAME_MAX")
    for name in folder.parts[len(parent.parts) :]:
        if not _storable(name):
            return f"{name!a} is no name of a file"
        if (size := len(os.fsencode(name))) > longest:
            return f"{name[:20]}… has {size} bytes, and a name has at most {longest}"
    size, longest = len(os.fsencode(folder)), os.pathconf(parent, "PC_PATH_MAX") - _INSIDE
    return f"the path has {size} bytes, and at most {longest} fit" if size > longest else None


def _storable(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False
