"""Measure gradients without clipping, and suggest thresholds.

    python -m runner calibrate [GROUP=OPTION ...] [KEY=VALUE ...]

Trains calibrate.steps optimizer steps without clipping, discards the weights, and prints how large
the gradient was and which clip.threshold to begin with. clip=value and clip=adaptive are measured
in their own units; the first calibrate.warmup_steps are described separately. Writes calibrate.json
to calibrate.output, or a folder of its own. `python -m runner --help` lists all overrides.

Exit codes: 0 measured   1 training failed   2 the request was wrong   129, 130, 143 interrupted
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli import new_folder
from runner.cli.arguments import on_ranks, single
from runner.config.environment import joins
from runner.config.identity import masked_words
from runner.config.problem import Problem, RequestError
from runner.run_folder.strict_json import write_object
from runner.telemetry.sinks.console import TerminalSink, print_line

FILE = "calibrate.json"
USAGE = __doc__


def main(words: Sequence[str]) -> int:
    """Calibrate as the arguments ``words`` ask."""
    [job] = single(words, "a calibration").jobs
    config = job.config
    if config.clip.info.nested or config.clip.info.derived:
        message = "has no one threshold to calibrate; clip=norm shows how large gradients are"
        raise RequestError([Problem("clip", config.clip.mode, message)])
    output = config.calibrate.output
    given = Path(output) if output else None
    folder = new_folder("calibration", FILE, "calibrate.output", given)
    from runner.calibrate.measure import describe, end_of, execute, lines
    from runner.launch.failure import Failure

    steps = end_of(config).value
    sinks = [] if joins() else [TerminalSink(steps, config.log.flush, title="calibration")]
    measured = on_ranks(config, folder, execute, sinks)
    if isinstance(measured, Failure):
        return measured.exit_code
    sinks[0].close(None, 0)
    found = describe(config, measured, masked_words(words))
    write_object(folder / FILE, found)
    print_line("\n".join(["", *lines(found), "", str(folder / FILE)]))
    return 0
