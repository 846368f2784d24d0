"""``python -m runner calibrate``, ``verify``, ``evaluate`` and ``bench``: measure a training."""

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.bench import ON_GPU, TABLES, WITH
from runner.cli import (
    checkpoint_parser,
    choose_checkpoint,
    command_parser,
    existing_folder,
    new_folder,
)
from runner.cli.answer import Answer
from runner.cli.arguments import composed, read
from runner.cli.check import check_jobs
from runner.cli.ranks import on_ranks, require_same
from runner.config.environment import joins, started_rank
from runner.config.masking import masked_words
from runner.config.notation import plural
from runner.config.problem import Problem, RequestError
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import Failure, attempt
from runner.launch.fitting import in_microbatches, recorded_steps
from runner.launch.prepare import importing_torch
from runner.launch.resume import require_one_machine
from runner.request.record import recorded_job
from runner.request.request import Request, request
from runner.run_folder import files
from runner.run_folder.status import provenance
from runner.run_folder.strict_json import read_object, write_object
from runner.telemetry.sinks.console import TerminalSink, announce, print_line

FILE = "verify.json"


def calibrate(argv: Sequence[str]) -> Answer:
    """Measure gradients without clipping, and suggest thresholds.

        python -m runner calibrate [GROUP=OPTION ...] [KEY=VALUE ...]

    Trains calibrate.steps optimizer steps without clipping, discards the weights, and prints
    whether clipping would matter, how large the gradient was and which clip.threshold to begin
    with. clip=value and clip=adaptive are measured in their own units; the first
    calibrate.warmup_steps are described separately. Writes calibrate.json to calibrate.output, or a
    folder of its own. `python -m runner --help` lists all overrides.

    Exit codes: 0 measured   1 training failed   2 the request was wrong   129, 130, 143 interrupted
    """
    config = _single(argv, "a calibration").jobs[0].config
    if config.clip.info.nested or config.clip.info.follows == "norms":
        message = "has no one threshold to calibrate; clip=norm shows how large gradients are"
        raise RequestError([Problem("clip", config.clip.mode, message)])
    output = Path(config.calibrate.output) if config.calibrate.output else None
    folder = new_folder("calibration", "calibrate.json", "calibrate.output", output)
    from runner.calibrate.calibrate import describe, end_of, execute, lines

    steps = end_of(config).value
    sinks = [] if joins() else [TerminalSink(steps, config.log.flush, title="calibration")]
    measured = on_ranks(config, folder, execute, sinks)
    description = describe(config, measured, masked_words(argv))
    write_object(folder / "calibrate.json", description)
    print_line("\n".join(["", *lines(description), "", str(folder / "calibrate.json")]))
    return Answer(0, {"file": str(folder / "calibrate.json"), **description})


def verify(argv: Sequence[str]) -> Answer:
    """Compare the steps under a plugin with the steps in one process.

        python -m runner verify [GROUP=OPTION ...] [KEY=VALUE ...]

    Trains verify.steps optimizer steps under the plugin, and on the same batches in one process.
    Compares the norm of the gradient, the clipped gradient and the weights, and prints what
    torch.nn.utils computes from each rank's gradients. Writes verify.json to a folder of its own,
    or to hydra.run.dir. `python -m runner --help` lists the overrides, such as verify.dtype,
    verify.tolerance and verify.modes=[norm,value].

    Exit codes: 0 equal   1 not equal, or a rank failed
    2 the request was wrong, or nothing would be compared: one rank without accumulation
    129, 130, 143 interrupted
    """
    request = _single(argv, "a verification")
    [job] = request.jobs
    config = job.config
    _require_two_sides(config)
    is_typed = any("hydra.run.dir=" in argument for argument in argv)
    folder = new_folder("verification", FILE, "hydra.run.dir", request.folder if is_typed else None)
    from runner.verify.comparison import last_line, lines
    from runner.verify.verify import execute

    if not joins():
        print_line(f"plugin={config.plugin.name} against one process, in {config.verify.dtype}")
    about = {**provenance(), "words": masked_words(argv), "request": job.plain}
    try:
        comparison = on_ranks(config, folder, execute)
    except Failure as failure:
        why = {"ok": False, "error": failure.error, "rank": failure.rank}
        write_object(folder / FILE, {**why, **about})
        print_line(f"{folder / FILE}" + ("\nverify: FAILED" if failure.exit_code == 1 else ""))
        raise
    write_object(folder / FILE, {**comparison, **about})
    text = [*lines(comparison), "", str(folder / FILE), last_line(comparison)]
    print_line("\n".join(text))
    return Answer(0 if comparison["ok"] else 1, {"file": str(folder / FILE), **comparison})


def _single(argv: Sequence[str], purpose: str) -> Request:
    """Return the checked request of one run; nothing is created."""
    request = composed(read(argv, purpose))
    if request.sweep:
        message = f"{purpose} is of one run: leave out what makes a sweep of it"
        raise RequestError([Problem("hydra.mode", "MULTIRUN", message)])
    [job] = request.jobs
    accumulation = job.config.accumulation
    if accumulation.finds or (accumulation.phases.moves and purpose == "a calibration"):
        what = "finds the microbatches of a run" if accumulation.finds else "changes the batch"
        message = f"{what}, and {purpose} is of one size: give accumulation.steps=N"
        raise RequestError([Problem("accumulation.steps", accumulation.steps, message)])
    require_one_machine(job.config)
    check_jobs([job])
    require_same(job)
    return request


def _require_two_sides(config: RunConfig) -> None:
    """Refuse a verification that would compare one process with itself."""
    from runner.train.build import ranks_of

    if ranks_of(config) > 1 or config.accumulation.phases.most > 1:
        return
    also = "or accumulate, accumulation=x2"
    if config.plugin.name == "single":
        text = f"nothing is compared in one process: choose plugin=ddp plugin.nproc=2, say, {also}"
        raise RequestError([Problem("plugin", "single", text)])
    text = f"nothing is compared on one rank: start more, plugin.nproc=2, {also}"
    raise RequestError([Problem("plugin.nproc", config.plugin.nproc, text)])


def evaluate(argv: Sequence[str]) -> Answer:
    """Evaluate a checkpoint of a run on held-out data.

    Prints loss and accuracy. It uses the plugin and the number of local ranks of the run, so that a
    large model fits, and the values equal what the run logged; plugin=single evaluates in one
    process. Under torchrun or Slurm it uses the ranks that are there. Overrides such as data=OPTION
    and data.batch_size=N choose other data. Nothing is written.

    Exit codes: 0 evaluated   1 the checkpoint is damaged, or a rank failed
    2 the request was wrong   130, 143 interrupted
    """
    parser = checkpoint_parser(evaluate)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the run's configuration")
    add("--config-dir", "-cd", type=existing_folder, metavar="FOLDER", help="options of your own")
    arguments = parser.parse_intermixed_args(argv)
    with signals.deferred():
        file = arguments.run / files.CONFIG
        job = recorded_job(file, arguments.overrides, arguments.config_dir)
    if started_rank() is not None:  # the ranks that are there, not those that trained
        typed = {text.partition("=")[0] for text in arguments.overrides}
        unset = {name: None for name in ("nproc", "nnodes") if f"plugin.{name}" not in typed}
        plugin = job.config.plugin.model_copy(update=unset)
        job = replace(job, config=job.config.model_copy(update={"plugin": plugin}))
    if job.config.accumulation.finds:
        steps = recorded_steps(job.config, read_object(arguments.run / files.STATUS)) or 1
        job = replace(job, config=in_microbatches(job.config, steps))
    require_one_machine(job.config)
    checkpoint: Path | None = None
    manifest: dict[str, Any] = {}
    is_alone = started_rank() is None
    if is_alone:  # a damaged checkpoint is refused before torch is imported
        checkpoint, manifest = choose_checkpoint(arguments.run, arguments.checkpoint)
    check_jobs([job])
    require_same(job, RUN=str(arguments.run), checkpoint=arguments.checkpoint)
    from runner.train.run import evaluate as work

    if not is_alone and not joins():  # the first rank tells the others which checkpoint
        checkpoint, manifest = choose_checkpoint(arguments.run, arguments.checkpoint)
    # Local ranks log to the folder of a run; nothing of it is kept.
    with tempfile.TemporaryDirectory(prefix="clip-runner-") as scratch:
        result = on_ranks(job.config, Path(scratch), partial(work, checkpoint=checkpoint))
    if not result["metrics"]:
        raise Failure("there is no held-out data to evaluate on")
    step = "" if manifest.get("step") is None else f", step {manifest['step']}"
    ranks = plural(result["world_size"], "rank")
    print_line(f"{checkpoint}{step}; plugin={job.config.plugin.name} on {ranks}")
    for key, value in result["metrics"].items():
        print_line(f"{key:<14} {value}")
    content = {"checkpoint": str(checkpoint), "step": manifest.get("step"), **result}
    return Answer(0, content)


def bench(argv: Sequence[str]) -> Answer:
    """Measure this project against plain PyTorch.

    Prints medians of paired ratios with quartiles. This takes about 25 minutes on two cores. Leave
    the machine alone meanwhile.

      clip       what clipping and telemetry add to an optimizer step
      parallel   clipping under fsdp, tensor and a 2-D mesh on 2 and 4 ranks
      step       whole steps under each plugin on 2 ranks against torch's own, with peak memory
      loop       a training loop with its record against a bare one, in one process and under ddp
      start      the time until a command answers, and a run's time besides its training
      scale      what a rank receives to agree with all others, on up to 16,384 ranks
      check      what `runner.check_clipping` adds to the clipping of a step
      parity     which tools clip right, in which layout (four ranks): right, off by what, or raises
      gpu        times, bandwidth and waits of clipping on a GPU, a captured step, an epoch

    ``--with torchtitan,deepspeed`` makes an environment for each of these tools, which takes
    minutes and gigabytes, and parity measures them too. The names are those of packages.

    With ``--device cuda`` the tables are clip and gpu. Without a GPU there is no table gpu.
    """
    parser = command_parser(bench)
    add = parser.add_argument
    add("tables", nargs="*", metavar="TABLE", help="tables to measure; all by default")
    add("--peers", action="store_true", help="measure timm, Fabric and Accelerate too")
    add("--with", dest="others", metavar="NAME,...", default="", help="more tools for parity")
    add("--quick", action="store_true", help="small sizes, few pairs: shows that everything runs")
    add("--pairs", type=int, metavar="N", help="interleaved pairs of each row (usually 15)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of clip and gpu")
    add("--output", type=Path, metavar="FOLDER", help="folder of bench.json and bench.txt")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.tables if name not in TABLES]
    if unknown:
        text = f"is no table: use {', '.join(TABLES)}"
        raise RequestError(Problem("TABLE", name, text) for name in unknown)
    others = tuple(name for name in arguments.others.split(",") if name)
    unknown = [name for name in others if name not in WITH]
    if unknown:
        text = f"is no tool that parity knows: use {', '.join(WITH)}"
        raise RequestError(Problem("--with", name, text) for name in unknown)
    folder = new_folder("benchmark", "bench.json", "--output", arguments.output)
    announce("clip-runner: importing torch")
    with importing_torch():
        import torch

        from runner.bench.timing import FILE, Setting, record

    device = "cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu"
    if arguments.device == "cuda" and device == "cpu":
        raise RequestError([Problem("--device", "cuda", "this machine has no CUDA device")])
    tables = arguments.tables or _usual_tables(arguments.device, device)
    if device == "cpu" and "gpu" in tables:
        raise RequestError([Problem("TABLE", "gpu", "needs a CUDA device")])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        setting = Setting(
            Path(scratch),
            config_of,
            quick=arguments.quick,
            peers=arguments.peers,
            device=device,
            rounds=arguments.pairs,
            others=others,
        )
        command = shlex.join(["python", "-m", "runner", "bench", *argv])
        result = attempt(lambda: record(tables, setting, folder, command))
    if isinstance(result, Failure):
        raise result
    print_line(f"\n{folder / FILE}")
    return Answer(0, {"file": str(folder / FILE), **result})


def _usual_tables(asked_device: str, device: str) -> list[str]:
    """Return the tables of a benchmark that names none."""
    if asked_device == "cuda":
        return list(ON_GPU)
    return [name for name in TABLES if name != "gpu" or device == "cuda"]


def config_of(overrides: list[str]) -> RunConfig:
    """Return the configuration of the overrides of one run."""
    [job] = request(overrides).jobs
    return job.config
