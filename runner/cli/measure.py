"""``python -m runner calibrate`` and ``verify``: train a few steps, and measure them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli import new_folder
from runner.cli.arguments import on_ranks, single
from runner.config.environment import joins
from runner.config.identity import masked_words
from runner.config.jobs import key_of
from runner.config.problem import Problem, RequestError
from runner.run_folder.status import provenance
from runner.run_folder.strict_json import write_object
from runner.telemetry.sinks.console import TerminalSink, print_line

FILE = "verify.json"


def calibrate(words: Sequence[str]) -> int:
    """Measure gradients without clipping, and suggest thresholds.

        python -m runner calibrate [GROUP=OPTION ...] [KEY=VALUE ...]

    Trains calibrate.steps optimizer steps without clipping, discards the weights, and prints how
    large the gradient was and which clip.threshold to begin with. clip=value and clip=adaptive are
    measured in their own units; the first calibrate.warmup_steps are described separately. Writes
    calibrate.json to calibrate.output, or a folder of its own. `python -m runner --help` lists all
    overrides.

    Exit codes: 0 measured   1 training failed   2 the request was wrong   129, 130, 143 interrupted
    """
    [job] = single(words, "a calibration").jobs
    config = job.config
    if config.clip.info.nested or config.clip.info.derived:
        message = "has no one threshold to calibrate; clip=norm shows how large gradients are"
        raise RequestError([Problem("clip", config.clip.mode, message)])
    output = config.calibrate.output
    given = Path(output) if output else None
    folder = new_folder("calibration", "calibrate.json", "calibrate.output", given)
    from runner.launch.failure import Failure
    from runner.tools.calibrate import describe, end_of, execute, lines

    steps = end_of(config).value
    sinks = [] if joins() else [TerminalSink(steps, config.log.flush, title="calibration")]
    measured = on_ranks(config, folder, execute, sinks)
    if isinstance(measured, Failure):
        return measured.exit_code
    sinks[0].close(None, 0)
    found = describe(config, measured, masked_words(words))
    write_object(folder / "calibrate.json", found)
    print_line("\n".join(["", *lines(found), "", str(folder / "calibrate.json")]))
    return 0


def verify(words: Sequence[str]) -> int:
    """Compare a plugin's steps with those of one process.

        python -m runner verify [GROUP=OPTION ...] [KEY=VALUE ...]

    Trains verify.steps optimizer steps under the plugin, and on the same batches in one process.
    Compares the norm of the gradient, the clipped gradient and the weights, and prints what
    torch.nn.utils computes from each rank's gradients. Writes verify.json to a folder of its own,
    or to hydra.run.dir. verify.dtype, verify.tolerance, verify.modes=[norm,value] and the other
    overrides are those of `python -m runner --help`.

    Exit codes: 0 equal   1 not equal, or a rank failed   2 the request was wrong
    129, 130, 143 interrupted
    """
    wanted = single(words, "a verification")
    [job] = wanted.jobs
    config = job.config
    typed = wanted.folder if "hydra.run.dir" in map(key_of, words) else None
    folder = new_folder("verification", FILE, "hydra.run.dir", typed)
    from runner.launch.failure import Failure
    from runner.tools.comparison import last_line, lines
    from runner.tools.verify import execute

    if not joins():
        print_line(f"plugin={config.plugin.name} against one process, in {config.verify.dtype}")
    ended = on_ranks(config, folder, execute)
    asked = {**provenance(), "words": masked_words(words), "request": job.plain}
    if isinstance(ended, Failure):
        failed = {"ok": False, "error": ended.error, "rank": ended.rank}
        write_object(folder / FILE, {**failed, **asked})
        print_line(f"{folder / FILE}" + ("\nverify: FAILED" if ended.exit_code == 1 else ""))
        return ended.exit_code
    write_object(folder / FILE, {**ended, **asked})
    print_line("\n".join([*lines(ended), "", str(folder / FILE), last_line(ended)]))
    return 0 if ended["ok"] else 1
