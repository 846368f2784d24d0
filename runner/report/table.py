"""The table: one row a run, the runs of one setting together under their mean.

It is complete without scripts; with them, each heading sorts. A cell carries its value at full
precision (``data-value``), and its heading carries the key of the metric (``data-key``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from runner.config.objective import higher_is_better
from runner.report.findings import Findings
from runner.report.groups import Group, choice, mean_and_spread, natural
from runner.report.markup import Child, Markup, join, tag
from runner.report.notation import percent, plural, rounded
from runner.report.run import Run
from runner.report.run_metrics import PERCENTILES, RunMetrics
from runner.run_folder import files, keys

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


@dataclass(frozen=True)
class Column:
    """One column of metrics.

    Attributes:
        key: key of the metric, for ``data-key``.
        title: heading.
        hint: meaning of the metric, in a sentence.
        value: returns the metric of a run; None if it has none.
        text: formats a value.
    """

    key: str
    title: str
    hint: str
    value: Callable[[Run, RunMetrics], float | None]
    text: Callable[[float | None], str] = rounded


def table(found: Findings) -> Markup:
    """Return the table of all runs, with each column that any run has a value for."""
    columns = [
        column
        for column in _columns(found)
        if any(_value(found, column, run) is not None for run in found.sweep.runs)
    ]
    best = found.best if len(found.groups) > 1 else None
    bodies = [_body(found, group, columns, group is best) for group in found.groups]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", "One row a run. A heading sorts.", class_="aside"),
            tag("thead", _headings(found.differences.columns, columns)),
            *bodies,
            id="runs",
        ),
        class_="wide",
        tabindex=0,
        role="region",
        aria_label="Table of runs",
    )


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
    for key in found.metrics:
        best = Column(
            f"best {key}",
            f"{key} best",
            f"best {key} of the run",
            lambda _, of, key=key: of.best.get(key),  # type: ignore[misc]
        )
        final = Column(
            f"final {key}",
            f"{key} final",
            f"last {key} of the run",
            lambda _, of, key=key: of.final.get(key),  # type: ignore[misc]
        )
        # One column for metrics that settings are not compared by: the lowest loss of a single
        # training step says little, and so does the last of an accuracy that rose and fell.
        if key == found.metric:
            yield from (best, final)
        else:
            yield best if higher_is_better(key) else final
    changed = "share of steps that clipping changed"
    yield Column(keys.CLIP_RATIO_TOTAL, "clip ratio", changed, lambda _, of: of.ratio, percent)
    if any(group.info.parts for group in found.groups):
        share = "mean share clipped of what the mode clips: the steps, the elements or the units"
        yield Column(keys.CLIP_FRACTION, "clip fraction", share, lambda _, of: of.fraction, percent)
    for name in PERCENTILES:
        yield Column(
            f"{keys.GRAD_NORM} {name}",
            f"‖G‖ {name}",
            f"{name} of the gradient norm before clipping",
            lambda _, of, name=name: of.norm.get(name),  # type: ignore[misc]
        )
    coef = "mean of ‖G‖ after clipping ÷ before"
    yield Column(keys.CLIP_COEF, "coefficient", coef, lambda _, of: of.coef)
    skipped = "steps whose gradient was not finite"
    yield Column(keys.GRAD_NONFINITE, "skipped", skipped, lambda _, of: of.skipped)
    lost = "step from which the loss was not finite, or over twice its start, to the end"
    yield Column(_DIVERGED, "diverged at", lost, lambda _, of: of.diverged_at)
    taken = "optimizer steps taken"
    yield Column("steps", "steps", taken, lambda run, _: run.steps or None, _thousands)
    yield Column("seconds", "seconds", "wall time", lambda run, _: run.seconds, _tenths)


def _value(found: Findings, column: Column, run: Run) -> float | None:
    return column.value(run, found.measured[run.number])


def _headings(settings: Sequence[str], columns: Sequence[Column]) -> Markup:
    def heading(key: str, title: str, hint: str, class_: str = "key") -> Markup:
        return tag(
            "th",
            tag("button", title, type="button", title=f"{hint}; press to sort"),
            scope="col",
            data_key=key,
            class_=class_,
            aria_sort="none",
        )

    return tag(
        "tr",
        heading("run", "run", "number in the sweep"),
        *(heading(key, key, f"configuration key {key}") for key in settings),
        heading("state", "state", "how the run ended"),
        *(heading(column.key, column.title, column.hint, "figure") for column in columns),
    )


def _body(found: Findings, group: Group, columns: Sequence[Column], best: bool) -> Markup:
    alone = len(group.runs) == 1
    rows = [_row(found, group, run, columns, best and alone) for run in group.runs]
    if not alone:
        rows.insert(0, _mean_row(found, group, columns, best))
    return tag("tbody", *rows, data_group=group.index)


def _row(found: Findings, group: Group, run: Run, columns: Sequence[Column], best: bool) -> Markup:
    number: Child = run.number
    if run.folder is not None and not found.sweep.single:
        own = files.PAGE if (run.folder / files.PAGE).exists() else ""
        number = tag("a", run.number, href=f"{quote(run.folder.name)}/{own}")
    values = [_value(found, column, run) for column in columns]
    return tag(
        "tr",
        _name_cell(group, number, best, run.number),
        *(_key_cell(choice(run, key)) for key in found.differences.columns),
        _state_cell(run),
        *(_cell(value, column.text(value)) for column, value in zip(columns, values, strict=True)),
        class_="best" if best else None,
        data_run=run.number,
        data_state=run.state,
    )


def _mean_row(found: Findings, group: Group, columns: Sequence[Column], best: bool) -> Markup:
    judged = found.judged(group)
    cells = []
    for column in columns:
        values = [v for run in judged if (v := _value(found, column, run)) is not None]
        if not values or column.key == _DIVERGED:
            cells.append(_cell(None, column.text(None)))
            continue
        mean, spread = mean_and_spread(values)
        text = column.text(mean)
        if spread:
            text += f" ± {percent(spread) if column.text is percent else rounded(spread, 2)}"
        cells.append(_cell(mean, text))
    whole = len(judged) == len(group.runs)
    name = f"{'' if whole else f'{len(judged)} of '}{plural(len(group.runs), 'seed')}"
    settings = found.differences.columns
    return tag(
        "tr",
        _name_cell(group, name, best, group.index),
        *(_key_cell("–" if key == "seed" else choice(group.runs[0], key)) for key in settings),
        tag("td", "mean ± sd", class_="key", data_value=""),
        *cells,
        class_="mean best" if best else "mean",
    )


def _name_cell(group: Group, name: Child, best: bool, value: str | int) -> Markup:
    color = f"background:{group.color}"
    swatch = tag("span", class_="swatch", style=color, aria_hidden="true")
    star = tag("span", " ★", title="best setting", class_="star") if best else None
    return tag("th", swatch, name, star, scope="row", data_value=value)


def _key_cell(text: str) -> Markup:
    size, _ = natural(text)
    class_ = "key long" if len(text) > _LONG else "key"
    return tag("td", text, class_=class_, data_value=text if math.isinf(size) else repr(size))


def _state_cell(run: Run) -> Markup:
    mark = tag("span", _STATES.get(run.state, "?"), aria_hidden="true")
    return tag(
        "td",
        join([mark, " ", run.state]),
        class_="key state",
        data_value=run.state,
        title=run.error[:500] if run.error else None,
    )


def _cell(value: float | None, text: str) -> Markup:
    lost = value is not None and not math.isfinite(value)
    return tag(
        "td",
        text,
        class_="figure lost" if lost else "figure",
        data_value="" if value is None else repr(value),
    )


def _thousands(value: float | None) -> str:
    return rounded(None) if value is None else f"{value:,.0f}"


def _tenths(value: float | None) -> str:
    return rounded(None) if value is None else f"{value:,.1f}"
