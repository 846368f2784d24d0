"""The folder that a run or a sweep will be written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.compose.diagnose import reason
from runner.config.folders import obstacle, outputs
from runner.config.problem import NOTHING, Problem

Earlier: TypeAlias = Callable[[Path, str | None], str | None]
"""Returns why a folder must not be written by a run (None), or by a sweep with the given hash."""


def folder_problems(
    config: DictConfig,
    kind: str,
    overrides: Sequence[Override],
    earlier: Earlier | None = None,
    tries: bool = True,
) -> Iterator[Problem]:
    """Why the folder of a run or sweep cannot be written.

    Args:
        config: the composition, Hydra's part included.
        kind: ``run`` or ``sweep``.
        overrides: the words that gave it.
        earlier: returns why a run must not be written to a folder; None for any folder.
        tries: whether to try it, or only to resolve its name.
    """
    key = f"hydra.{kind}.dir"
    try:
        folder = Path(_text(config, key)).absolute()
    except (OmegaConfBaseException, ValueError) as error:
        yield Problem(key, NOTHING, f"cannot be resolved: {reason(error)}")
        return
    if not tries:
        return
    typed = any(override.key_or_group == key for override in overrides)
    if message := obstacle(folder):
        if typed or not folder.is_relative_to(outputs()):
            yield Problem(key, str(folder), message)
        else:
            yield Problem("RUNNER_OUTPUTS", str(outputs()), message)
    elif earlier is not None and (message := earlier(folder, None)):
        yield Problem(key, str(folder), message)


def _text(config: DictConfig, key: str) -> str:
    value: Any = OmegaConf.select(config, key, throw_on_missing=True)
    return str(value)
