"""``python -m runner verify``: compare a plugin's steps with those of one process.

It takes the overrides of a run and checks them in the same way. It writes ``verify.json`` to a
folder of its own, and nothing to ``outputs/runs``.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.cli.new_folder import new_folder
from runner.cli.run import single
from runner.compose.jobs import Job
from runner.compose.overrides import key_of
from runner.compose.request import Request
from runner.config.environment import joins
from runner.config.problem import DataMismatch, RequestError
from runner.config.secrets import masked_words
from runner.telemetry.sinks.console import print_line

FILE = "verify.json"

USAGE = """\
python -m runner verify [GROUP=OPTION ...] [KEY=VALUE ...]

Trains verify.steps optimizer steps under the plugin, and on the same batches in one process.
Compares the norm of the gradient, the clipped gradient and the weights, and prints what
torch.nn.utils computes from each rank's gradients. `python -m runner --help` lists all overrides.

  verify.steps=4            number of optimizer steps to compare
  verify.dtype=float64      data type of both sides: float64 or float32
  verify.tolerance=1e-9     largest relative error that passes; 1e-5 in float32
  verify.modes=[norm,value] clipping modes to compare; clip.mode by default
  verify.lr=0.1             learning rate of the plain SGD of both sides
  hydra.run.dir=FOLDER      folder of verify.json

Exit codes: 0 equal   1 not equal, or a rank failed   2 the request was wrong
129, 130, 143 interrupted"""


def main(words: Sequence[str]) -> int:
    """Compare the plugin that the arguments ``words`` choose with one process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no ‖
    wanted, also = checked(words)
    [job] = wanted.jobs
    folder = None if joins() else _folder(wanted, words)
    from runner.launch.failure import Failure, attempt
    from runner.verify.side_by_side import execute
    from runner.verify.table import last_line, lines

    if folder is None:
        from runner.launch.rank import join

        return join(execute, job.config.launch.timeout)
    from runner.launch.supervise import train

    folder.mkdir(parents=True, exist_ok=True)
    config = job.config
    print_line(f"plugin={config.plugin.name} against one process, in {config.verify.dtype}")
    ended = attempt(lambda: train(config, folder, [], execute))
    if isinstance(ended, Failure):
        _write(folder, job, words, {"ok": False, "error": ended.error, "rank": ended.rank})
        who = "" if ended.rank is None else f"rank {ended.rank}: "
        print_line(f"\n{who}{_raised(ended.error)}")
        print_line(f"\n{folder / FILE}")
        if ended.exit_code == 1:
            print_line("verify: FAILED")
        return ended.exit_code
    ended["notes"] += [
        f"{word}, since the default data does not go through the model" for word in also
    ]
    _write(folder, job, words, ended)
    for line in lines(ended):
        print_line(line)
    print_line(f"\n{folder / FILE}")
    print_line(last_line(ended))
    return 0 if ended["ok"] else 1


def _raised(error: str) -> str:
    """Return the end of a traceback: the exception, its message and its notes."""
    return re.split(r"^  File .*\n(?:    .*\n)*", error, flags=re.MULTILINE)[-1].strip()


def _write(folder: Path, job: Job, words: Sequence[str], found: dict[str, Any]) -> None:
    from runner.run_folder.status import provenance
    from runner.run_folder.strict_json import write_object

    whole = {"words": masked_words(words), **found, **provenance(), "request": job.plain}
    write_object(folder / FILE, whole)


def checked(words: Sequence[str]) -> tuple[Request, list[str]]:
    """Return the checked request of ``words``, and the overrides that were added to them."""
    try:
        return single(words, "a verification"), []
    except RequestError as error:
        groups = {key_of(word).partition(".")[0] for word in words}
        if groups & {"data", "recipe"} or not _lacks_data(error):
            raise
        also = ["data=text"]
        try:
            return single([*words, *also], "a verification"), also
        except RequestError as other:
            raise (error if _lacks_data(other) else other) from None


def _lacks_data(error: RequestError) -> bool:
    return any(isinstance(problem, DataMismatch) for problem in error.problems)


def _folder(wanted: Request, words: Sequence[str]) -> Path:
    typed = "hydra.run.dir" in map(key_of, words)
    return new_folder("verification", FILE, "hydra.run.dir", wanted.folder if typed else None)
