"""The table: one row a run, the runs of one setting together under their mean.

It is complete without scripts; with them, each heading sorts. A cell carries its value at full
precision (``data-value``), and its column carries the metric's key (``data-key``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from runner.config.objective import higher_is_better
from runner.report.figures import PERCENTILES
from runner.report.findings import Findings
from runner.report.groups import Group, choice, mean_and_spread, natural
from runner.report.markup import Markup, join, tag
from runner.report.notation import figure, percent, plural
from runner.report.run import Run
from runner.run_folder import files, keys

# A text longer than this may be broken over lines.
_LONG = 32
_STATES = {
    "finished": "✓",
    "failed": "✕",
    "killed": "✕",
    "interrupted": "‖",
    "running": "…",
    "not started": "○",
}


@dataclass(frozen=True)
class Column:
    """One measured column.

    Attributes:
        key: what it is called in the record, in ``data-key``.
        title: its heading.
        hint: what it means, in a sentence.
        value: of a run; None where it has none.
        text: how a value reads.
    """

    key: str
    title: str
    hint: str
    value: Callable[[Run], float | None]
    text: Callable[[float | None], str] = figure


def table(found: Findings) -> Markup:
    """The table of all runs; every column that any run has a value for."""
    settings = found.differences.columns
    columns = [
        column
        for column in _columns(found)
        if any(column.value(run) is not None for run in found.sweep.runs)
    ]
    best = next(iter(found.ranked()), None) if len(found.groups) > 1 else None
    bodies = [_body(found, group, settings, columns, group is best) for group in found.groups]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", "One row a run. A heading sorts.", class_="aside"),
            tag("thead", _headings(settings, columns)),
            *bodies,
            id="runs",
        ),
        class_="wide",
        tabindex=0,
        role="region",
        aria_label="Table of runs",
    )


def omitted(found: Findings) -> Markup | None:
    """The keys that differ and have no column, by name."""
    others = found.differences.others
    if not others:
        return None
    return tag(
        "details",
        tag("summary", f"{len(others)} more keys differ"),
        tag("p", ", ".join(others), class_="keys"),
        class_="aside",
    )


def _columns(found: Findings) -> list[Column]:
    of = found.figures
    measured: list[Column] = []
    for key in found.metrics:
        best = Column(
            f"best {key}",
            f"{key} best",
            f"best {key} of the run",
            lambda run, key=key: of[run.number].best.get(key),  # type: ignore[misc]
        )
        final = Column(
            f"final {key}",
            f"{key} final",
            f"last {key} of the run",
            lambda run, key=key: of[run.number].final.get(key),  # type: ignore[misc]
        )
        # Of what settings are not judged by, one column: the lowest loss of a single training step
        # says little, and so does the last of an accuracy that rose and fell.
        measured += (
            [best, final] if key == found.metric else [best if higher_is_better(key) else final]
        )
    measured.append(
        Column(
            keys.CLIP_RATIO_TOTAL,
            "clip ratio",
            "share of steps that clipping changed",
            lambda run: of[run.number].ratio,
            percent,
        )
    )
    if any(group.mode not in ("norm", "none") for group in found.groups):
        measured.append(
            Column(
                keys.CLIP_FRACTION,
                "clip fraction",
                "mean share clipped of what the mode clips: the steps, the elements or the units",
                lambda run: of[run.number].fraction,
                percent,
            )
        )
    measured += [
        Column(
            f"{keys.GRAD_NORM} {name}",
            f"‖G‖ {name}",
            f"{name} of the gradient norm before clipping",
            lambda run, name=name: of[run.number].norm.get(name),  # type: ignore[misc]
        )
        for name in PERCENTILES
    ]
    return [
        *measured,
        Column(
            keys.CLIP_COEF,
            "coefficient",
            "mean of ‖G‖ after clipping ÷ before",
            lambda run: of[run.number].coef,
        ),
        Column(
            keys.GRAD_NONFINITE,
            "skipped",
            "steps whose gradient was not finite",
            lambda run: of[run.number].skipped,
        ),
        Column(
            "diverged_at",
            "diverged at",
            "step from which the loss was not finite, or over twice its start, to the end",
            lambda run: of[run.number].diverged_at,
        ),
        Column("steps", "steps", "optimizer steps taken", lambda run: run.steps or None, _whole),
        Column("seconds", "seconds", "wall time", lambda run: run.seconds, _seconds),
    ]


def _headings(settings: tuple[str, ...], columns: list[Column]) -> Markup:
    def heading(key: str, title: str, hint: str, class_: str) -> Markup:
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
        heading("run", "run", "number in the sweep", "key"),
        *(heading(key, key, f"configuration key {key}", "key") for key in settings),
        heading("state", "state", "how the run ended", "key"),
        *(heading(column.key, column.title, column.hint, "figure") for column in columns),
    )


def _body(
    found: Findings, group: Group, settings: tuple[str, ...], columns: list[Column], best: bool
) -> Markup:
    rows = [
        _row(found, group, run, settings, columns, best and len(group.runs) == 1)
        for run in group.runs
    ]
    if len(group.runs) > 1:
        rows.insert(0, _mean_row(found, group, settings, columns, best))
    return tag("tbody", *rows, data_group=group.index)


def _row(
    found: Findings,
    group: Group,
    run: Run,
    settings: tuple[str, ...],
    columns: list[Column],
    best: bool,
) -> Markup:
    number: Markup | str = run.number
    if run.folder is not None and not found.sweep.single:
        own = files.PAGE if (run.folder / files.PAGE).exists() else ""
        number = tag("a", run.number, href=f"{quote(run.folder.name)}/{own}")
    return tag(
        "tr",
        tag("th", _swatch(group), number, _star(best), scope="row", data_value=run.number),
        *(_key_cell(choice(run, key)) for key in settings),
        _state_cell(run),
        *(_cell(column.value(run), column.text) for column in columns),
        class_="best" if best else None,
        data_run=run.number,
        data_state=run.state,
    )


def _mean_row(
    found: Findings, group: Group, settings: tuple[str, ...], columns: list[Column], best: bool
) -> Markup:
    cells = []
    judged = found.judged(group)
    for column in columns:
        values = [v for run in judged for v in [column.value(run)] if v is not None]
        if not values or column.key == "diverged_at":
            cells.append(_cell(None, column.text))
            continue
        mean, spread = mean_and_spread(values)
        text = column.text(mean)
        if spread:
            text += f" ± {percent(spread) if column.text is percent else figure(spread, 2)}"
        cells.append(_cell(mean, lambda _, text=text: text))  # type: ignore[misc]
    whole = len(judged) == len(group.runs)
    name = f"{'' if whole else f'{len(judged)} of '}{plural(len(group.runs), 'seed')}"
    return tag(
        "tr",
        tag("th", _swatch(group), name, _star(best), scope="row", data_value=group.index),
        *(_key_cell("–" if key == "seed" else choice(group.runs[0], key)) for key in settings),
        tag("td", "mean ± sd", class_="key", data_value=""),
        *cells,
        class_="mean best" if best else "mean",
    )


def _key_cell(text: str) -> Markup:
    size, _ = natural(text)
    class_ = "key long" if len(text) > _LONG else "key"
    return tag("td", text, class_=class_, data_value=text if math.isinf(size) else repr(size))


def _state_cell(run: Run) -> Markup:
    mark = tag("span", _STATES.get(run.state, "?"), aria_hidden="true")
    whole = run.error or None
    return tag(
        "td",
        join([mark, " ", run.state]),
        class_="key state",
        data_value=run.state,
        title=whole[:500] if whole else None,
    )


def _cell(value: float | None, text: Callable[[float | None], str]) -> Markup:
    lost = value is not None and not math.isfinite(value)
    return tag(
        "td",
        text(value),
        class_="figure lost" if lost else "figure",
        data_value="" if value is None else repr(value),
    )


def _swatch(group: Group) -> Markup:
    return tag("span", class_="swatch", style=f"background:{group.color}", aria_hidden="true")


def _star(best: bool) -> Markup | None:
    return tag("span", " ★", title="best setting", class_="star") if best else None


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
