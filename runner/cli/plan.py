"""List what a command would run, without running it.

    python -m runner plan [OVERRIDES OF A RUN OR A SWEEP]

For every run it prints the overrides that set it apart, its optimizer steps, and whether it is done
already. It creates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.cli.arguments import check_jobs, checked, note, read
from runner.compose.jobs import Job
from runner.compose.request import Request
from runner.config.notation import plural
from runner.sweep import live
from runner.sweep.resume import plan_runs

USAGE = __doc__


def main(words: Sequence[str]) -> int:
    """Print what the arguments ``words`` would run."""
    wanted = checked(read(words, "a plan"))
    note(wanted.notes)
    check_jobs(wanted.jobs)
    states = _states(wanted)
    steps = [_steps(job) for job in wanted.jobs]
    listed = [
        (number, job.label, "unknown" if count is None else str(count), state)
        for (number, state), job, count in zip(states, wanted.jobs, steps, strict=True)
    ]
    listed.sort(key=lambda row: int(row[0] or 0))
    print(live.columns([("run", "", "steps", "state"), *listed]))
    print(_summary(wanted, [state for _, state in states], steps))
    return 0


def _states(wanted: Request) -> list[tuple[str, str]]:
    """Return the number and the state of each job."""
    if wanted.sweep is None or wanted.sweep.trials is not None:
        return [("" if wanted.sweep else "0", "to run")] * len(wanted.jobs)
    entries = plan_runs(wanted)
    found = []
    for job in wanted.jobs:
        entry = next(one for one in entries if one.config_hash == job.hash)
        entries.remove(entry)
        found.append((str(entry.number), "done" if entry.state == "finished" else "to run"))
    return found


def _steps(job: Job) -> int | None:
    """Return the optimizer steps of a run; None if its duration and data do not give them."""
    from runner.train import build

    return build.steps_of(job.config, build.make_data(job.config.data))


def _summary(wanted: Request, states: Sequence[str], steps: Sequence[int | None]) -> str:
    if wanted.sweep is None:
        machines = wanted.jobs[0].config.plugin.nnodes or 1
        where = f", on {machines} machines" if machines > 1 else ""
        return f"one run, in a folder of its own in outputs/runs{where}"
    if wanted.sweep.trials is not None:
        runs = plural(wanted.sweep.trials, "run")
        kinds = "that the sweeper chooses as it goes, of the kinds above"
        return f"{runs} {kinds}, in {wanted.sweep.folder}"
    left = [count for count, state in zip(steps, states, strict=True) if state != "done"]
    total = "" if None in left else f", {plural(sum(filter(None, left)), 'step')}"
    return f"{len(left)} of {len(states)} to run{total}, in {wanted.sweep.folder}"
