"""List what a command would run, without running it.

    python -m runner plan [OVERRIDES OF A RUN OR A SWEEP]

For every run it prints the overrides that set it apart, the other keys that differ, the optimizer
steps, and whether the run is done already. It creates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.cli.run import check_jobs, note, read, source_of
from runner.compose.jobs import Job
from runner.compose.overrides import key_of
from runner.compose.request import Request, request
from runner.config.check import leaves
from runner.config.identity import NOT_HASHED
from runner.config.notation import plural
from runner.config.problem import shown
from runner.config.sizes import least_ranks, may_grow
from runner.run_folder.sweep_record import earlier_record
from runner.sweep import live
from runner.sweep.resume import plan_runs
from runner.train.known_length import known_length
from runner.train.progress import steps_of

USAGE = __doc__


def main(words: Sequence[str]) -> int:
    """Print what the arguments ``words`` would run."""
    args = read(words, "a plan", also=["multirun"])
    wanted = request(
        args.overrides, multirun=args.multirun, source=source_of(args), earlier=earlier_record
    )
    note(wanted.notes)
    samples = [known_length(job.config) for job in wanted.jobs]
    check_jobs([job for job, known in zip(wanted.jobs, samples, strict=True) if known is None])
    states = _states(wanted)
    steps = [_steps(job, known) for job, known in zip(wanted.jobs, samples, strict=True)]
    columns = zip(states, wanted.jobs, _others(wanted.jobs), steps, strict=True)
    listed = [
        (number, job.label, others, "unknown" if count is None else str(count), state)
        for (number, state), job, others, count in columns
    ]
    listed.sort(key=lambda row: int(row[0] or 0))
    print(live.columns([("run", "", "also differs", "steps", "state"), *listed]))
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


def _steps(job: Job, samples: int | None) -> int | None:
    """Return the optimizer steps of a run; None if its duration and data do not give them."""
    if samples is not None:
        return steps_of(job.config, samples, data_size=1)
    from runner.train import build

    data = build.make_data(job.config.data)
    return build.steps_of(job.config, data)


def _others(jobs: Sequence[Job]) -> list[str]:
    """Return, for each job, the keys that differ between jobs and that no override names."""
    flat = [
        {
            key: shown(value)
            for section, content in job.plain.items()
            if section not in NOT_HASHED
            for key, value in leaves(section, content)
        }
        for job in jobs
    ]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    named = {key_of(word).partition("@")[0] for job in jobs for word in job.apart}
    # An override that chooses an option names the key that says which was chosen.
    named |= {f"{group}.{key}" for group in set(named) for key in ("name", "mode", "_target_")}
    # A mode has options that others lack: the choice of the mode implies them.
    counted = {
        key: {one.get(key) for one in flat if key in one or not key.startswith("clip.")}
        for key in keys
    }
    differing = [key for key in keys if key not in named and len(counted[key]) > 1]
    return [
        " ".join(f"{key}={values[key]}" for key in differing if key in values) for values in flat
    ]


def _machines(wanted: Request) -> str:
    """Return on how many machines a run is, if it is on several."""
    plugin = wanted.jobs[0].config.plugin
    nodes = plugin.nnodes or 1
    ranks = plural(least_ranks(plugin) // nodes, "rank")
    least = "at least " if may_grow(plugin) else ""
    return f", on {nodes} machines of {least}{ranks}" if nodes > 1 else ""


def _summary(wanted: Request, states: Sequence[str], steps: Sequence[int | None]) -> str:
    if wanted.sweep is None:
        return f"one run, in a folder of its own in outputs/runs{_machines(wanted)}"
    if wanted.sweep.trials is not None:
        return (
            f"{plural(wanted.sweep.trials, 'run')} that the sweeper chooses as it goes, of the "
            f"kinds above, in {wanted.sweep.folder}"
        )
    left = [count for count, state in zip(steps, states, strict=True) if state != "done"]
    total = "" if None in left else f", {plural(sum(filter(None, left)), 'step')}"
    return f"{len(left)} of {len(states)} to run{total}, in {wanted.sweep.folder}"
