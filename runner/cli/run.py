"""``python -m runner [plan] [OVERRIDES]``: run what the overrides ask for, or list it."""

from collections.abc import Sequence
from typing import Any

from runner.cli.arguments import check_jobs, checked, composed, read, require_same
from runner.config.environment import joins, started_rank
from runner.config.masking import masked_words
from runner.config.notation import plural
from runner.config.problem import NOTHING, Problem, RequestError
from runner.launch import resume, signals
from runner.request.jobs import write_composition
from runner.request.request import Request, answer, composed_text, help_text
from runner.run_folder import files
from runner.run_folder.status import claimed
from runner.run_folder.strict_json import read_object
from runner.telemetry.sinks.console import print_line


def run(words: Sequence[str]) -> int:
    """Run the request of the arguments ``words``, or print what their flags ask for."""
    args = read(words)
    overrides, own = args.overrides, args.config_dir
    if args.help:
        print_line(help_text(overrides, own, args.multirun))
    elif args.cfg:
        wanted = composed(args)
        print(composed_text(wanted, args.cfg, args.package, args.resolve), end="")
    elif args.info:
        answer([f"--info={args.info}"], composed(args).made.choices, own)
    elif args.hydra_help or args.shell_completion:
        answer(args.hydra_help or ["-sc", args.shell_completion], overrides, own)
    else:
        # As a page repeats them, from any folder
        flags = ["-m"] * args.multirun + (["--config-dir", str(own)] if own else [])
        return _run(checked(args), [*flags, *overrides])
    return 0


def _run(wanted: Request, words: Sequence[str]) -> int:
    for job in wanted.jobs:
        resume.require_one_machine(job.config)
    if wanted.sweep:
        from runner.sweep.control import run_sweep

        if (started := started_rank()) and started.world_size > 1:
            message = "a sweep starts its own ranks (plugin.nproc): run it once, without torchrun"
            raise RequestError([Problem("-m", NOTHING, message)])
        return run_sweep(wanted, words, check_jobs)
    check_jobs(wanted.jobs)
    [job] = wanted.jobs
    require_same(job)
    if joins():
        from runner.launch.rank import join

        return join(timeout=job.config.launch.timeout)
    with signals.deferred():
        from runner.launch import supervise
        from runner.report.page import written

    folder = resume.requeued(job.plain, wanted.folder) or wanted.folder
    status = read_object(folder / files.STATUS)
    start = resume.decide(job.config, job.plain, folder)  # refuses before anything is created
    with claimed(folder):
        if read_object(folder / files.STATUS) != status:  # another run has ended here meanwhile
            start = resume.decide(job.config, job.plain, folder)

        def work(config: Any) -> int:
            write_composition(folder / files.HYDRA, config)
            asked = masked_words(job.words)
            failed = supervise.run(job.config, job.plain, folder, asked, start=start, page=written)
            return failed.exit_code if failed else 0

        return int(wanted.run(work, folder))


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

    entries, jobs = plan_runs(wanted), {job.hash: job for job in wanted.jobs}
    alone = "" if wanted.sweep else "0"
    planned = [(str(one.number), one.label, one.state, jobs[one.config_hash]) for one in entries]
    rows, left = [], []
    planned = planned or [(alone, one.label, "", one) for one in wanted.jobs]
    for number, label, state, job in planned:
        count = build.steps_of(job.config, build.make_data(job.config.data))
        state = "done" if state == "finished" else "to run"
        rows.append((number, label, "unknown" if count is None else str(count), state))
        left += [count] if state == "to run" else []
    print_line(live.columns([("run", "", "steps", "state"), *rows]))
    if not wanted.sweep:
        print_line("one run, in a folder of its own in outputs/runs")
    elif wanted.trials is not None:
        runs = f"{plural(wanted.trials, 'run')} that the sweeper chooses as it goes"
        print_line(f"{runs}, of the kinds above, in {wanted.folder}")
    else:
        total = "" if None in left else f", {plural(sum(filter(None, left)), 'step')}"
        print_line(f"{len(left)} of {len(rows)} to run{total}, in {wanted.folder}")
    return 0
