"""Folders of the configuration, the recipes and the outputs; YAML as Hydra reads it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from runner.config.reading import DamagedFile, yaml_of

_PACKAGE = Path(__file__).resolve().parents[1]


class Refusal(ValueError):
    """A file of the configuration cannot be read; the message names the file."""


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
    import io

    import yaml
    from omegaconf import OmegaConf  # a rank that checks nothing needs no reader
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = yaml_of(file).decode("utf-8")
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except FileNotFoundError:
        raise Refusal(f"there is no file {file.absolute()}") from None
    except DamagedFile as error:
        raise Refusal(str(error)) from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise Refusal(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def outputs() -> Path:
    """Return the folder of all runs and sweeps: ``$RUNNER_OUTPUTS``, or ``outputs`` right here."""
    return Path(os.path.expanduser(os.environ.get("RUNNER_OUTPUTS") or "outputs")).absolute()
