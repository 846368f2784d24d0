"""Read a YAML file as Hydra does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.values import Refusal


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file as plain containers; references stay text.

    Raises:
        Refusal: the file cannot be read; the message names the file, and the place in it.
    """
    try:
        # OmegaConf's reader refuses a key that stands twice; yaml's own takes the last one.
        return OmegaConf.to_container(OmegaConf.load(file))
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
