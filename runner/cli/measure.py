"""``python -m runner calibrate``, ``verify`` and ``bench``: train a few steps, and measure them."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.bench import TABLES
from runner.cli import command_parser, new_folder
from runner.cli.arguments import on_ranks, single
from runner.config.environment import joins
from runner.config.identity import masked_words
from runner.config.problem import Problem, RequestError
from runner.run_folder.status import provenance
from runner.run_folder.strict_json import write_object
from runner.telemetry.sinks.console import TerminalSink, announce, print_line

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
    if config.clip.info.nested or config.clip.info.follows == "norms":
        message = "has no one threshold to calibrate; clip=norm shows how large gradients are"
        raise RequestError([Problem("clip", config.clip.mode, message)])
    given = Path(config.calibrate.output) if config.calibrate.output else None
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
    typed = wanted.folder if any("hydra.run.dir=" in word for word in words) else None
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


def bench(words: Sequence[str]) -> int:
    """Measure this project against plain PyTorch.

    Prints medians of paired ratios with quartiles. This takes about ten minutes on two cores. Leave
    the machine alone meanwhile.

      clip       what clipping and telemetry add to an optimizer step
      parallel   clipping under fsdp, tensor and a 2-D mesh on 2 and 4 ranks
      loop       a training loop with its record against a bare one, in one process and under ddp
      start      the time until a command answers, and a run's time besides its training
    """
    parser = command_parser(bench)
    add = parser.add_argument
    add("tables", nargs="*", metavar="TABLE", help="tables to measure; all by default")
    add("--peers", action="store_true", help="measure timm, Fabric and Accelerate too")
    add("--quick", action="store_true", help="small sizes, few pairs: shows that everything runs")
    add("--pairs", type=int, metavar="N", help="interleaved pairs of each row (usually 15)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of table clip")
    add("--output", type=Path, metavar="FOLDER", help="folder of bench.json and bench.txt")
    asked = parser.parse_args(words)
    if unknown := [name for name in asked.tables if name not in TABLES]:
        parser.error(f"{unknown[0]} is no table: use {', '.join(TABLES)}")
    folder = new_folder("benchmark", "bench.json", "--output", asked.output)
    announce("clip-runner: importing torch")
    import torch

    from runner.bench.timing import FILE, Setting, record
    from runner.launch.failure import Failure, attempt
    from runner.train import stop

    there = torch.cuda.is_available()
    if asked.device == "cuda" and not there:
        raise RequestError([Problem("--device", "cuda", "this machine has no CUDA device")])
    device = "cuda" if there and asked.device != "cpu" else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        setting = Setting(Path(scratch), asked.quick, asked.peers, device, asked.pairs)
        command = shlex.join(["python", "-m", "runner", "bench", *words])
        ended = attempt(lambda: record(asked.tables or [*TABLES], setting, folder, command))
    stop.reset()
    if isinstance(ended, Failure):
        print_line(f"clip-runner: {ended.error}", sys.stderr)
        return ended.exit_code
    print_line(f"\n{folder / FILE}")
    return 0
