"""Text that a sweep prints: a line before each run, one for each failure, its answer at the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean

from runner.config.notation import clock, percent, plural, rounded
from runner.report.findings import Findings
from runner.report.table import state_of
from runner.report.verdict import states, verdict
from runner.run_folder.status import Entry, SweepRecord, best


def resumed(entries: Sequence[Entry]) -> str:
    done = sum(entry.state == "finished" for entry in entries)
    left = sum(entry.state == "waiting" for entry in entries)
    verb = "is" if done == 1 else "are"
    rest = f"{left} to go" if left else "nothing to run"
    return f"{done} of {plural(len(entries), 'run')} {verb} done already: {rest}" if done else ""


def interruption(record: SweepRecord, search: bool) -> str:
    done = sum(entry.state == "finished" for entry in record.entries)
    again = "starts the search afresh" if search else "runs the rest"
    runs = plural(record.total, "run")
    text = f"the sweep was interrupted after {done} of {runs}; the same command {again}"
    jobs = [entry.job for entry in record.entries if entry.job and not entry.ended]
    return f"{text}\n{in_slurm(jobs)}" if jobs else text


def in_slurm(jobs: Collection[str]) -> str:
    goes = "a run goes" if len(jobs) == 1 else f"{len(jobs)} runs go"
    return f"{goes} on in Slurm; the same command waits for them (scancel {' '.join(jobs)})"


def news(record: SweepRecord, entry: Entry) -> str:
    """Return that a run begins, with the best run so far and the time left, or how it ended."""
    title = f"run {entry.number} ({entry.number + 1} of {record.total})"
    parts = [f"{title}: {entry.label}" if entry.label else title]
    if entry.state == "failed":
        return f"{parts[0]}   failed: {entry.error or 'no message'}"
    if entry.ended:
        parts[0] += f"   {entry.state}"
        if entry.objective is not None:
            parts.append(f"{record.objective} {rounded(entry.objective, 4)}")
        return "   ".join(parts)
    # The best of several seeds would be the luckiest one.
    leader = None if "seed" in record.keys else best(record.entries, record.maximizes)
    if leader is not None and leader.objective is not None:
        score = rounded(leader.objective, 4)
        parts.append(f"best so far {score} ({leader.label or leader.number})")
    seconds = [one.seconds for one in record.entries if one.state == "finished" and one.seconds]
    if seconds:
        left = record.total - sum(one.ended for one in record.entries)
        parts.append(f"about {clock(fmean(seconds) * max(left, 1))} left")
    return "   ".join(parts)


def answer(findings: Findings) -> str:
    """Return the first sentence of the page, a table of settings, best first, and lost runs."""
    rows = [("setting", findings.metric or "metric", "clipped", "seeds", "state")]
    for setting in findings.listed:
        mean, spread = findings.mean(setting)
        score = rounded(mean, 4) if math.isfinite(mean) else ""
        score += "" if spread is None else f" ± {rounded(spread, 2)}"
        share = findings.share(setting)
        clipped = "" if share is None else percent(share)
        seeds = str(len(setting.runs))
        rows.append((setting.label, score, clipped, seeds, state_of(findings, setting)))
    lost = [*states(findings)]
    return "\n".join([verdict(findings).title, columns(rows), *lost])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as aligned columns; a column without any text is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column[1:]) or len(rows) == 1]
    widths = [max(map(len, column)) for column in kept]
    lines = zip(*kept, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
