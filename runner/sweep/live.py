"""Text that a sweep prints: a line before each run, one for each failure, its answer at the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean

from runner.config.notation import clock, percent, plural, rounded
from runner.report.findings import Findings
from runner.report.remarks import states
from runner.report.table import state_of
from runner.report.verdict import verdict
from runner.run_folder.status import Entry, SweepRecord, best


def resumed(entries: Sequence[Entry]) -> str:
    """Return how many runs were finished before; empty if none was."""
    done = sum(entry.state == "finished" for entry in entries)
    if not done:
        return ""
    waiting = sum(entry.state == "waiting" for entry in entries)
    verb = "is" if done == 1 else "are"
    to_go = f"{waiting} to go" if waiting else "nothing to run"
    return f"{done} of {plural(len(entries), 'run')} {verb} done already: {to_go}"


def interruption(record: SweepRecord, search: bool) -> str:
    """Return how far a sweep came that was interrupted, and how to continue it."""
    done = sum(entry.state == "finished" for entry in record.entries)
    again = "starts the search afresh" if search else "runs the rest"
    runs = plural(record.total, "run")
    text = f"the sweep was interrupted after {done} of {runs}; the same command {again}"
    jobs = [entry.job for entry in record.entries if entry.job and not entry.ended]
    return f"{text}\n{in_slurm(jobs)}" if jobs else text


def in_slurm(jobs: Collection[str]) -> str:
    """Return that jobs go on without the command, and how to cancel them."""
    goes = "a run goes" if len(jobs) == 1 else f"{len(jobs)} runs go"
    return f"{goes} on in Slurm; the same command waits for them (scancel {' '.join(jobs)})"


def news(record: SweepRecord, entry: Entry) -> str:
    """Return that a run begins, with the best run so far and the time left, or how it ended."""
    title = f"run {entry.number} ({entry.number + 1} of {record.total})"
    if entry.label:
        title += f": {entry.label}"
    if entry.state == "failed":
        return f"{title}   failed: {entry.error or 'no message'}"
    if entry.ended:
        score = ""
        if entry.objective is not None:
            score = f"   {record.objective} {rounded(entry.objective, 4)}"
        return f"{title}   {entry.state}{score}"
    return title + _best_so_far(record) + _time_left(record)


def _best_so_far(record: SweepRecord) -> str:
    """Return the best finished run; nothing if seeds vary: it would be the luckiest."""
    leader = None if "seed" in record.keys else best(record.entries, record.maximizes)
    if leader is None or leader.objective is None:
        return ""
    return f"   best so far {rounded(leader.objective, 4)} ({leader.label or leader.number})"


def _time_left(record: SweepRecord) -> str:
    """Return an estimate by the mean duration of a run, for runs that run one after another."""
    finished = [entry for entry in record.entries if entry.state == "finished"]
    seconds = [entry.seconds for entry in finished if entry.seconds]
    if not seconds:
        return ""
    count = record.total - sum(entry.ended for entry in record.entries)
    return f"   about {clock(fmean(seconds) * max(count, 1))} left"


def answer(findings: Findings) -> str:
    """Return the first sentence of the page, a table of settings, best first, and lost runs."""
    rows = [("setting", findings.metric or "metric", "clipped", "seeds", "state")]
    for setting in findings.listed:
        mean, spread = findings.scores.mean(setting)
        score = rounded(mean, 4) if math.isfinite(mean) else ""
        score += "" if spread is None else f" ± {rounded(spread, 2)}"
        share = findings.scores.share(setting)
        clipped = "" if share is None else percent(share)
        seeds = str(len(setting.runs))
        rows.append((setting.label, score, clipped, seeds, state_of(findings, setting)))
    lost = [*states(findings)]
    return "\n".join([verdict(findings).title, columns(rows), *lost])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as aligned columns; a column without any text is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    widths = [max(len(cell) for cell in column) for column in kept]
    lines = zip(*kept, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
