"""The table of the page, one row a run under the mean of its setting; and its exports."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from runner.config.notation import higher_is_better
from runner.report.findings import (
    DIVERGED,
    PERCENTILES,
    Findings,
    Group,
    choice,
    find,
    mean_and_spread,
)
from runner.report.look import percent, plural, rounded, signed
from runner.report.run import Run, natural, read
from runner.report.statistics import Difference
from runner.report.verdict import verdict
from runner.run_folder import files, keys
from runner.run_folder.strict_json import encode

_LONG = 32  # texts above it may be broken over lines


class Column(NamedTuple):
    key: str
    title: str
    hint: str
    text: Callable[[float], str] | None = None


class Cell(NamedTuple):
    text: str
    value: str = ""  # by which it is sorted
    style: str = ""
    hint: str = ""


Item = TypeVar("Item")  # a heading or a cell


class Row(NamedTuple):
    name: str
    run: Run | None  # None: the mean of a setting
    cells: list[Cell]


def columns_of(findings: Findings) -> list[Column]:
    """Return each column of metrics that any run has a value for."""
    columns: list[Column] = []
    for key in findings.metrics:
        # One column for other metrics: the lowest loss of a single training step says little.
        shown = ("best",) if higher_is_better(key) else ("final",)
        for which in ("best", "final") if key == findings.metric else shown:
            hint = f"{which} {key} of the run"
            columns.append(Column(f"{which}/{key}", f"{key} {which}", hint, rounded))
    clips = "share of steps that clipping changed"
    part = "mean share clipped of what the mode clips: the elements or the units"
    columns.append(Column(keys.CLIP_RATIO_TOTAL, "clip ratio", clips, percent))
    columns.append(Column(keys.CLIP_FRACTION, "clip fraction", part, percent))
    for name in PERCENTILES:
        hint = f"{name} of the gradient norm before clipping"
        columns.append(Column(f"{keys.GRAD_NORM}/{name}", f"‖G‖ {name}", hint, rounded))
    lost = "step from which the loss was not finite, or over twice its start, to the end"
    columns += [
        Column(keys.CLIP_COEF, "coefficient", "mean of ‖G‖ after clipping ÷ before", rounded),
        Column(keys.GRAD_NONFINITE, "skipped", "steps whose gradient was not finite", rounded),
        Column(keys.CLIP_SKIPPED, "spikes", "steps skipped as spikes (clip.skip)", rounded),
        Column(DIVERGED, "diverged at", lost, "{:,.0f}".format),
        Column("steps", "steps", "optimizer steps taken", "{:,.0f}".format),
        Column("seconds", "seconds", "wall time", "{:,.1f}".format),
    ]
    measured = findings.measured.values()
    return [column for column in columns if any(m.get(column.key) is not None for m in measured)]


def headings(findings: Findings) -> list[Column]:
    """Return the headings of all columns; the columns of metrics have a format."""
    compared = []
    reference = findings.compared_with
    if findings.comparisons and reference:
        which = "baseline" if findings.baseline else "best setting"
        score = f"best {findings.metric}"
        hint = f"{score} minus the {score} of the {which}, {reference.label}, seed by seed"
        test = "p of the paired t test, corrected by Holm's method for the number of settings"
        compared.append(Column("difference", f"Δ to {reference.label}", hint, signed))
        compared.append(Column("p", "p", test, rounded))
    number = Column("run", "run", "number in the sweep")
    configured = [Column(key, key, f"configuration key {key}") for key in findings.columns]
    state = Column("state", "state", "how the run ended")
    return [number, *_in_order(configured, columns_of(findings), compared, state)]


def _in_order(
    configured: list[Item], metrics: list[Item], compared: list[Item], state: Item
) -> list[Item]:
    """Return the headings or cells of a row: a setting is compared by its first metric."""
    first_metric = metrics[:1]
    further_metrics = metrics[1:]
    return [*configured, *first_metric, *compared, state, *further_metrics]


def rows_of(findings: Findings, group: Group) -> list[Row]:
    """Return the rows of a setting: the mean, if it has several runs, and each run."""
    has_mean_row = len(group.runs) > 1
    columns = columns_of(findings)
    rows = [mean_row(findings, group)] if has_mean_row else []
    for run in group.runs:
        text = "–" if run.state == "unknown" else run.state  # of somebody's own loop
        measured = findings.measured[run.number]
        cells = _in_order(
            configured=[_key(choice(run, key)) for key in findings.columns],
            metrics=[_cell(measured.get(column.key), column.text) for column in columns],
            compared=_compared(findings, group, run if has_mean_row else None),
            state=Cell(text, value=run.state, style="state", hint=(run.error or "")[:500]),
        )
        rows.append(Row(run.number, run, cells))
    return rows


def mean_row(findings: Findings, group: Group) -> Row:
    ran = {run.seed for run in group.runs}
    counted = {run.seed for run in findings.judged(group)}
    name = f"{'' if ran == counted else f'{len(counted)} of '}{plural(len(ran), 'seed')}"
    chosen = ["–" if key == "seed" else choice(group.runs[0], key) for key in findings.columns]
    cells = _in_order(
        configured=[_key(text) for text in chosen],
        metrics=[_mean(findings, group, column) for column in columns_of(findings)],
        compared=_compared(findings, group, None),
        state=Cell("mean ± sd"),
    )
    return Row(name, None, cells)


def _mean(findings: Findings, group: Group, column: Column) -> Cell:
    recorded = (findings.measured[run.number].get(column.key) for run in findings.judged(group))
    values = [value for value in recorded if value is not None]
    if not values or column.key == DIVERGED:
        return _cell(None, column.text)
    compared = column.key == f"best/{findings.metric}"  # by seed, and lost where a run is lost
    mean, spread = findings.mean(group) if compared else mean_and_spread(values)
    cell = _cell(mean, column.text)
    sd = percent(spread) if column.text is percent else rounded(spread, 2)
    return cell._replace(text=f"{cell.text} ± {sd}") if spread else cell


def _compared(findings: Findings, group: Group, run: Run | None) -> list[Cell]:
    """Return the cells of the difference to the reference, and of p, if settings are compared."""
    reference = findings.compared_with
    if not findings.comparisons or reference is None:
        return []
    difference = findings.comparisons.get(group.index)
    if run is not None:
        score = findings.seeds(group).get(run.seed)
        reference_score = findings.seeds(reference).get(run.seed)
        if (
            difference is None
            or score is None
            or reference_score is None
            or not findings.counts(run)
        ):
            return [_cell(None, signed), Cell("")]
        return [_cell(score - reference_score, signed), Cell("")]
    if difference is None:
        return [Cell("–", style="figure"), Cell("–", style="figure")]
    value = Cell(with_interval(difference), value=repr(difference.value), style="figure")
    if difference.low is None:
        return [value, Cell("–", style="figure")]
    hint = f"{plural(difference.seeds, 'seed')}; p {rounded(difference.p, 2)} before correction; "
    hint += f"they show a true difference of {rounded(difference.visible, 2)} four times in five"
    p = _cell(difference.corrected, lambda value: rounded(value, digits=2))
    return [value._replace(hint=hint), p]


def with_interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return signed(difference.value)
    return f"{signed(difference.value)} [{signed(difference.low)}, {signed(difference.high)}]"


def _key(text: str) -> Cell:
    size, _ = natural(text)
    return Cell(
        text,
        value=text if math.isinf(size) else repr(size),
        style="long" if len(text) > _LONG else "",
    )


def _cell(value: float | None, text: Callable[[float], str] | None) -> Cell:
    lost = value is not None and not math.isfinite(value)
    shown = "–" if value is None or text is None else text(value)
    return Cell(
        shown,
        value="" if value is None else repr(value),
        style="figure lost" if lost else "figure",
    )


_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"}
    | {"[": "{[}", "−": "$-$", "±": r"$\pm$", "–": "--", "∞": r"$\infty$", "Δ": r"$\Delta$"}
    | {"…": r"\ldots{}", "λ": r"$\lambda$", "‖": r"$\Vert$", "\n": " ", "\u00a0": "~"}
)


def records(findings: Findings) -> list[dict[str, Any]]:
    """Return one row a run, in the order of the settings; None where a run recorded nothing."""
    return [
        {"run": run.number, "setting": group.label, "state": run.state}
        | {key: run.config.get(key, choice(run, key)) for key in findings.columns}
        | findings.measured[run.number]
        for group in findings.groups
        for run in group.runs
    ]


def frame(folder: Path | str) -> Any:
    """Return a folder's `records` as a ``pandas.DataFrame`` by ``run``; as dicts without pandas."""
    rows = records(find(read(Path(folder))))
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows).set_index("run") if rows else pandas.DataFrame()


def as_csv(findings: Findings) -> str:
    """Return `records` as CSV with a line of names."""
    rows = records(findings)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_inert, rows[0] if rows else ["run"]))
    writer.writerows(map(_inert, row.values()) for row in rows)
    return text.getvalue()


def _inert(value: Any) -> Any:
    """Return a cell that a spreadsheet does not compute: text as text, numbers as they are."""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula and natural(value)[1] else value


def as_json(findings: Findings) -> str:
    """Return `records`, settings with their differences, and the verdict as a JSON object."""
    reference = findings.compared_with
    winner = findings.winner
    whole = {
        "name": findings.sweep.name,
        "verdict": verdict(findings),
        "metric": findings.metric,
        "higher_is_better": findings.higher_is_better,
        "compared_with": reference.label if reference else None,
        "winner": winner.label if winner else None,
        "settings": [_setting(findings, group) for group in findings.groups],
        "runs": records(findings),
    }
    return encode(whole, indent=2) + "\n"


def _setting(findings: Findings, group: Group) -> dict[str, Any]:
    mean, spread = findings.mean(group)
    difference = findings.comparisons.get(group.index)
    return {
        "setting": group.label,
        "runs": [run.number for run in group.runs],
        "seeds": len(findings.seeds(group)),
        "mean": mean if findings.seeds(group) else None,
        "sd": spread,
        "difference": asdict(difference) if difference else None,
    }


def as_latex(findings: Findings) -> str:
    columns = [key for key in findings.columns if key != "seed"]
    titles = {column.key: column.title for column in headings(findings)[1:]}
    results = [key for key in (f"best/{findings.metric}", "difference", "p") if key in titles]
    printed = [*columns, *results]
    rows = [[*(titles[key] for key in printed), "seeds"]]
    for group in findings.groups:
        cells = dict(zip(titles, mean_row(findings, group).cells, strict=True))
        rows.append([*(cells[key].text for key in printed), str(len(findings.seeds(group)))])
    head, *body = (" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in rows)
    alignment = "l" * len(columns) + "r" * (len(rows[0]) - len(columns))
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


# Name of the file and function of each format.
FORMATS: dict[str, tuple[str, Callable[[Findings], str]]] = {
    "csv": (files.TABLE_CSV, as_csv),
    "latex": (files.TABLE_LATEX, as_latex),
    "json": (files.TABLE_JSON, as_json),
}
