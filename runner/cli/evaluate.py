"""``python -m runner evaluate RUN``: evaluate a checkpoint of a run on held-out data."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.cli import FAILED
from runner.cli.checkpoints import chosen, folder_of_run, which
from runner.cli.run import check_jobs
from runner.compose.composer import Source
from runner.compose.jobs import Job
from runner.compose.recorded import recorded
from runner.config.environment import joins
from runner.config.notation import plural
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.secrets import masked_words
from runner.launch.elastic import require_one_machine
from runner.run_folder import files
from runner.telemetry.sinks.console import print_line

USAGE = """\
python -m runner evaluate RUN [KEY=VALUE ...] [GROUP=OPTION ...]

Builds the model of the run in the folder RUN from its configuration, loads the weights of a
checkpoint, and prints loss and accuracy on the held-out data. The plugin and the number of local
ranks are those of the run, so that a large model fits and the values are those that the run logged;
plugin=single evaluates in one process. Under torchrun or Slurm it uses the ranks that are there.
Nothing is written.

  data=OPTION, data.KEY=VALUE           other data
  data.batch_size=N                     another batch size
  --config-dir FOLDER                   options of groups in a folder of your own
  --checkpoint STEP|best|last|final     checkpoint (final, or last if the run has no final weights)
  --output FILE                         also write the result to this file, as JSON

Exit codes: 0 evaluated   1 the checkpoint is damaged, or a rank failed   2 the request was wrong
130, 143 interrupted"""


def main(words: Sequence[str]) -> int:
    """Evaluate the run that the arguments ``words`` name."""
    asked = _read(words)
    run = folder_of_run(asked.run)
    job = recorded(run / files.CONFIG, asked.overrides, Source(extra=asked.config_dir))
    require_one_machine(job.config)
    check_jobs([job])
    from runner.checkpoint.folder import DamagedCheckpoint
    from runner.run_folder.strict_json import write_object
    from runner.train.job import evaluate as execute

    if joins():
        from runner.launch.rank import join

        return join(partial(execute, checkpoint=None))  # the first rank tells which
    try:
        checkpoint, manifest = chosen(run, asked.checkpoint)
    except DamagedCheckpoint as error:
        print_line(f"clip-runner: {error}", sys.stderr)
        return FAILED
    found = _evaluate(job, checkpoint)
    if isinstance(found, int):
        return found
    step, ranks = manifest.get("step"), plural(found["world_size"], "rank")
    at = "" if step is None else f", step {step}"
    print_line(f"{checkpoint}{at}; plugin={job.config.plugin.name} on {ranks}")
    if not found["metrics"]:
        print_line("clip-runner: there is no held-out data to evaluate on", sys.stderr)
        return FAILED
    for key, value in found["metrics"].items():
        print_line(f"{key:<14} {value}")
    if asked.output is None:
        return 0
    about = {"run": str(run), "checkpoint": str(checkpoint), "step": step}
    try:
        write_object(
            asked.output, {**about, "overrides": masked_words(asked.overrides), **found["metrics"]}
        )
    except OSError as error:
        print_line(f"clip-runner: {asked.output} cannot be written: {error}", sys.stderr)
        return FAILED
    print_line(str(asked.output))
    return 0


def _evaluate(job: Job, checkpoint: Path) -> dict[str, Any] | int:
    """Return what :func:`runner.train.job.evaluate` does, or the exit code of a failure."""
    from runner.launch.failure import Failure, attempt
    from runner.launch.supervise import train
    from runner.train.job import evaluate as execute

    # Local ranks log to the folder of a run; nothing of it is kept.
    with tempfile.TemporaryDirectory(prefix="clip-runner-") as folder:
        work = partial(execute, checkpoint=checkpoint)
        ended = attempt(lambda: train(job.config, Path(folder), [], work))
    if not isinstance(ended, Failure):
        return ended
    who = "" if ended.rank is None else f"rank {ended.rank}: "
    last = ended.error.splitlines()[-1] if ended.error else "no message"
    print_line(f"clip-runner: {who}{last}", sys.stderr)
    return ended.exit_code


def _read(words: Sequence[str]) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m runner evaluate", allow_abbrev=False, add_help=False, exit_on_error=False
    )
    parser.add_argument("--checkpoint", type=which)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--config-dir", "-cd", type=Path)
    try:
        asked, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise RequestError(
            [Problem(error.argument_name or "flags", NOTHING, error.message)]
        ) from None
    flags = [word for word in rest if word.startswith("-")]
    runs = [word for word in rest if "=" not in word and not word.startswith(("-", "~"))]
    problems = [
        Problem(flag, NOTHING, "unknown flag; python -m runner evaluate --help lists the flags")
        for flag in flags
    ]
    if len(runs) != 1:
        message = "is missing: name the folder of a run" if not runs else "one run at a time"
        problems.append(Problem("RUN", NOTHING if not runs else " ".join(runs), message))
    if asked.output is not None and not asked.output.absolute().parent.is_dir():
        message = f"there is no folder {asked.output.parent}"
        problems.append(Problem("--output", str(asked.output), message))
    if asked.config_dir is not None:
        asked.config_dir = asked.config_dir.absolute()
        if not asked.config_dir.is_dir():
            message = "must be a folder that exists"
            problems.append(Problem("--config-dir", str(asked.config_dir), message))
    if problems:
        raise RequestError(problems)
    asked.run = Path(runs[0])
    asked.overrides = [word for word in rest if word not in (*flags, *runs)]
    return asked
