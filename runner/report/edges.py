"""Whether the best value of a key is at an end of those that were tried, and what lies beyond."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runner.config.notation import rounded as typed
from runner.report.findings import Findings
from runner.report.look import rounded
from runner.report.settings import MODE, THRESHOLD, Setting, choice

ALIKE = 0.05  # relative difference up to which results of single seeds count as equal


def edge(findings: Findings, key: str) -> str | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried."""
    values = edge_values(findings, key)
    best = findings.best
    if not values or best is None:
        return None
    fixed = _fixed(findings, best, key)
    where = ", ".join(f"{column}={text}" for column, text in fixed.items())
    start = f"With {where} the" if where else "The"
    lowest = all(_size(value) < (best.number(key) or 0.0) for value in values)
    end, beyond = ("lowest", "lower") if lowest else ("highest", "higher")
    return (
        f"{start} best {key}, {rounded(best.number(key))}, is the {end} with a result: a {beyond} "
        f"one may do better (try {' and '.join(values)})."
    )


def _size(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _fixed(findings: Findings, best: Setting, key: str) -> dict[str, str]:
    """Return the other keys that were swept, with their values in the best setting."""
    columns = [column for column in findings.columns if column not in ("seed", key)]
    if MODE not in findings.swept:
        columns = [column for column in columns if column != MODE]
    return {column: choice(best.runs[0], column) for column in columns}


def edge_values(findings: Findings, key: str) -> list[str]:
    """Return the values to try beyond the range of a sweep, whose best is at an end of it."""
    best = findings.best
    value = None if best is None else best.number(key)
    if best is None or value is None:
        return []
    fixed = _fixed(findings, best, key)
    tried = [s for s in findings.settings if _tried(findings, s, key, fixed)]
    values = [setting.number(key) or 0.0 for setting in tried]
    if len(tried) < 2 or value not in (min(values), max(values)) or not _differ(findings, tried):
        return []
    if value == min(values):
        return [typed(value * 0.5), typed(value * 0.25)]
    if key == THRESHOLD and not _clips_at_the_top(findings, best):
        return []
    return [typed(value * 2), typed(value * 4)]


def _clips_at_the_top(findings: Findings, best: Setting) -> bool:
    """Return whether a higher threshold would clip less, and no run went without clipping."""
    unclipped = any(not s.clips and findings.scores.seeds(s) for s in findings.settings)
    return not unclipped and bool(findings.scores.ratio(best))


def _differ(findings: Findings, settings: Sequence[Setting]) -> bool:
    """Return whether seeds tell the best of ``settings`` from another one; a lost run does."""
    ranked = [setting for setting in findings.ranked if setting in settings]
    if len(ranked) < len(settings) or any(len(findings.scores.seeds(s)) < 2 for s in settings):
        means = [findings.scores.mean(setting)[0] for setting in settings]
        lost = not all(math.isfinite(mean) for mean in means)
        largest = max(abs(mean) for mean in means)
        return lost or max(means) - min(means) > ALIKE * largest
    differences = findings.differences_to(ranked[0])
    return any(differences[s.index].seen for s in ranked[1:] if s.index in differences)


def _tried(findings: Findings, setting: Setting, key: str, fixed: Mapping[str, str]) -> bool:
    """Return whether a setting has a result for a value of ``key`` and is else as ``fixed``.

    A value that diverged limits the range, as a worse result does.
    """
    if not findings.scores.seeds(setting) or setting.number(key) is None:
        return False
    return all(choice(setting.runs[0], column) == text for column, text in fixed.items())
