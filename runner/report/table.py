"""The table: one row a run, the runs of one setting together under their mean.

It is complete without scripts; with them, each heading sorts. A cell carries its value at full
precision (``data-value``), and its heading carries the key of the metric (``data-key``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from runner.config.objective import higher_is_better
from runner.report.compared import can_choose, headings, row_cells
from runner.report.findings import Findings
from runner.report.groups import Group, choice, mean_and_spread, natural
from runner.report.markup import Child, Markup, join, tag
from runner.report.notation import percent, plural, rounded
from runner.report.run import Run
from runner.report.run_metrics import PERCENTILES, RunMetrics
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
_DIVERGED = "diverged_at"

Value = Callable[[Run, RunMetrics], float | None]
Text = Callable[[float | None], str]


@dataclass(frozen=True)
class Column:
    """One column of metrics: its key for ``data-key``, heading, meaning, and how it is
    formatted.
    """

    key: str
    title: str
    hint: str
    values: Mapping[str, float | None]
    text: Text


def table(found: Findings) -> Markup:
    """Return the table of all runs, with each column that any run has a value for."""
    columns = list(_columns(found))
    best = found.best if len(found.groups) > 1 else None
    bodies = [_body(found, group, columns, group is best) for group in found.groups]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", tag("span", _caption(found)), class_="aside"),
            tag("thead", _headings(found, columns)),
            *bodies,
            id="runs",
        ),
        class_="wide",
        tabindex=0,
        role="region",
        aria_label="Table of runs",
    )


def _caption(found: Findings) -> str:
    caption = "One row a run. A heading sorts."
    if can_choose(found):
        return f"{caption} Δ in a row compares the other settings with it."
    if found.comparisons:
        return f"{caption} report.baseline=NAME compares all settings with that one."
    return caption


def omitted(found: Findings) -> Markup | None:
    """Return the names of the keys that differ and have no column."""
    others = found.differences.others
    if not others:
        return None
    return tag(
        "details",
        tag("summary", f"{len(others)} more keys differ"),
        tag("p", ", ".join(others), class_="keys"),
        class_="aside",
    )


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
    yield (
        "steps",
        "steps",
        "optimizer steps taken",
        lambda run, _: run.steps or None,
        partial(_plain, 0),
    )
    yield "seconds", "seconds", "wall time", lambda run, _: run.seconds, partial(_plain, 1)


def _headings(found: Findings, columns: Sequence[Column]) -> Markup:
    def heading(key: str, title: str, hint: str, class_: str | None = None) -> Markup:
        return tag(
            "th",
            tag("button", title, type="button", title=f"{hint}; press to sort"),
            scope="col",
            data_key=key,
            class_=class_,
            aria_sort="none",
        )

    other = found.compared_with if found.comparisons else None
    texts = zip(("difference", "p"), headings(found, other), strict=True) if other else ()
    return tag(
        "tr",
        heading("run", "run", "number in the sweep"),
        *(heading(key, key, f"configuration key {key}") for key in found.differences.columns),
        heading("state", "state", "how the run ended"),
        *(heading(key, *text, "figure") for key, text in texts),
        *(heading(column.key, column.title, column.hint, "figure") for column in columns),
    )


def _difference(found: Findings, group: Group, run: Run | None) -> list[Markup]:
    """Return the cells of a row that compare it with another setting."""
    other = found.compared_with if found.comparisons else None
    return [_cell(*one) for one in row_cells(found, group, run, other)] if other else []


def _body(found: Findings, group: Group, columns: Sequence[Column], best: bool) -> Markup:
    alone = len(group.runs) == 1
    rows = [_row(found, group, run, columns, best and alone) for run in group.runs]
    if not alone:
        rows.insert(0, _mean_row(found, group, columns, best))
    return tag("tbody", *rows, id=f"setting-{group.index}", data_group=group.index)


def _row(found: Findings, group: Group, run: Run, columns: Sequence[Column], best: bool) -> Markup:
    number: Child = run.number
    seeds = len(group.runs) > 1
    if run.folder is not None and not found.sweep.single:
        title = "show this run alone; again: all runs"
        number = tag("a", run.number, href=f"#run-{run.number}", title=title)
    values = [column.values[run.number] for column in columns]
    return tag(
        "tr",
        _name_cell(group, number, best, run.number, None if seeds else _button(found, group)),
        *(_key_cell(choice(run, key)) for key in found.differences.columns),
        _state_cell(run),
        *_difference(found, group, run),
        *(_cell(value, column.text(value)) for column, value in zip(columns, values, strict=True)),
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
    whole = len(judged) == len(group.runs)
    ran, counted = ({run.seed for run in runs} for runs in (group.runs, judged))
    name = f"{'' if whole else f'{len(counted)} of '}{plural(len(ran), 'seed')}"
    settings = found.differences.columns
    return tag(
        "tr",
        _name_cell(group, name, best, group.runs[0].number, _button(found, group)),
        *(_key_cell("–" if key == "seed" else choice(group.runs[0], key)) for key in settings),
        tag("td", "mean ± sd", data_value=""),
        *_difference(found, group, None),
        *cells,
        class_="mean best" if best else "mean",
    )


def _name_cell(
    group: Group, name: Child, best: bool, value: str | int, button: Markup | None
) -> Markup:
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


def _state_cell(run: Run) -> Markup:
    mark = tag("span", _STATES.get(run.state, "?"), aria_hidden="true")
    return tag(
        "td",
        join([mark, " ", run.state]),
        class_="state",
        data_value=run.state,
        title=run.error[:500] if run.error else None,
    )


def _cell(value: float | None, text: str, hint: str | None = None) -> Markup:
    lost = value is not None and not math.isfinite(value)
    return tag(
        "td",
        text,
        title=hint,
        class_="figure lost" if lost else "figure",
        data_value="" if value is None else repr(value),
    )


def _plain(digits: int, value: float | None) -> str:
    return rounded(None) if value is None else f"{value:,.{digits}f}"
