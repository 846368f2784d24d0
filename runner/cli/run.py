"""``python -m runner [plan] [OVERRIDES]``: run what the overrides ask for, or list it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli import WRONG_REQUEST
from runner.cli.arguments import check_jobs, checked, read
from runner.config.environment import joins, started_rank
from runner.config.notation import plural
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.record import recorded_words, write_composition
from runner.config.request import Request, answer, help_text, request
from runner.launch import resume
from runner.run_folder import files
from runner.run_folder.status import claimed
from runner.run_folder.strict_json import read_object


def run(words: Sequence[str]) -> int:
    """Run the request of the arguments ``words``, or print what their flags ask for."""
    args = read(words)
    if args.help:
        print(help_text(args.overrides, args.config_dir, args.multirun))
        return 0
    asked = vars(args)
    flags = [f"--{name}={asked[name]}" for name in ("cfg", "info", "package") if asked[name]]
    flags += ["--hydra-help"] * args.hydra_help + ["-sc"] * args.shell_completion
    if flags:
        words = args.overrides
        if args.cfg or args.info:
            wanted = request(words, config_dir=args.config_dir)
            words = (wanted.sweep or wanted.jobs[0]).words
        flags += ["--resolve"] * args.resolve
        return WRONG_REQUEST if answer(flags, words, args.config_dir) else 0
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
    folder, composed = wanted.folder, wanted.composed
    assert folder is not None
    assert composed is not None
    words = recorded_words(composed.hydra.overrides.task)
    folder = resume.requeued(job.plain, folder) or folder
    status = read_object(folder / files.STATUS)
    start = resume.decide(job.config, job.plain, folder)  # refuses before anything is created
    with claimed(folder):
        if read_object(folder / files.STATUS) != status:  # another run has ended here meanwhile
            start = resume.decide(job.config, job.plain, folder)

        def work(folder: Path) -> supervise.Ended:
            write_composition(folder / files.HYDRA)
            return supervise.run(job.config, job.plain, folder, words, start=start)

        return wanted.run(work, folder).exit_code


def plan(words: Sequence[str]) -> int:
    """List what a command would run, without running it.

        python -m runner plan [OVERRIDES OF A RUN OR A SWEEP]

    For every run it prints the overrides that set it apart, its optimizer steps, and whether it is
    done already. It creates nothing.
    """
    wanted = checked(read(words, "a plan"))
    check_jobs(wanted.jobs)
    from runner.sweep import live
    from runner.sweep.resume import plan_runs
    from runner.train import build

    entries = plan_runs(wanted)
    rows, left = [], []
    for job in wanted.jobs:
        count = build.steps_of(job.config, build.make_data(job.config.data))
        number, state = "" if wanted.sweep else "0", "to run"
        if entries:
            entry = next(one for one in entries if one.config_hash == job.hash)
            entries.remove(entry)
            number, state = str(entry.number), "done" if entry.state == "finished" else state
        rows.append((number, job.label, "unknown" if count is None else str(count), state))
        left += [count] if state == "to run" else []
    rows.sort(key=lambda row: int(row[0] or 0))
    print(live.columns([("run", "", "steps", "state"), *rows]))
    if wanted.sweep is None:
        machines = wanted.jobs[0].config.plugin.nnodes or 1
        where = f", on {machines} machines" if machines > 1 else ""
        print(f"one run, in a folder of its own in outputs/runs{where}")
    elif wanted.sweep.trials is not None:
        runs = f"{plural(wanted.sweep.trials, 'run')} that the sweeper chooses as it goes"
        print(f"{runs}, of the kinds above, in {wanted.sweep.folder}")
    else:
        total = "" if None in left else f", {plural(sum(filter(None, left)), 'step')}"
        print(f"{len(left)} of {len(rows)} to run{total}, in {wanted.sweep.folder}")
    return 0
