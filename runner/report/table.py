"""The table: one row a run, the runs of one setting together under their mean.

It is complete without scripts; with them, each heading sorts. A cell carries its value at full
precision, and its heading carries the key of the metric. `page.html` lays it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from runner.config.notation import higher_is_better
from runner.report.findings import Findings, Group, choice, mean_and_spread, natural
from runner.report.look import percent, plural, rounded, signed
from runner.report.run import DIVERGED, PERCENTILES, Run
from runner.report.statistics import Difference
from runner.run_folder import keys

# Longer texts may be broken over lines.
_LONG = 32
_STATES = {
    "finished": "✓",
    "failed": "✕",
    "killed": "✕",
    "interrupted": "‖",
    "running": "…",
    "not started": "○",
    "unreadable": "✕",
}


class Column(NamedTuple):
    """One column: key, heading, meaning, and how a value is formatted."""

    key: str
    title: str
    hint: str
    text: Callable[[float], str] | None = None


class Cell(NamedTuple):
    """Text, the value that it is sorted by, style, and what the pointer shows."""

    text: str
    value: str = ""
    style: str = ""
    hint: str = ""


class Row(NamedTuple):
    """One row: of a run, or the mean of a setting."""

    name: str
    run: Run | None
    cells: list[Cell]


def columns_of(found: Findings) -> list[Column]:
    """Return each column of metrics that any run has a value for."""
    known: list[Column] = []
    for key in found.metrics:
        # One column for metrics that settings are not compared by: the lowest loss of a single
        # training step says little, and so does the last of an accuracy that rose and fell.
        own = "best" if higher_is_better(key) else "final"
        for which in ("best", "final") if key == found.metric else (own,):
            hint = f"{which} {key} of the run"
            known.append(Column(f"{which}/{key}", f"{key} {which}", hint, rounded))
    norm, clips = "of the gradient norm before clipping", "share of steps that clipping changed"
    part = "mean share clipped of what the mode clips: the elements or the units"
    lost = "step from which the loss was not finite, or over twice its start, to the end"
    known += [
        Column(keys.CLIP_RATIO_TOTAL, "clip ratio", clips, percent),
        Column(keys.CLIP_FRACTION, "clip fraction", part, percent),
        *(Column(f"{keys.GRAD_NORM}/{p}", f"‖G‖ {p}", f"{p} {norm}", rounded) for p in PERCENTILES),
        Column(keys.CLIP_COEF, "coefficient", "mean of ‖G‖ after clipping ÷ before", rounded),
        Column(keys.GRAD_NONFINITE, "skipped", "steps whose gradient was not finite", rounded),
        Column(keys.CLIP_SKIPPED, "spikes", "steps skipped as spikes (clip.skip)", rounded),
        Column(DIVERGED, "diverged at", lost, "{:,.0f}".format),
        Column("steps", "steps", "optimizer steps taken", "{:,.0f}".format),
        Column("seconds", "seconds", "wall time", "{:,.1f}".format),
    ]
    measured = found.measured.values()
    return [column for column in known if any(of.get(column.key) is not None for of in measured)]


def headings(found: Findings) -> list[Column]:
    """Return the headings of all columns; those of metrics have a format."""
    compared = []
    if found.comparisons and (other := found.compared_with):
        which = "baseline" if found.baseline else "best setting"
        hint = f"best {found.metric} minus that of the {which}, {other.label}, seed by seed where "
        p = "p of the t test, corrected by Holm's method for the number of settings"
        title = f"Δ to {other.label}"
        compared = [
            Column("difference", title, f"{hint}both have them, with its interval", signed),
            Column("p", "p", p, rounded),
        ]
    return [
        Column("run", "run", "number in the sweep"),
        *(Column(key, key, f"configuration key {key}") for key in found.columns),
        Column("state", "state", "how the run ended"),
        *compared,
        *columns_of(found),
    ]


def rows_of(found: Findings, group: Group) -> list[Row]:
    """Return the rows of a setting: the mean, if it has several runs, and each run."""
    alone = len(group.runs) == 1
    columns, rows = columns_of(found), []
    for run in group.runs:
        mark = f"{_STATES.get(run.state, '?')} {run.state}"
        cells = [_key(choice(run, key)) for key in found.columns]
        cells.append(Cell(mark, run.state, "state", (run.error or "")[:500]))
        cells += _compared(found, group, None if alone else run)
        measured = found.measured[run.number]
        cells += [_cell(measured.get(one.key), one.text) for one in columns]
        rows.append(Row(run.number, run, cells))
    return rows if alone else [mean_row(found, group), *rows]


def mean_row(found: Findings, group: Group) -> Row:
    judged = found.judged(group)
    chosen = ("–" if key == "seed" else choice(group.runs[0], key) for key in found.columns)
    cells = [*map(_key, chosen), Cell("mean ± sd"), *_compared(found, group, None)]
    for column in columns_of(found):
        known = (found.measured[run.number].get(column.key) for run in judged)
        values = [value for value in known if value is not None]
        if not values or column.key == DIVERGED:
            cells.append(_cell(None, column.text))
            continue
        compared = column.key == f"best/{found.metric}"  # by seed, and lost where a run is lost
        mean, spread = found.mean(group) if compared else mean_and_spread(values)
        cell = _cell(mean, column.text)
        if spread:
            sd = percent(spread) if column.text is percent else rounded(spread, 2)
            cell = cell._replace(text=f"{cell.text} ± {sd}")
        cells.append(cell)
    ran, counted = ({run.seed for run in runs} for runs in (group.runs, judged))
    some = "" if ran == counted else f"{len(counted)} of "
    return Row(f"{some}{plural(len(ran), 'seed')}", None, cells)


def _compared(found: Findings, group: Group, run: Run | None) -> list[Cell]:
    """Return difference and p of a setting, or the difference of one of its runs by its seed."""
    other = found.compared_with
    if not found.comparisons or other is None:
        return []
    one = found.comparisons.get(group.index)
    if run is not None:
        pair = [found.seeds(of).get(run.seed) for of in (group, other)]
        known = one is not None and found.counts(run) and None not in pair
        return [_cell(pair[0] - pair[1] if known else None, signed), Cell("")]  # type: ignore[operator]
    if one is None:
        return [Cell("–", style="figure")] * 2
    value = Cell(difference(one), repr(one.value), "figure")
    if one.low is None:
        return [value, Cell("–", style="figure")]
    hint = (
        f"paired t test of {plural(one.seeds, 'seed')}: p {rounded(one.p, 2)} before correction; "
    )
    hint += f"these seeds show a true difference of {rounded(one.visible, 2)} four times in five"
    return [value._replace(hint=hint), _cell(one.corrected, partial(rounded, digits=2))]


def difference(one: Difference) -> str:
    """Return a difference with its interval, such as ``+0.02 [+0.01, +0.03]``."""
    if one.low is None or one.high is None:
        return signed(one.value)
    return f"{signed(one.value)} [{signed(one.low)}, {signed(one.high)}]"


def _key(text: str) -> Cell:
    size, _ = natural(text)
    return Cell(text, text if math.isinf(size) else repr(size), "long" * (len(text) > _LONG))


def _cell(value: float | None, text: Callable[[float], str] | None) -> Cell:
    lost = value is not None and not math.isfinite(value)
    shown = "–" if value is None or text is None else text(value)
    return Cell(shown, "" if value is None else repr(value), "figure lost" if lost else "figure")
