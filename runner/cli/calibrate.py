"""``python -m runner calibrate``: measure gradients without clipping, and suggest thresholds.

It takes the overrides of a run and checks them in the same way. It writes ``calibrate.json`` to a
folder of its own, and nothing to ``outputs/runs``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runner.calibrate.table import lines
from runner.cli.new_folder import new_folder
from runner.cli.run import single
from runner.config.environment import joins
from runner.config.problem import Problem, RequestError
from runner.config.secrets import masked_words
from runner.telemetry.sinks.console import print_line

FILE = "calibrate.json"

USAGE = """\
python -m runner calibrate [GROUP=OPTION ...] [KEY=VALUE ...]

Trains calibrate.steps optimizer steps without clipping, discards the weights, and prints how large
the gradient was and which clip.threshold to begin with. clip=value and clip=adaptive are measured
in their own units. `python -m runner --help` lists all overrides.

  calibrate.steps=200          number of optimizer steps to measure
  calibrate.warmup_steps=20    number of first steps to describe separately; a tenth by default
  calibrate.output=FOLDER      folder of calibrate.json

Exit codes: 0 measured   1 training failed   2 the request was wrong   129, 130, 143 interrupted"""


def main(words: Sequence[str]) -> int:
    """Calibrate as the arguments ``words`` ask."""
    [job] = single(words, "a calibration").jobs
    clip = job.config.clip
    if clip.info.nested:
        message = (
            "has several thresholds, which cannot be suggested together: calibrate one of its "
            "modes, such as clip=norm"
        )
        raise RequestError([Problem("clip", clip.mode, message)])
    if clip.info.derived:
        message = (
            "derives its limit from earlier steps, so there is no threshold to "
            "calibrate; python -m runner calibrate clip=norm shows how large they are"
        )
        raise RequestError([Problem("clip", clip.mode, message)])
    output = job.config.calibrate.output
    given = Path(output) if output else None
    folder = new_folder("calibration", FILE, "calibrate.output", given)
    from runner.calibrate.measure import describe, end_of, execute
    from runner.launch.failure import Failure, attempt
    from runner.run_folder.strict_json import write_object
    from runner.telemetry.sinks.console import TerminalSink

    if joins():
        from runner.launch.rank import join

        return join(execute, job.config.launch.timeout)
    from runner.launch.supervise import train

    folder.mkdir(parents=True, exist_ok=True)
    steps = end_of(job.config).value
    shown = TerminalSink(steps, job.config.log.flush, title="calibration")
    measured = attempt(lambda: train(job.config, folder, [shown], execute))
    if isinstance(measured, Failure):
        shown.close(None, measured.exit_code)
        print_line(f"clip-runner: {measured.error}", sys.stderr)
        return measured.exit_code
    shown.close(None, 0)
    found = describe(job.config, measured, masked_words(words))
    write_object(folder / FILE, found)
    print_line()
    for line in lines(found):
        print_line(_printable(line))
    print_line(f"\n{folder / FILE}")
    return 0


def _printable(line: str) -> str:
    """Return the line, in ASCII if the terminal cannot encode it."""
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return line.replace("‖", "|").encode("ascii", "replace").decode("ascii")
    return line
