"""Read a YAML file as Hydra does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.values import Refusal
from runner.config.yaml_text import load_yaml


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file as plain containers; references stay text."""
    return read_text_and_config(file)[1]


def read_text_and_config(file: Path) -> tuple[str, Any, DictConfig | ListConfig | None]:
    """Return the text of a YAML file, its content, and the same for Hydra."""
    try:
        text = file.read_text(encoding="utf-8")
        content = load_yaml(text)
        content = {} if content is None else content
        held = isinstance(content, dict | list)
        # This refuses keys and references that Hydra cannot read.
        return text, content, OmegaConf.create(content) if held else None
    except FileNotFoundError:
        raise Refusal(f"there is no file {file.absolute()}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = f"{place}{error.problem}"
    except OSError as error:
        reason = error.strerror or str(error)
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        reason = str(error).partition("\n")[0]
    raise Refusal(f"{file} cannot be read: {reason}")
