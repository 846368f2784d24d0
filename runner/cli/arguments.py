"""Requests of a run: Hydra's flags by argparse, overrides checked, and work done on its ranks.

torch is imported only after the overrides are validated, so that a wrong key, ``--help`` and
``--cfg`` cost no more than Python and Hydra do.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.cli import Parser, folder
from runner.config.environment import joins, started_rank
from runner.config.identity import digest
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import Failure, attempt
from runner.launch.resume import require_one_machine
from runner.request.jobs import Job, Where
from runner.request.request import Request, request
from runner.run_folder.status import earlier_record
from runner.run_folder.strict_json import obstacle
from runner.telemetry.sinks.console import announce, print_line


def read(words: Sequence[str], purpose: str = "a run") -> argparse.Namespace:
    """Read overrides and Hydra's flags, which may stand in any order."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--config-dir", "-cd", type=folder)
    if purpose in ("a run", "a plan"):
        modes = parser.add_mutually_exclusive_group()
        modes.add_argument("--multirun", "-m", action="store_true")
    if purpose == "a run":
        modes.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        modes.add_argument("--info", "-i", nargs="?", const="all")
        does, shells = ("install", "uninstall", "query"), ("bash", "fish", "zsh")
        asked = [f"{do}={shell}" for do in does for shell in shells]
        modes.add_argument("--shell-completion", "-sc", choices=asked)
        modes.add_argument("--hydra-help", action="store_const", const=["--hydra-help"])
        add("--package", "-p", default="")
        add("--resolve", action="store_true")
        add("--help", "-h", action="store_true")
    args, rest = parser.parse_known_args(words)
    args.overrides = rest
    unknown = [word for word in rest if word.startswith("-")]
    message = f"unknown flag of {purpose}; --help and --hydra-help list the flags"
    if purpose == "a run" and not (unknown or args.cfg):
        unknown = ["--resolve"] * args.resolve + ["--package"] * bool(args.package)
        message = "goes with --cfg, which runs nothing"
    if unknown:
        raise RequestError(Problem(word, NOTHING, message) for word in unknown)
    return args


def composed(args: argparse.Namespace) -> Request:
    """Return the request of the overrides, composed and validated."""
    multirun = getattr(args, "multirun", False)
    with signals.deferred():
        return request(
            args.overrides,
            multirun=multirun,
            config_dir=args.config_dir,
            after_each=signals.raise_if_noted,
        )


def checked(args: argparse.Namespace) -> Request:
    """Return the request of a run or a sweep, checked as far as that goes without torch."""
    wanted = composed(args)
    if joins():
        return wanted  # the first rank may have begun the record
    home, message = wanted.folder, obstacle(wanted.folder)
    key, value = f"hydra.{'sweep' if wanted.sweep else 'run'}.dir", str(home)
    if not wanted.sweep:
        message = message or earlier_record(home)
    elif message is None:
        listed = [job.hash for job in wanted.jobs] if wanted.trials is None else []
        key, value = "sweep.name", wanted.sweep
        message = earlier_record(home, wanted.identity, listed)
        if message is None and wanted.where == "elsewhere" and not shutil.which("sbatch"):
            key, value = "hydra/launcher", "submitit_slurm"
            message = "there is no sbatch here: run this on a machine that submits jobs to Slurm"
    if message:
        raise RequestError([Problem(key, value, message)])
    return wanted


def single(words: Sequence[str], purpose: str) -> Request:
    """Read and check a request for one run; nothing is created."""
    args = read(words, purpose)
    wanted = composed(args)
    if wanted.sweep:
        message = f"{purpose} is of one run: leave out what makes a sweep of it"
        raise RequestError([Problem("hydra.mode", "MULTIRUN", message)])
    require_one_machine(wanted.jobs[0].config)
    check_jobs(wanted.jobs)
    require_same(wanted.jobs[0])
    return wanted


def check_jobs(jobs: Sequence[Job], where: Where = "here") -> None:
    """Check what needs torch: targets, data, device and clipping mode of each distinct job."""
    here, started = where != "elsewhere", started_rank()
    if "torch" not in sys.modules:
        announce("clip-runner: importing torch, then checking model and data")
    from runner.launch.supervise import importing_torch, prepare

    if where == "here" and (started is None or started.world_size == 1):
        # Ranks import torch while this process does.
        prepare(*(job.config for job in jobs))
    problems: list[Problem] = []
    with importing_torch():
        with signals.deferred():
            from runner.train import build, preflight, targets

        if strange := [one for job in jobs for one in targets.problems(job.targets)]:
            raise RequestError(strange)
        for job in {digest({**job.plain, "seed": 0}): job for job in jobs}.values():
            try:
                preflight.check(job.config, compared=len(jobs) > 1, here=here)
            except RequestError as error:
                problems += (replace(problem, job=job.label) for problem in error.problems)
    if problems:
        raise RequestError(problems)
    notes = set()
    for config in (job.config for job in jobs):
        samples, of_step = build.samples_of(config)
        if samples is not None and of_step > samples:
            size = f"a step has all {samples:,} samples of the data, not {of_step:,}"
            notes.add(f"{size}: lower data.batch_size")
        if here and not started and config.plugin.may_grow and build.ranks_of(config) == 1:
            notes.add(
                f"plugin={config.plugin.name} runs on one rank: plugin.nproc is not given, and "
                "this run uses at most one GPU. plugin.nproc=2 starts two ranks."
            )
    for text in sorted(notes):
        print_line(f"clip-runner: note: {text}", sys.stderr)


def require_same(job: Job, **arguments: Any) -> None:
    """Refuse the request on all ranks if torchrun or srun started one with another request."""
    started = started_rank()
    if started is not None and started.world_size > 1:
        from runner.launch.agreement import require_same_request

        require_same_request({**job.plain, **arguments}, job.config.launch.timeout)


def on_ranks(
    config: RunConfig, home: Path, work: Callable[..., Any], sinks: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return what ``work`` returns on the ranks of a request, or raise the Failure of one.

    A rank that joins others ends with the exit code of its part.
    """
    if joins():
        from runner.launch.rank import join

        raise SystemExit(join(work, config.launch.timeout))
    from runner.launch.supervise import train

    home.mkdir(parents=True, exist_ok=True)
    ended = attempt(lambda: train(config, home, sinks, work))
    for sink in sinks:
        sink.close(None, ended.exit_code if isinstance(ended, Failure) else 0)
    if isinstance(ended, Failure):
        raise ended
    return ended
