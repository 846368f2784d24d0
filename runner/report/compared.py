"""The columns of the table that compare each setting with one of them: Δ and its p.

A press on a setting's button compares all others with it. All texts are computed here and travel in
the page; its script only puts them in place. A reader has seen the results before pressing, so the
intervals and p are those of a reference that was chosen by them; see
:mod:`runner.report.statistics`.
"""

from __future__ import annotations

from typing import Any

from runner.report.findings import Findings
from runner.report.groups import Group
from runner.report.notation import plural, rounded, signed
from runner.report.run import Run
from runner.report.statistics import Difference

MOST_BASELINES = 32
"""Most settings with a button each; the texts grow with the square of their number."""

Cell = tuple[float | None, str, str | None]
"""Value, text, and what the pointer shows."""


def can_choose(found: Findings) -> bool:
    """Return whether settings have buttons."""
    return bool(found.comparisons) and len(found.groups) <= MOST_BASELINES


def headings(found: Findings, other: Group) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return heading and meaning of both columns, which compare with ``other``."""
    which = "best setting" if other is found.best and not found.baseline else "baseline"
    hint = f"best {found.metric} minus that of the {which}, {other.label}, seed by seed where both "
    p = "p of the t test, corrected by Holm's method for the number of settings"
    return (f"Δ to {other.label}", f"{hint}have them, with its interval"), ("p", p)


def row_cells(found: Findings, group: Group, run: Run | None, other: Group) -> list[Cell]:
    """Return both columns of a row: of a setting, or of one of its runs, compared by its seed."""
    one = found.against(other).get(group.index)
    if run is not None and len(group.runs) > 1:
        pair = [found.seeds(of).get(run.seed) for of in (group, other)]
        known = one is not None and found.counts(run) and None not in pair
        value = pair[0] - pair[1] if known else None  # type: ignore[operator]
        return [(value, "–" if value is None else signed(value), None), (None, "", None)]
    if one is None:
        return [(None, "–", None)] * 2
    if one.low is None:
        return [(one.value, difference(one), None), (None, "–", None)]
    how = f"{'paired' if one.paired else 'Welch'} t test of {plural(one.seeds, 'seed')}"
    flips = f"; sign-flip test p {rounded(one.exact, 2)}" if one.exact is not None else ""
    hint = f"{how}: p {rounded(one.p, 2)} before correction{flips}; these seeds show a "
    hint += f"true difference of {rounded(one.visible, 2)} four times in five"
    return [(one.value, difference(one), hint), (one.corrected, rounded(one.corrected, 2), None)]


def difference(one: Difference) -> str:
    """Return a difference with its interval, such as ``+0.02 [+0.01, +0.03]``."""
    if one.low is None or one.high is None:
        return signed(one.value)
    return f"{signed(one.value)} [{signed(one.low)}, {signed(one.high)}]"


def baselines(found: Findings) -> dict[int, dict[str, Any]]:
    """Return both columns for each setting as the baseline, by its index; empty without buttons."""

    def rows(other: Group) -> dict[str, Any]:
        return {
            run.number if run else f"setting-{group.index}": [
                ("" if value is None else repr(value), *texts)
                for value, *texts in row_cells(found, group, run, other)
            ]
            for group in found.groups
            for run in (None, *group.runs)
        }

    chosen = found.ranked if can_choose(found) else []
    return {one.index: {"heading": headings(found, one)[0], "rows": rows(one)} for one in chosen}
