"""The commands: overrides and flags in, an exit code out."""

import argparse
import os
import secrets
from collections.abc import Callable
from datetime import datetime
from inspect import getdoc
from pathlib import Path
from typing import Any, NoReturn

from runner.config.folders import Refusal, outputs, read_yaml
from runner.config.notation import higher_is_better
from runner.config.ordinary import show_path
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean
from runner.run_folder import files
from runner.run_folder.strict_json import obstacle


class Parser(argparse.ArgumentParser):
    """Refuses wrong arguments by the same message as a wrong key."""

    def error(self, message: str) -> NoReturn:
        """Raise a RequestError that names the argument."""
        if message.startswith("the following"):
            names = message.partition(": ")[2].split(", ")
            required = [name for name in names if name != "KEY=VALUE"]  # which may be left out
            message = f"{', '.join(required)}: must be given"
        if message.startswith("unrecognized arguments: "):
            unknown = message.partition(": ")[2].split()[0]
            message = f"{unknown}: unknown{did_you_mean(unknown, self._option_string_actions)}"
        name, _, text = message.removeprefix("argument ").partition(": ")
        raise RequestError([Problem(name, NOTHING, text)])


def command_parser(command: Callable[..., object]) -> Parser:
    """Return the parser of a command with arguments of its own, whose docstring describes it."""
    return Parser(
        prog=f"python -m runner {command.__name__}",
        description=getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def checkpoint_parser(command: Callable[..., object]) -> Parser:
    """Return the parser of a command that uses the checkpoint of a run."""
    parser = command_parser(command)
    parser.add_argument("run", type=_run_folder, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--checkpoint",
        metavar="STEP|best|last|final",
        help="checkpoint (final, or last if the run has no final weights)",
    )
    return parser


def existing_folder(text: str) -> Path:
    """Return the path of a folder, the value of a flag."""
    if not os.path.isdir(text):  # Path.is_dir raises an error for a name that is too long
        raise argparse.ArgumentTypeError(f"must be a folder that exists, not {text}")
    path = Path(text).absolute()
    show_path(path)
    return path


def _run_folder(text: str) -> Path:
    folder = existing_folder(text)
    if (folder / files.SWEEP).exists():
        example = Path(text) / "0"
        raise argparse.ArgumentTypeError(f"is a sweep; name one of its runs, such as {example}")
    return folder


def choose_checkpoint(run: Path, name: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a whole checkpoint of a run and its manifest."""
    from runner.checkpoint.folder import NoCheckpoint, choose

    try:
        sweep = _sweep_section(run) if name == "best" else {}
        objective = str(sweep.get("objective"))
        direction = sweep.get("direction")
        maximizes = direction == "maximize" or (not direction and higher_is_better(objective))
        return choose(run, name, objective, maximizes)
    except (NoCheckpoint, Refusal) as error:
        raise RequestError([Problem("RUN", str(run), str(error))]) from None


def _sweep_section(run: Path) -> dict[str, Any]:
    """Return section ``sweep`` of a run's configuration; empty if it has none."""
    config = read_yaml(run / files.CONFIG)
    section = config.get("sweep") if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def new_folder(kind: str, file: str, key: str, chosen: Path | None) -> Path:
    """Return a folder for ``file``: the one that ``key`` chooses, or one named by the time.

    A RequestError says that it cannot be written, or holds that file already.
    """
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
    folder = chosen.absolute() if chosen else outputs() / f"{kind}s" / name
    message = obstacle(folder)
    if message is None and (folder / file).exists():
        message = f"holds an earlier {kind} ({file}); choose another name or remove it"
    if message:
        raise RequestError([Problem(key if chosen else "RUNNER_OUTPUTS", str(folder), message)])
    return folder
