"""The table: one row a run, the runs of one setting together under their mean.

It is complete without scripts; with them, each heading sorts, and a press on a setting's Δ compares
all others with it. A cell carries its value at full precision (``data-value``), and its heading
carries the key of the metric (``data-key``). All texts are computed here; the script only puts them
in place. A reader has seen the results before pressing, so the intervals and p are those of a
reference that was chosen by them; see :mod:`runner.report.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runner.config.notation import higher_is_better
from runner.report.findings import Findings, Group, choice, mean_and_spread, natural
from runner.report.look import Child, Markup, percent, plural, rounded, signed, tag
from runner.report.run import PERCENTILES, Run, RunMetrics
from runner.report.statistics import Difference
from runner.run_folder import keys

MOST_BASELINES = 32
"""Most settings with a button each; the texts grow with the square of their number."""

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
_DIVERGED = "diverged_at"

Value = Callable[[Run, RunMetrics], float | None]
Text = Callable[[float | None], str]
Cell = tuple[float | None, str, str | None]
"""Value, text, and what the pointer shows."""


@dataclass(frozen=True)
class Column:
    """One column of metrics: key, heading, meaning, value of each run, and how it is formatted."""

    key: str
    title: str
    hint: str
    values: Mapping[str, float | None]
    text: Text


def table(found: Findings) -> Markup:
    """Return the table of all runs, with each column that any run has a value for."""
    columns = list(_columns(found))
    best = found.best if len(found.groups) > 1 else None
    caption = "One row a run. A heading sorts."
    if can_choose(found):
        caption += " Δ in a row compares the other settings with it."
    elif found.comparisons:
        caption += " report.baseline=NAME compares all settings with that one."
    inner = tag(
        "table",
        tag("caption", tag("span", caption), class_="aside"),
        tag("thead", _headings(found, columns)),
        *(_body(found, group, columns, group is best) for group in found.groups),
        id="runs",
    )
    about: dict[str, Any] = {"role": "region", "aria_label": "Table of runs", "tabindex": 0}
    return tag("div", inner, class_="wide", **about)


def omitted(found: Findings) -> Markup | None:
    """Return the names of the keys that differ and have no column."""
    if not found.others:
        return None
    title = tag("summary", f"{len(found.others)} more keys differ")
    return tag("details", title, tag("p", ", ".join(found.others), class_="keys"), class_="aside")


def _columns(found: Findings) -> Iterator[Column]:
    """Yield each column that any run has a value for."""
    for key, title, hint, value, text in _known(found):
        values = {run.number: value(run, found.measured[run.number]) for run in found.sweep.runs}
        if any(one is not None for one in values.values()):
            yield Column(key, title, hint, values, text)


def _known(found: Findings) -> Iterator[tuple[str, str, str, Value, Text]]:
    for key in found.metrics:
        # One column for metrics that settings are not compared by: the lowest loss of a single
        # training step says little, and so does the last of an accuracy that rose and fell.
        both = key == found.metric
        if both or higher_is_better(key):
            best = partial(lambda key, _, of: of.best.get(key), key)
            yield f"best {key}", f"{key} best", f"best {key} of the run", best, rounded
        if both or not higher_is_better(key):
            final = partial(lambda key, _, of: of.final.get(key), key)
            yield f"final {key}", f"{key} final", f"last {key} of the run", final, rounded
    changed = "share of steps that clipping changed"
    yield keys.CLIP_RATIO_TOTAL, "clip ratio", changed, lambda _, of: of.ratio, percent
    if any(group.info.parts for group in found.groups):
        share = "mean share clipped of what the mode clips: the steps, the elements or the units"
        yield keys.CLIP_FRACTION, "clip fraction", share, lambda _, of: of.fraction, percent
    for name in PERCENTILES:
        hint = f"{name} of the gradient norm before clipping"
        norm = partial(lambda name, _, of: of.norm.get(name), name)
        yield f"{keys.GRAD_NORM} {name}", f"‖G‖ {name}", hint, norm, rounded
    coef = "mean of ‖G‖ after clipping ÷ before"
    yield keys.CLIP_COEF, "coefficient", coef, lambda _, of: of.coef, rounded
    skipped = "steps whose gradient was not finite"
    yield keys.GRAD_NONFINITE, "skipped", skipped, lambda _, of: of.skipped, rounded
    spikes = "steps skipped as spikes (clip.skip)"
    yield keys.CLIP_SKIPPED, "spikes", spikes, lambda _, of: of.spikes, rounded
    lost = "step from which the loss was not finite, or over twice its start, to the end"
    yield _DIVERGED, "diverged at", lost, lambda _, of: of.diverged_at, rounded
    plain = partial(_plain, 0)
    yield "steps", "steps", "optimizer steps taken", lambda run, _: run.steps or None, plain
    yield "seconds", "seconds", "wall time", lambda run, _: run.seconds, partial(_plain, 1)


def _headings(found: Findings, columns: Sequence[Column]) -> Markup:
    def heading(key: str, title: str, hint: str, class_: str | None = None) -> Markup:
        button = tag("button", title, type="button", title=f"{hint}; press to sort")
        return tag("th", button, scope="col", data_key=key, class_=class_, aria_sort="none")

    other = found.compared_with if found.comparisons else None
    texts = zip(("difference", "p"), headings(found, other), strict=True) if other else ()
    return tag(
        "tr",
        heading("run", "run", "number in the sweep"),
        *(heading(key, key, f"configuration key {key}") for key in found.columns),
        heading("state", "state", "how the run ended"),
        *(heading(key, *text, "figure") for key, text in texts),
        *(heading(column.key, column.title, column.hint, "figure") for column in columns),
    )


def _body(found: Findings, group: Group, columns: Sequence[Column], best: bool) -> Markup:
    alone = len(group.runs) == 1
    rows = [_row(found, group, run, columns, best and alone) for run in group.runs]
    if not alone:
        rows.insert(0, _mean_row(found, group, columns, best))
    return tag("tbody", *rows, id=f"setting-{group.index}", data_group=group.index)


def _row(found: Findings, group: Group, run: Run, columns: Sequence[Column], best: bool) -> Markup:
    number: Child = run.number
    if run.folder is not None and not found.sweep.single:
        title = "show this run alone; again: all runs"
        number = tag("a", run.number, href=f"#run-{run.number}", title=title)
    error = run.error[:500] if run.error else None
    mark = tag("span", _STATES.get(run.state, "?"), aria_hidden="true")
    values = [(column, column.values[run.number]) for column in columns]
    button = None if len(group.runs) > 1 else _button(found, group)
    return tag(
        "tr",
        _name_cell(group, number, best, run.number, button),
        *(_key_cell(choice(run, key)) for key in found.columns),
        tag("td", mark, " ", run.state, class_="state", data_value=run.state, title=error),
        *_difference(found, group, run),
        *(_cell(value, column.text(value)) for column, value in values),
        class_="best" if best else None,
        data_run=run.number,
        data_state=run.state,
    )


def _mean_row(found: Findings, group: Group, columns: Sequence[Column], best: bool) -> Markup:
    judged = found.judged(group)
    cells = []
    for column in columns:
        values = [v for run in judged if (v := column.values[run.number]) is not None]
        if not values or column.key == _DIVERGED:
            cells.append(_cell(None, column.text(None)))
            continue
        compared = column.key == f"best {found.metric}"  # by seed, and lost where a run is lost
        mean, spread = found.mean(group) if compared else mean_and_spread(values)
        text = column.text(mean)
        if spread:
            text += f" ± {percent(spread) if column.text is percent else rounded(spread, 2)}"
        cells.append(_cell(mean, text))
    ran, counted = ({run.seed for run in runs} for runs in (group.runs, judged))
    name = f"{'' if ran == counted else f'{len(counted)} of '}{plural(len(ran), 'seed')}"
    chosen = ("–" if key == "seed" else choice(group.runs[0], key) for key in found.columns)
    return tag(
        "tr",
        _name_cell(group, name, best, group.runs[0].number, _button(found, group)),
        *map(_key_cell, chosen),
        tag("td", "mean ± sd", data_value=""),
        *_difference(found, group, None),
        *cells,
        class_="mean best" if best else "mean",
    )


def _name_cell(group: Group, name: Child, best: bool, value: str, button: Markup | None) -> Markup:
    color = f"background:var(--g{group.index})"
    swatch = tag("span", class_="swatch", style=color, aria_hidden="true")
    star = tag("span", " ★", title="best setting", class_="star") if best else None
    return tag("th", swatch, name, star, button, scope="row", data_value=value)


def _button(found: Findings, group: Group) -> Markup | None:
    """Return what makes a setting the baseline."""
    if not can_choose(found) or group not in found.ranked:
        return None
    return tag(
        "button",
        "Δ",
        type="button",
        class_="baseline",
        title="compare the other settings with this one; again: with the best",
        aria_label=f"Compare with {group.label}",
        aria_pressed="true" if group is found.baseline else "false",
    )


def _key_cell(text: str) -> Markup:
    size, _ = natural(text)
    class_ = "long" if len(text) > _LONG else None
    return tag("td", text, class_=class_, data_value=text if math.isinf(size) else repr(size))


def _cell(value: float | None, text: str, hint: str | None = None) -> Markup:
    lost = value is not None and not math.isfinite(value)
    written = "" if value is None else repr(value)
    return tag(
        "td", text, title=hint, class_="figure lost" if lost else "figure", data_value=written
    )


def _plain(digits: int, value: float | None) -> str:
    return rounded(None) if value is None else f"{value:,.{digits}f}"


def _difference(found: Findings, group: Group, run: Run | None) -> list[Markup]:
    """Return the cells of a row that compare it with another setting."""
    other = found.compared_with if found.comparisons else None
    return [_cell(*one) for one in _compared(found, group, run, other)] if other else []


def can_choose(found: Findings) -> bool:
    """Return whether settings have buttons."""
    return bool(found.comparisons) and len(found.groups) <= MOST_BASELINES


def headings(found: Findings, other: Group) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return heading and meaning of both columns, which compare with ``other``."""
    which = "best setting" if other is found.best and not found.baseline else "baseline"
    hint = f"best {found.metric} minus that of the {which}, {other.label}, seed by seed where both "
    p = "p of the t test, corrected by Holm's method for the number of settings"
    return (f"Δ to {other.label}", f"{hint}have them, with its interval"), ("p", p)


def _compared(found: Findings, group: Group, run: Run | None, other: Group) -> list[Cell]:
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
                for value, *texts in _compared(found, group, run, other)
            ]
            for group in found.groups
            for run in (None, *group.runs)
        }

    chosen = found.ranked if can_choose(found) else []
    return {one.index: {"heading": headings(found, one)[0], "rows": rows(one)} for one in chosen}
