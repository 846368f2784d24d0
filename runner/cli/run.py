"""``python -m runner [OVERRIDES]``: check the overrides, and run what they ask for.

The commands ``plan``, ``calibrate`` and ``verify`` read and check their overrides by the functions
of this module too. torch is imported only after the overrides are validated, so that a wrong key,
``--help`` and ``--cfg`` cost no more than Python and Hydra do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser

from runner.cli import WRONG_REQUEST
from runner.compose.answers import answer, help_text
from runner.compose.composer import Composer, Source, with_own_mode
from runner.compose.jobs import Job
from runner.compose.launchers import Where
from runner.compose.masking import write_composition
from runner.compose.overrides import spelled_out
from runner.compose.request import Request, request
from runner.config.environment import joins, started_rank
from runner.config.folders import CONFIG_NAME
from runner.config.importing import importing
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.scratch import missing
from runner.config.sizes import may_grow
from runner.launch import elastic
from runner.run_folder import files
from runner.run_folder.status import claimed
from runner.run_folder.strict_json import read_object
from runner.run_folder.sweep_record import earlier_record
from runner.telemetry.sinks.console import announce, print_line


def main(words: Sequence[str]) -> int:
    """Run the request of the arguments ``words``, or print what their flags ask for."""
    args = read(words)
    if args.help or args.cfg is not None or args.info is not None:
        return _show(args)
    if args.hydra_help:
        return answer(args, Composer(source_of(args)))
    wanted = request(
        args.overrides,
        multirun=args.multirun,
        source=source_of(args),
        earlier=None if joins() else earlier_record,  # the first rank may have begun the record
    )
    note(wanted.notes)
    if wanted.sweep is not None:
        from runner.sweep.control import run_sweep

        started = started_rank()
        if started is not None and started.world_size > 1:
            message = "a sweep starts its own ranks (plugin.nproc): run it without torchrun"
            raise RequestError([Problem("-m", NOTHING, message)])
        for job in wanted.jobs:
            elastic.require_one_machine(job.config)
        return run_sweep(wanted, words, check_jobs)
    config = wanted.jobs[0].config
    elastic.require_one_machine(config)
    check_jobs(wanted.jobs)
    if joins():
        from runner.launch.rank import join

        return join(timeout=wanted.jobs[0].config.launch.timeout)
    return _run(wanted)


def _run(wanted: Request) -> int:
    """Run the one job of a request, from its start or from a checkpoint."""
    from runner.launch import resume, supervise

    [job] = wanted.jobs
    folder = wanted.folder
    assert folder is not None
    folder = resume.requeued(job.plain, folder) or folder
    status = read_object(folder / files.STATUS)
    start = resume.decide(job.config, job.plain, folder)  # refuses before anything is created
    with claimed(folder):
        if read_object(folder / files.STATUS) != status:  # another run has ended here meanwhile
            start = resume.decide(job.config, job.plain, folder)

        def work(folder: Path) -> supervise.Ended:
            write_composition(folder / files.HYDRA)
            return supervise.run(job.config, job.plain, folder, wanted.overrides, start=start)

        return wanted.run(work, folder).exit_code


def _show(args: argparse.Namespace) -> int:
    """Print the answer to ``--help``, ``--cfg`` or ``--info``."""
    source = source_of(args)
    if args.help:
        print(help_text(args.overrides, source))
        return 0
    wanted = request(args.overrides, source=source, writes=False)
    return WRONG_REQUEST if answer(args, wanted.composer) else 0


def read(words: Sequence[str], purpose: str = "", also: Sequence[str] = ()) -> argparse.Namespace:
    """Read overrides and Hydra's flags, which may stand in any order."""
    parser = get_args_parser()
    parser.exit_on_error = False  # an error goes into the one message
    spelled = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        spelled.append(word)
        if word in ("--info", "-i") and "=" in following:
            spelled.append("all")  # its default; argparse would take the override for its value
    try:
        args, rest = parser.parse_known_args(spelled)
    except argparse.ArgumentError as error:
        name = error.argument_name or "flags"
        raise RequestError([Problem(name, NOTHING, error.message)]) from None
    problems = [
        Problem(word, NOTHING, "unknown flag; --help and --hydra-help list the flags")
        for word in rest
        if word.startswith("-")
    ]
    problems += _flag_problems(args)
    if purpose:
        allowed = ("config_path", "config_name", "config_dir", "overrides", *also)
        problems += [
            Problem("--" + name.replace("_", "-"), NOTHING, f"does not go with {purpose}")
            for name, value in vars(args).items()
            if value not in (None, False) and name not in allowed
        ]
    # argparse takes overrides before or after a flag, not both.
    args.overrides += [word for word in rest if not word.startswith("-")]
    args.overrides = with_own_mode(spelled_out(args.overrides))
    if problems:
        raise RequestError([*problems, *_wrong_overrides(args)])
    return args


def single(words: Sequence[str], purpose: str) -> Request:
    """Read and check a request for one run; nothing is created."""
    args = read(words, purpose)
    wanted = request(args.overrides, source=source_of(args), writes=False)
    if wanted.sweep is not None:
        message = f"{purpose} is of one run: leave out what makes a sweep of it"
        raise RequestError([Problem("hydra.mode", "MULTIRUN", message)])
    note(wanted.notes)
    elastic.require_one_machine(wanted.jobs[0].config)
    check_jobs(wanted.jobs)
    return wanted


def source_of(args: argparse.Namespace) -> Source:
    """Return where the flags say that the configuration is read."""
    path, extra = (
        None if text is None else Path(text).absolute()
        for text in (args.config_path, args.config_dir)
    )
    return Source(path, args.config_name or CONFIG_NAME, extra)


def check_jobs(jobs: Sequence[Job], where: Where = "here") -> None:
    """Check what needs torch: targets, data, device and clipping mode of each distinct job."""
    if not jobs:
        return
    here = where != "elsewhere"
    lacking = {one.key: one for job in jobs if here for one in missing(job.config)}
    if lacking:
        raise RequestError(lacking.values())
    if "torch" not in sys.modules:
        announce("clip-runner: importing torch, then checking model and data")
    started = started_rank()
    if where == "here" and (started is None or started.world_size == 1):
        # Ranks import torch while this process does.
        elastic.prepare(*(job.config for job in jobs))
    if problems := _torchs_problems(jobs, here):
        raise RequestError(problems)
    if here:
        note(_one_rank(jobs))


def _torchs_problems(jobs: Sequence[Job], here: bool) -> list[Problem]:
    """Return what is wrong with each distinct job, as far as only torch can tell."""
    with importing("torch"):
        from runner.train import preflight

    problems: list[Problem] = []
    seen: list[dict[str, Any]] = []
    for job in jobs:
        apart = {key: value for key, value in job.plain.items() if key != "seed"}
        if apart in seen:
            continue
        seen.append(apart)
        try:
            with importing("torch._dynamo"):  # torch does when the first optimizer is made
                preflight.check(job.config, compared=len(jobs) > 1, here=here)
        except RequestError as error:
            problems += (replace(problem, job=job.label) for problem in error.problems)
    return problems


def note(sentences: Iterable[str]) -> None:
    """Print ``sentences`` to standard error, on the first rank alone."""
    for sentence in () if joins() else sentences:
        print_line(f"clip-runner: note: {sentence}", sys.stderr)


def _one_rank(jobs: Sequence[Job]) -> list[str]:
    """Return a note for each plugin that could use several ranks, but runs on one."""
    growing = [job.config for job in jobs if may_grow(job.config.plugin)]
    if started_rank() is not None or not growing:
        return []
    from runner.train import build

    names = {config.plugin.name for config in growing if build.ranks_of(config) == 1}
    return [
        f"plugin={name} runs on one rank: plugin.nproc is not given, and this run uses at most one "
        "GPU. plugin.nproc=2 starts two ranks."
        for name in sorted(names)
    ]


def _wrong_overrides(args: argparse.Namespace) -> Sequence[Problem]:
    """Return the problems of the overrides beside a wrong flag."""
    try:
        request(
            args.overrides, multirun=args.multirun, source=source_of(args), earlier=earlier_record
        )
    except RequestError as error:
        return error.problems
    return ()


def _flag_problems(args: argparse.Namespace) -> list[Problem]:
    """Return a problem for flags that exclude each other, or whose value is wrong."""
    problems = []
    modes = {
        "-m": args.multirun,
        "--run": args.run,
        "--cfg": args.cfg is not None,
        "--info": args.info is not None,
    }
    chosen = [flag for flag, is_set in modes.items() if is_set]
    if len(chosen) > 1:
        problems.append(Problem(" ".join(chosen), NOTHING, "only one of these flags can be given"))
    if args.resolve and args.cfg is None and not args.help:
        problems.append(Problem("--resolve", NOTHING, "goes with --cfg or --help"))
    if args.experimental_rerun is not None:
        message = f"is not supported; the overrides of a run are in its {files.OVERRIDES}"
        problems.append(Problem("--experimental-rerun", args.experimental_rerun, message))
    if args.shell_completion:
        problems.append(Problem("--shell-completion", NOTHING, "is not supported"))
    for name in ("config_dir", "config_path"):
        folder = getattr(args, name)
        if folder is not None and not os.path.isdir(folder):
            flag = "--" + name.replace("_", "-")
            problems.append(Problem(flag, folder, "must be a folder that exists"))
            setattr(args, name, None)
    return problems
