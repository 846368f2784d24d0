"""``python -m runner bench``: measure how fast this project is, against other tools."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.bench import TABLES
from runner.cli import FAILED, INTERRUPTED
from runner.cli.new_folder import new_folder
from runner.config.problem import Problem, RequestError
from runner.telemetry.sinks.console import announce, print_line

DESCRIPTION = """\
Measure this project against plain PyTorch, and print medians of paired ratios with quartiles.
This takes about ten minutes on two cores. Leave the machine alone meanwhile.

  clip       what clipping and telemetry add to an optimizer step, in each mode; the norm alone
  parallel   clipping under fsdp, tensor and a 2-D mesh on 2 and 4 ranks
  loop       a training loop with its record against a bare one, in one process and under ddp
  start      the time until a command answers, and a run's time besides its training"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure the tables that are asked for, print them, and write them to a new folder."""
    parser = argparse.ArgumentParser(
        prog="python -m runner bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="tables to measure; all by default"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure timm, Lightning and Accelerate too, as far as they are installed",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few pairs: shows that everything runs"
    )
    parser.add_argument(
        "--pairs", type=_count, metavar="N", help="interleaved pairs of each row (usually 15)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of the tables of clipping in one process (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of bench.json and bench.txt; a new one in outputs/benchmarks by default",
    )
    asked = parser.parse_args(words)
    if unknown := [name for name in asked.tables if name not in TABLES]:
        parser.error(f"{unknown[0]} is no table: use {', '.join(TABLES)}")
    folder = new_folder("benchmark", "bench.json", "--output", asked.output)
    announce("clip-runner: importing torch")
    from runner.bench.record import FILE, record
    from runner.bench.timing import Setting
    from runner.launch import signals
    from runner.launch.failure import Failure, attempt
    from runner.train import stop

    device = _device(asked.device)
    folder.mkdir(parents=True, exist_ok=True)
    given = asked.tables or TABLES
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        setting = Setting(Path(scratch), asked.quick, asked.peers, device, asked.pairs)
        command = shlex.join(["python", "-m", "runner", "bench", *(words or ())])
        ended = attempt(lambda: record(given, setting, folder, command))
    noted = stop.reset()
    if isinstance(ended, Failure):
        code = signals.exit_code(noted) if noted else ended.exit_code
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code > 128:
            raise SystemExit(code)
        print_line(f"clip-runner: {ended.error}", sys.stderr)
        return FAILED
    print_line(f"\n{folder / FILE}")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _device(asked: str) -> str:
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise RequestError([Problem("--device", asked, "this machine has no CUDA device")])
    return "cuda" if there and asked != "cpu" else "cpu"
