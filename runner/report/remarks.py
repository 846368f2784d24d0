"""What the page says beside its answer: ends of ranges, remarks of runs, runs that were lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from runner.config.notation import first_few
from runner.report.edges import edge
from runner.report.findings import Findings
from runner.report.look import plural
from runner.report.run import Run
from runner.report.settings import RATE, THRESHOLD

_LONGER = 1.2  # times the steps of another run, from which on they are told to differ


def remarks(findings: Findings) -> list[str]:
    """Return what the sweep shows beside its answer, the remarks of its runs, and lost runs."""
    by_topic: dict[str, dict[str, str]] = {}  # texts by topic and setting
    for setting in findings.settings:
        for run in setting.runs:
            for topic, text in _recorded_remarks(run):
                by_topic.setdefault(topic, {}).setdefault(setting.label, text)
    texts = []
    if "few" not in by_topic:
        edges = [edge(findings, key) for key in (THRESHOLD, RATE)]
        texts += [text for text in edges if text]
    for by_setting in by_topic.values():
        (label, text), *more = by_setting.items()
        settings = f"{label} and {plural(len(more), 'more setting')}" if more else label
        texts.append(text if len(findings.settings) == 1 else f"{settings}: {text}")
    return [*texts, *states(findings)]


def _recorded_remarks(run: Run) -> Iterator[tuple[str, str]]:
    """Yield topic and text of each remark in a run's summary that stands in its guidance too."""
    recorded = run.summary.get("remarks")
    guidance = run.summary.get("guidance")
    if not isinstance(recorded, list) or not isinstance(guidance, list):
        return
    for remark in recorded:
        if isinstance(remark, dict) and remark.get("text") in guidance:
            yield str(remark.get("topic")), str(remark.get("text"))


def states(findings: Findings) -> Iterator[str]:
    """Yield remarks on a baseline that does not exist, and on runs that took fewer steps."""
    if findings.unknown is not None:
        labels = first_few([setting.label for setting in findings.settings], 8)
        yield f"report.baseline={findings.unknown} names no setting; there are {labels}."
    runs = findings.sweep.runs
    for run in [run for run in runs if run.error or run.state in ("failed", "killed")][:5]:
        yield _failed(run)
    lengths = [run.steps for run in runs if run.state == "unknown"]  # of somebody's own loop
    if lengths and max(lengths) > _LONGER * min(lengths):
        yield (
            f"These runs have from {min(lengths):,} to {max(lengths):,} steps: one that looks "
            "worse may only have trained for less."
        )
    unfinished = Counter(run.state for run in runs if run.state not in ("finished", "unknown"))
    if unfinished and len(runs) > 1:
        counts = ", ".join(f"{count} {state}" for state, count in unfinished.items())
        yield f"Not all runs have finished: {counts}."


def _failed(run: Run) -> str:
    cause = (run.error or "").strip().rpartition("\n")[2][:300]
    ended = "was killed" if run.state == "killed" else run.state
    text = f"Run {run.number} {ended} at step {run.steps:,}"
    return f"{text}: {cause}" if cause else f"{text}."
