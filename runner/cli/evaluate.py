"""``python -m runner evaluate RUN``: evaluate a checkpoint of a run on held-out data."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from runner.cli import FAILED, command_parser, folder
from runner.cli.arguments import check_jobs, on_ranks
from runner.cli.export import add_run, chosen, folder_of_run
from runner.compose.composer import Source
from runner.compose.record import recorded
from runner.config.environment import joins
from runner.config.identity import masked_words
from runner.config.notation import plural
from runner.config.problem import Problem, RequestError
from runner.launch.resume import require_one_machine
from runner.run_folder import files
from runner.run_folder.strict_json import write_object
from runner.telemetry.sinks.console import print_line

DESCRIPTION = """\
Build the model of the run in the folder RUN from its configuration, load the weights of a
checkpoint, and print loss and accuracy on the held-out data. The plugin and the number of local
ranks are those of the run, so that a large model fits and the values are those that the run logged;
plugin=single evaluates in one process. Under torchrun or Slurm it uses the ranks that are there.
Overrides such as data=OPTION and data.batch_size=N choose other data. Nothing is written.

Exit codes: 0 evaluated   1 the checkpoint is damaged, or a rank failed   2 the request was wrong
130, 143 interrupted"""


def main(words: Sequence[str]) -> int:
    """Evaluate the run that the arguments ``words`` name."""
    parser = command_parser("evaluate", DESCRIPTION)
    add_run(parser)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the run's configuration")
    add("--output", type=Path, metavar="FILE", help="also write the result there, as JSON")
    add("--config-dir", "-cd", type=folder, metavar="FOLDER", help="options of your own")
    asked = parser.parse_intermixed_args(words)
    if asked.output is not None and not asked.output.absolute().parent.is_dir():
        message = f"there is no folder {asked.output.parent}"
        raise RequestError([Problem("--output", str(asked.output), message)])
    run = folder_of_run(asked.run)
    job = recorded(run / files.CONFIG, asked.overrides, Source(extra=asked.config_dir))
    require_one_machine(job.config)
    check_jobs([job])
    from runner.launch.failure import Failure
    from runner.train.job import evaluate

    # The first rank tells the others which checkpoint.
    checkpoint, manifest = (None, {}) if joins() else chosen(run, asked.checkpoint)
    # Local ranks log to the folder of a run; nothing of it is kept.
    with tempfile.TemporaryDirectory(prefix="clip-runner-") as home:
        found = on_ranks(job.config, Path(home), partial(evaluate, checkpoint=checkpoint))
    if isinstance(found, Failure):
        return found.exit_code
    if not found["metrics"]:
        print_line("clip-runner: there is no held-out data to evaluate on", sys.stderr)
        return FAILED
    step, ranks = manifest.get("step"), plural(found["world_size"], "rank")
    at = "" if step is None else f", step {step}"
    print_line(f"{checkpoint}{at}; plugin={job.config.plugin.name} on {ranks}")
    for key, value in found["metrics"].items():
        print_line(f"{key:<14} {value}")
    if asked.output is not None:
        about = {"run": str(run), "checkpoint": str(checkpoint), "step": step}
        about["overrides"] = masked_words(asked.overrides)
        write_object(asked.output, {**about, **found["metrics"]})
        print_line(str(asked.output))
    return 0
