"""Folders of the configuration, of the recipes and of the outputs."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

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
    """Return the folder that holds all runs and sweeps.

    This is ``$RUNNER_OUTPUTS`` if it is set, else ``outputs`` in the checkout that the program
    runs from, else ``outputs`` in the working directory.
    """
    if chosen := os.environ.get("RUNNER_OUTPUTS"):
        return Path(chosen).expanduser().absolute()
    checkout = _PACKAGE.parent
    if find("conf") == checkout / "conf" and (checkout / "pyproject.toml").is_file():
        return checkout / "outputs"
    return Path.cwd() / "outputs"


def obstacle(folder: Path) -> str | None:
    """Return why ``folder`` cannot be created and written; None if it can.

    A temporary folder is created in the nearest parent that exists, and removed. Permissions alone
    do not answer the question: root has them on a read-only disk too.
    """
    for parent in (folder, *folder.parents):
        if not os.path.lexists(parent):
            continue
        if not parent.is_dir():
            return f"must be a folder that can be written; {parent} is not a folder"
        try:
            with tempfile.TemporaryDirectory(prefix=".writable-", dir=parent):
                return None
        except OSError as error:
            return f"must be a folder that can be written; {parent}: {error.strerror}"
    return "must be a folder that can be written; no part of this path exists"
