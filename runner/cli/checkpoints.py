"""The run and the checkpoint that a command's arguments name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runner.config.objective import higher_is_better
from runner.config.problem import Problem, RequestError
from runner.config.values import Refusal
from runner.config.yaml_file import read_yaml
from runner.run_folder import files

NAMED = ("best", "last", files.FINAL)
"""Checkpoints that are not named by their step."""


def which(word: str) -> str:
    """Return the name or the step of a checkpoint, an argument of a command."""
    if word in NAMED or (word.isdecimal() and len(word) < 16):
        return word
    raise argparse.ArgumentTypeError(
        f"must be a number of optimizer steps, {', '.join(NAMED[:-1])} or {NAMED[-1]}: {word!r}"
    )


def folder_of_run(given: Path) -> Path:
    """Return the absolute path of a run's folder."""
    message = None
    if not given.is_dir():
        message = "there is no such folder"
    elif (given / files.SWEEP).exists():
        message = "is a sweep; name one of its runs, such as " + str(given / "0")
    if message is not None:
        raise RequestError([Problem("RUN", str(given), message)])
    return given.absolute()


def chosen(run: Path, name: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a whole checkpoint of a run and its manifest, see :func:`export.choose`."""
    from runner.checkpoint.export import NoCheckpoint, choose

    objective, maximizes = _objective(run) if name == "best" else ("", False)
    try:
        return choose(run, name, objective, maximizes)
    except NoCheckpoint as error:
        raise RequestError([Problem("RUN", str(run), str(error))]) from None


def _objective(run: Path) -> tuple[str, bool]:
    """Return the metric that runs are compared by, and whether it is maximised."""
    try:
        section = read_yaml(run / files.CONFIG)["sweep"]
        objective, direction = str(section["objective"]), section["direction"]
    except Refusal as error:
        raise RequestError([Problem("--checkpoint", "best", str(error))]) from None
    except (KeyError, TypeError):
        message = f"needs sweep.objective, which {run / files.CONFIG} lacks"
        raise RequestError([Problem("--checkpoint", "best", message)]) from None
    return objective, higher_is_better(objective) if direction is None else direction == "maximize"
