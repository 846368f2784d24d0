"""``python -m runner [OVERRIDES]``: check the overrides, and run what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli import WRONG_REQUEST
from runner.cli.arguments import check_jobs, checked, read
from runner.compose.answers import answer, help_text
from runner.compose.record import write_composition
from runner.compose.request import Request, request
from runner.config.environment import joins, started_rank
from runner.config.problem import NOTHING, Problem, RequestError
from runner.launch import resume
from runner.run_folder import files
from runner.run_folder.status import claimed
from runner.run_folder.strict_json import read_object


def main(words: Sequence[str]) -> int:
    """Run the request of the arguments ``words``, or print what their flags ask for."""
    args = read(words)
    if args.help:
        print(help_text(args.overrides, args.source))
        return 0
    asked = vars(args)
    flags = [f"--{name}={asked[name]}" for name in ("cfg", "info", "package") if asked[name]]
    flags += ["--hydra-help"] * args.hydra_help + ["-sc"] * args.shell_completion
    if flags:
        words = args.overrides
        if args.cfg or args.info:
            wanted = request(words, source=args.source, writes=False)
            words = (wanted.sweep or wanted.jobs[0]).words
        flags += ["--resolve"] * args.resolve
        return WRONG_REQUEST if answer(flags, words, args.source) else 0
    wanted = checked(args)
    for job in wanted.jobs:
        resume.require_one_machine(job.config)
    if wanted.sweep is not None:
        from runner.sweep.control import run_sweep

        started = started_rank()
        if started is not None and started.world_size > 1:
            message = "a sweep starts its own ranks (plugin.nproc): run it without torchrun"
            raise RequestError([Problem("-m", NOTHING, message)])
        return run_sweep(wanted, words, check_jobs)
    check_jobs(wanted.jobs)
    if joins():
        from runner.launch.rank import join

        return join(timeout=wanted.jobs[0].config.launch.timeout)
    return _run(wanted)


def _run(wanted: Request) -> int:
    """Run the one job of a request, from its start or from a checkpoint."""
    from runner.launch import supervise

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
