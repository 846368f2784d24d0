"""``python -m runner verify <the words of a run>``: the plugin's step, and that of one process.

The words are those of ``python -m runner`` and are checked in the same way. ``verify.json`` is
written to a folder of its own; nothing is left under ``outputs/runs``.
"""

from __future__ import annotations

import functools
import io
import re
import secrets
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

from runner.cli import flags
from runner.cli.checks import answer, single
from runner.compose.composer import session
from runner.compose.request import Job, register
from runner.config.folders import obstacle, outputs
from runner.config.problem import Problem, RequestError
from runner.config.sizes import joins
from runner.telemetry.sinks.console import print_line

FILE = "verify.json"

USAGE = """\
python -m runner verify [GROUP=OPTION ...] [KEY=VALUE ...]

Trains verify.steps optimizer steps under the plugin, as the words say, and the same batches in one
process; compares the norm of the gradient, the clipped gradient and the weights; and tells what
torch.nn.utils would have made of each rank's gradients. `python -m runner --help` lists the words.

  verify.steps=4            optimizer steps to compare
  verify.dtype=float64      numbers of both sides; or float32
  verify.tolerance=1e-9     largest relative error; 1e-5 in float32
  verify.modes=[norm,value] clipping modes, one after the other; the chosen one by default
  verify.lr=0.1             of plain SGD
  hydra.run.dir=FOLDER      where to write verify.json

Exit codes: 0 the same   1 not the same, or a rank failed   2 the request was wrong
130, 143 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Verify what the words ``argv`` ask for (``sys.argv[1:]`` by default).

    Returns:
        0 where the plugin's steps are those of one process, 1 where they are not or a rank failed,
        2 where the request was wrong (one message on stderr, nothing created), 130 where it was
        interrupted, 143 where it was terminated.
    """
    return answer(argv, USAGE, _run)


def _run(words: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no ‖
    job, also = checked(words)
    folder = None if joins() else _folder([*words, *also])
    from runner.launch.dispatch import join, train
    from runner.launch.failure import Failure, attempt
    from runner.verify.side_by_side import execute
    from runner.verify.table import StepLines

    if folder is None:
        return join(execute)
    folder.mkdir(parents=True, exist_ok=True)
    config = job.config
    print_line(f"plugin={config.plugin.name} against one process, in {config.verify.dtype}")
    shown = StepLines(config.verify.modes or [config.clip.mode], print_line)
    work = functools.partial(train, config, job.plain, folder, [shown], execute)
    ended = attempt(work)
    if isinstance(ended, Failure):
        return conclude(folder, job, words, _failed(ended), ended.exit_code)
    notes = [
        *ended["notes"],
        *(f"{word}, since the default data does not go through the model" for word in also),
    ]
    return conclude(folder, job, words, ended | {"notes": notes}, 0 if ended["ok"] else 1)


def conclude(
    folder: Path, job: Job, words: Sequence[str], found: dict[str, Any], exit_code: int
) -> int:
    """Write ``verify.json``, and say what was found.

    Args:
        folder: to write to.
        job: what was asked for.
        words: as typed.
        found: from :func:`runner.verify.side_by_side.execute`, or why it did not get there.
        exit_code: of the command.

    Returns:
        ``exit_code``.
    """
    from runner.run_folder.provenance import provenance
    from runner.run_folder.strict_json import write_object
    from runner.verify.table import last_line, lines, words_of

    whole = {"words": list(words), **found, **provenance(), "request": job.plain}
    write_object(folder / FILE, whole)
    if found["error"] is None:
        for line in lines(found):
            print_line(line)
        print_line(f"\n{folder / FILE}")
        print_line(last_line(found))
        return exit_code
    who = "" if found["rank"] is None else f"rank {found['rank']}: "
    raised = words_of(found["error"])
    # The advice that a run gives has no part here.
    raised, skips = re.subn(r" \(clip\.nonfinite=skip .*\)$", "", raised)
    print_line(f"\n{who}{raised}")
    if skips:
        print_line(
            "a verification compares every step and leaves none out, whatever clip.nonfinite is"
        )
    if job.config.verify.dtype == "float64" and re.search("dtype|scalar type", raised):
        print_line("perhaps the model computes in float32 alone: verify.dtype=float32")
    print_line(f"\n{folder / FILE}")
    if exit_code == 1:
        print_line("verify: FAILED")
    return exit_code


def checked(words: Sequence[str]) -> tuple[Job, list[str]]:
    """The job of ``words``, and the words that were added to them.

    Where the words leave the data open, and the default data does not go through the model that
    they name, it is text: what is compared needs samples, and not any particular ones.

    Raises:
        RequestError: anything is wrong; it names all of it.
    """
    try:
        return single(words, "a verification"), []
    except RequestError as error:
        groups = {word.lstrip("+~").partition("=")[0].partition(".")[0] for word in words}
        if groups & {"data", "recipe"} or not _lacks_data(error):
            raise
        also = ["data=text"]
        try:
            return single([*words, *also], "a verification"), also
        except RequestError as other:
            raise (error if _lacks_data(other) else other) from None


def _lacks_data(error: RequestError) -> bool:
    """Whether it is among what is wrong that data does not go through the model."""
    return any(
        problem.key == "model._target_" and problem.message.startswith("does not take a sample")
        for problem in error.problems
    )


def _failed(failure: Any) -> dict[str, Any]:
    return {"ok": False, "error": failure.error, "rank": failure.rank}


def _folder(words: Sequence[str]) -> Path:
    """The folder to write, which is not there yet or holds no verification.

    Raises:
        RequestError: it cannot be written, or holds one.
    """
    key = "hydra.run.dir"
    typed = any(word.lstrip("+").startswith(f"{key}=") for word in words)
    if typed:
        folder = _typed_folder(words, key)
    else:
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
        folder = outputs() / "verifications" / name
    message = obstacle(folder)
    if message is None and (folder / FILE).exists():
        message = f"holds an earlier verification ({FILE}); choose another name or remove it"
    if message is None:
        return folder
    key, value = (key, str(folder)) if typed else ("RUNNER_OUTPUTS", str(outputs()))
    raise RequestError([Problem(key, value, message)])


def _typed_folder(words: Sequence[str], key: str) -> Path:
    args, _ = flags.read(words)
    register()
    source = flags.source_of(args)
    with session(source):
        composed = compose(source.name, args.overrides, return_hydra_config=True)
        return Path(str(OmegaConf.select(composed, key))).absolute()
