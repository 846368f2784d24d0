"""Read a YAML file as Hydra does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.bounded_file import read_bounded
from runner.config.bounded_yaml import load_yaml
from runner.config.values import Refusal


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file as plain containers; references stay text.

    Raises:
        Refusal: the file cannot be read; the message names the file, and the place in it.
    """
    try:
        content = load_yaml(read_bounded(file).decode("utf-8"))
        if isinstance(content, dict | list):
            OmegaConf.create(content)  # refuses keys and references that Hydra cannot read
        return {} if content is None else content
    except FileNotFoundError:
        raise Refusal(f"there is no file {file.absolute()}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = f"{place}{error.problem}"
    except OSError as error:
        reason = error.strerror or str(error)
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
    raise Refusal(f"{file} cannot be read: {reason}")
