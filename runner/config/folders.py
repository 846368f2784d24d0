"""Folders of the configuration, the recipes and the outputs; YAML as Hydra reads it; full disks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

CONFIG_NAME = "config"  # of the main file in ``conf``, which chooses an option of each group

_PACKAGE = Path(__file__).resolve().parents[1]
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        raise Refusal(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def outputs() -> Path:
    """Return the folder of all runs and sweeps: ``$RUNNER_OUTPUTS``, or ``outputs`` right here."""
    return Path(os.path.expanduser(os.environ.get("RUNNER_OUTPUTS") or "outputs")).absolute()


def obstacle(folder: Path) -> str | None:
    """Return why ``folder`` cannot be created and written; None if it can."""
    parent = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    try:
        with suppress(FileNotFoundError):
            os.lstat(folder)  # refuses a name that is too long
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=parent):
            return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return f"must be a folder that can be written: {parent}: {why}"


def not_written(error: OSError, path: Path, what: str) -> OSError:
    """Return ``error`` with a message of one line that says what could not be written."""
    if error.errno not in _FULL:
        why = error.strerror or str(error)
        return OSError(error.errno, f"{what} could not be written to {path}: {why}")
    place = path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    return OSError(errno.ENOSPC, f"the disk {place} is full: {what} could not be written")


def disk_full(error: BaseException | str | None) -> str | None:
    """Return the one line of a full disk, if ``error``, or its traceback, says one; else None."""
    lines = traceback.format_exception(error) if isinstance(error, BaseException) else [str(error)]
    found = re.findall(rf"\[Errno (?:{'|'.join(map(str, _FULL))})\] (.*)", "".join(lines))
    return found[-1] if found else None


def require_room(folder: Path) -> None:
    """Refuse to begin on a disk that has no room for the record of a run (64 kB)."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if shutil.disk_usage(there).free < 2**16:
        raise not_written(OSError(errno.ENOSPC, ""), folder, folder.name)
