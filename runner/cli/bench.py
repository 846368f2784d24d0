"""``python -m runner bench``: measure how fast this project is, against other tools."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.bench import TABLES
from runner.cli import command_parser, new_folder
from runner.config.problem import Problem, RequestError
from runner.telemetry.sinks.console import announce, print_line


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
