"""The commands: overrides and flags in, an exit code out."""

import argparse
import secrets
from collections.abc import Callable
from datetime import datetime
from inspect import getdoc
from pathlib import Path
from typing import Any, NoReturn

from runner.config.folders import Refusal, outputs, read_yaml
from runner.config.notation import higher_is_better
from runner.config.ordinary import show_path
from runner.config.problem import NOTHING, Problem, RequestError
from runner.run_folder import files
from runner.run_folder.strict_json import obstacle


class Parser(argparse.ArgumentParser):
    """Refuses wrong arguments by the same message as a wrong key."""

    def error(self, message: str) -> NoReturn:
        """Raise a RequestError that names the argument."""
        if message.startswith("the following"):
            message = f"{message.partition(': ')[2]}: must be given"
        name, _, text = message.removeprefix("argument ").partition(": ")
        raise RequestError([Problem(name, NOTHING, text)])


def command_parser(command: Callable[..., int]) -> Parser:
    """Return the parser of a command with arguments of its own, whose docstring describes it."""
    return Parser(
        prog=f"python -m runner {command.__name__}",
        description=getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def checkpoint_parser(command: Callable[..., int]) -> Parser:
    """Return the parser of a command that uses the checkpoint of a run."""
    parser = command_parser(command)
    about = "checkpoint (final, or last if the run has no final weights)"
    parser.add_argument("run", type=_run, metavar="RUN", help="folder of a run")
    parser.add_argument("--checkpoint", metavar="STEP|best|last|final", help=about)
    return parser


def folder(text: str) -> Path:
    """Return the path of a folder, the value of a flag."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder that exists, not {text}")
    path = Path(text).absolute()
    show_path(path)
    return path


def _run(text: str) -> Path:
    if (folder(text) / files.SWEEP).exists():
        example = Path(text) / "0"
        raise argparse.ArgumentTypeError(f"is a sweep; name one of its runs, such as {example}")
    return folder(text)


def chosen(run: Path, name: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a whole checkpoint of a run and its manifest."""
    from runner.checkpoint.folder import NoCheckpoint, choose

    try:
        config = read_yaml(run / files.CONFIG) if name == "best" else {}
        section = config.get("sweep") if isinstance(config, dict) else None
        section = section if isinstance(section, dict) else {}
        objective, direction = str(section.get("objective")), section.get("direction")
        maximizes = direction == "maximize" or (not direction and higher_is_better(objective))
        return choose(run, name, objective, maximizes)
    except (NoCheckpoint, Refusal) as error:
        raise RequestError([Problem("RUN", str(run), str(error))]) from None


def new_folder(kind: str, file: str, key: str, given: Path | None) -> Path:
    """Return a folder for ``file``, which can be written and does not hold that file yet."""
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
    chosen = given.absolute() if given else outputs() / f"{kind}s" / name
    message = obstacle(chosen)
    if message is None and (chosen / file).exists():
        message = f"holds an earlier {kind} ({file}); choose another name or remove it"
    if message:
        raise RequestError([Problem(key if given else "RUNNER_OUTPUTS", str(chosen), message)])
    return chosen
