"""Start the program as a user does: in a fresh process, with its outputs in a scratch folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runner.bench.pairs import Side, clocked
from runner.bench.table import Setting

PATIENCE = 300.0
"""Seconds after which a command is killed."""


def run(arguments: Sequence[str], setting: Setting, code: int = 0) -> None:
    """Run Python with ``arguments`` to its end.

    Raises:
        RuntimeError: its exit code is not ``code``; the message has the end of what it printed.
    """
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=_environment(setting.folder),
        cwd=setting.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    if ended.returncode != code:
        printed = ended.stdout.decode(errors="replace")[-2000:]
        command = " ".join(["python", *arguments])
        raise RuntimeError(f"{command} ended with {ended.returncode}, not {code}:\n{printed}")


def side(arguments: Sequence[str], setting: Setting, code: int = 0) -> Side:
    """Return a side that runs Python with ``arguments``, see :func:`run`."""
    return lambda: clocked(lambda: run(arguments, setting, code))


@contextmanager
def answering(arguments: Sequence[str], setting: Setting) -> Iterator[Side]:
    """Context with a side that a process serves, which answers each line with its seconds.

    Args:
        arguments: arguments of Python.
        setting: where its files go.
    """
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=_environment(setting.folder),
        cwd=setting.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None
        assert answers is not None

        def seconds() -> float:
            print(file=asked, flush=True)
            return float(answers.readline())

        yield seconds


def _environment(folder: Path) -> dict[str, str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    path = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "RUNNER_OUTPUTS": str(folder / "outputs"),
        "WANDB_MODE": "offline",
    }
