"""The commands: overrides and flags in, an exit code out."""

import argparse
import secrets
from collections.abc import Callable
from datetime import datetime
from inspect import getdoc
from pathlib import Path

from runner.config.folders import outputs
from runner.config.problem import Problem, RequestError
from runner.run_folder.strict_json import obstacle

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130
"""Exit codes; that of a run that another signal stopped is 129 (SIGHUP) or 143."""


def command_parser(command: Callable[..., int]) -> argparse.ArgumentParser:
    """Return the parser of a command with arguments of its own, whose docstring describes it."""
    return argparse.ArgumentParser(
        prog=f"python -m runner {command.__name__}",
        description=getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def folder(text: str) -> Path:
    """Return the path of a folder, the value of a flag."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder that exists, not {text}")
    return Path(text).absolute()


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
