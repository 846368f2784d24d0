"""List what a command would run, without running it.

    python -m runner plan [OVERRIDES OF A RUN OR A SWEEP]

For every run it prints the overrides that set it apart, its optimizer steps, and whether it is done
already. It creates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.cli.arguments import check_jobs, checked, read
from runner.config.notation import plural
from runner.sweep import live
from runner.sweep.resume import plan_runs

USAGE = __doc__


def main(words: Sequence[str]) -> int:
    """Print what the arguments ``words`` would run."""
    wanted = checked(read(words, "a plan"))
    check_jobs(wanted.jobs)
    from runner.train import build

    steps = [build.steps_of(one.config, build.make_data(one.config.data)) for one in wanted.jobs]
    entries = plan_runs(wanted)
    rows, left = [], []
    for job, count in zip(wanted.jobs, steps, strict=True):
        number, state = "" if wanted.sweep else "0", "to run"
        if entries:
            entry = next(one for one in entries if one.config_hash == job.hash)
            entries.remove(entry)
            number, state = str(entry.number), "done" if entry.state == "finished" else state
        rows.append((number, job.label, "unknown" if count is None else str(count), state))
        left += [count] if state == "to run" else []
    rows.sort(key=lambda row: int(row[0] or 0))
    print(live.columns([("run", "", "steps", "state"), *rows]))
    total = "" if None in left else f", {plural(sum(filter(None, left)), 'step')}"
    if wanted.sweep is None:
        machines = wanted.jobs[0].config.plugin.nnodes or 1
        where = f", on {machines} machines" if machines > 1 else ""
        print(f"one run, in a folder of its own in outputs/runs{where}")
    elif wanted.sweep.trials is not None:
        runs = f"{plural(wanted.sweep.trials, 'run')} that the sweeper chooses as it goes"
        print(f"{runs}, of the kinds above, in {wanted.sweep.folder}")
    else:
        print(f"{len(left)} of {len(rows)} to run{total}, in {wanted.sweep.folder}")
    return 0
