"""Where the configuration and the recipes lie, and where runs are written."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

CONFIG_NAME = "config"
"""Name of the configuration in ``conf`` that all groups are chosen in."""

_PACKAGE = Path(__file__).resolve().parents[1]


def find(name: str) -> Path:
    """The folder ``conf`` or ``recipes``: inside the package in a wheel, beside it elsewhere."""
    bundled = _PACKAGE / f"_{name}"
    return bundled if bundled.is_dir() else _PACKAGE.parent / name


@cache
def options(group: str) -> tuple[str, ...]:
    """The options of a group of the configuration: the names of the files in its folder."""
    return tuple(sorted(file.stem for file in (find("conf") / group).glob("*.yaml")))


def outputs() -> Path:
    """The folder that holds all runs and sweeps.

    ``$RUNNER_OUTPUTS`` where it is set, else ``outputs`` in the checkout this runs from, else
    ``outputs`` in the working directory.
    """
    chosen = os.environ.get("RUNNER_OUTPUTS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    checkout = _PACKAGE.parent
    if find("conf") == checkout / "conf" and (checkout / "pyproject.toml").is_file():
        return checkout / "outputs"
    return Path.cwd() / "outputs"


def obstacle(folder: Path) -> str | None:
    """Why ``folder`` cannot be created and written, or None where it can.

    Nothing stays behind: an entry is made in the nearest folder that exists, and removed at once.
    To ask for permissions is not enough, since an administrator has them on a read-only disk too.
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
