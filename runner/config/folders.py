"""Folders of the configuration, of the recipes and of the outputs; YAML as Hydra reads it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

CONFIG_NAME = "config"
"""Name of the main configuration file in ``conf``, which chooses an option of each group."""

_PACKAGE = Path(__file__).resolve().parents[1]


class Refusal(ValueError):
    pass


def find(name: str) -> Path:
    """Return the folder ``conf`` or ``recipes``: inside the package in a wheel, else beside it."""
    bundled = _PACKAGE / f"_{name}"
    return bundled if bundled.is_dir() else _PACKAGE.parent / name


@cache
def options(group: str) -> tuple[str, ...]:
    """Return the options of a configuration group: the names of the files in its folder."""
    return tuple(sorted(file.stem for file in (find("conf") / group).glob("*.yaml")))


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file as plain containers; references stay text."""
    import yaml
    from omegaconf import OmegaConf  # a rank that checks nothing needs no reader
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.load(file))
    except FileNotFoundError:
        raise Refusal(f"there is no file {file.absolute()}") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        why = " ".join(str(error).split())
        raise Refusal(f"{file} cannot be read: {why}") from None


def outputs() -> Path:
    """Return the folder of all runs and sweeps: ``$RUNNER_OUTPUTS``, or ``outputs`` right here."""
    return Path(os.environ.get("RUNNER_OUTPUTS") or "outputs").expanduser().absolute()


def obstacle(folder: Path) -> str | None:
    """Return why ``folder`` cannot be created and written; None if it can."""
    must = "must be a folder that can be written"
    try:
        parent = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
        if not parent.is_dir():
            return f"{must}; {parent} is not a folder"
        with suppress(FileNotFoundError):
            os.lstat(folder)  # refuses a name that is too long
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=parent):
            return None
    except (OSError, ValueError) as error:
        return f"{must}: {getattr(error, 'strerror', None) or error}"
