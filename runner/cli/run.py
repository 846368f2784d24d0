"""``python -m runner [OVERRIDES]``: check the overrides, and run what they ask for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra

from runner.cli import WRONG_REQUEST
from runner.cli.arguments import check_jobs, checked, note, read, source_of
from runner.compose.answers import answer, help_text
from runner.compose.composer import Composer
from runner.compose.record import write_composition
from runner.compose.request import Request, request
from runner.config.environment import joins, started_rank
from runner.config.folders import CONFIG_NAME, find
from runner.config.problem import NOTHING, Problem, RequestError
from runner.launch import elastic
from runner.run_folder import files
from runner.run_folder.status import claimed
from runner.run_folder.strict_json import read_object


def main(words: Sequence[str]) -> int:
    """Run the request of the arguments ``words``, or print what their flags ask for."""
    args = read(words)
    if args.help:
        print(help_text(args.overrides, source_of(args)))
        return 0
    if args.shell_completion:
        return _complete(args.overrides)
    if args.hydra_help:
        return answer(args, Composer(source_of(args)))
    if args.cfg is not None or args.info is not None:
        wanted = request(args.overrides, source=source_of(args), writes=False)
        return WRONG_REQUEST if answer(args, wanted.composer) else 0
    wanted = checked(args)
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

        return join(timeout=config.launch.timeout)
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


def _complete(words: Sequence[str]) -> int:
    """Let Hydra complete overrides in a shell."""
    home, argv = str(find("conf")), sys.argv
    answer = hydra.main(version_base="1.3", config_path=home, config_name=CONFIG_NAME)(print)
    sys.argv = ["clip-runner", "-sc", *words]
    try:
        answer()
    finally:
        sys.argv = argv
    return 0
