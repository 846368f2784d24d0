"""The table of the page, one row a run under the mean of its setting; and its exports."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    name: str
    run: Run | None  # None: the mean of a setting
    cells: list[Cell]


def columns_of(found: Findings) -> list[Column]:
    """Return each column of metrics that any run has a value for."""
    known: list[Column] = []
    for key in found.metrics:
        # One column for other metrics: the lowest loss of a single training step says little.
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
        hint = f"best {found.metric} minus that of the {which}, {other.label}, seed by seed"
        test = "p of the paired t test, corrected by Holm's method for the number of settings"
        compared.append(Column("difference", f"Δ to {other.label}", hint, signed))
        compared.append(Column("p", "p", test, rounded))
    metrics = columns_of(found)
    return [
        Column("run", "run", "number in the sweep"),
        *(Column(key, key, f"configuration key {key}") for key in found.columns),
        *metrics[:1],
        *compared,
        Column("state", "state", "how the run ended"),
        *metrics[1:],
    ]


def rows_of(found: Findings, group: Group) -> list[Row]:
    """Return the rows of a setting: the mean, if it has several runs, and each run."""
    alone = len(group.runs) == 1
    columns, rows = columns_of(found), []
    for run in group.runs:
        text = "–" if run.state == "unknown" else run.state  # of somebody's own loop
        ended = Cell(text, run.state, "state", (run.error or "")[:500])
        values = [_cell(found.measured[run.number].get(one.key), one.text) for one in columns]
        compared = _compared(found, group, None if alone else run)
        of_keys = (_key(choice(run, key)) for key in found.columns)
        rows.append(Row(run.number, run, [*of_keys, *values[:1], *compared, ended, *values[1:]]))
    return rows if alone else [mean_row(found, group), *rows]


def mean_row(found: Findings, group: Group) -> Row:
    chosen = ("–" if key == "seed" else choice(group.runs[0], key) for key in found.columns)
    ended = [*_compared(found, group, None), Cell("mean ± sd")]
    values = [_mean(found, group, column) for column in columns_of(found)]
    ran, counted = ({run.seed for run in runs} for runs in (group.runs, found.judged(group)))
    name = f"{'' if ran == counted else f'{len(counted)} of '}{plural(len(ran), 'seed')}"
    return Row(name, None, [*map(_key, chosen), *values[:1], *ended, *values[1:]])


def _mean(found: Findings, group: Group, column: Column) -> Cell:
    known = (found.measured[run.number].get(column.key) for run in found.judged(group))
    values = [value for value in known if value is not None]
    if not values or column.key == DIVERGED:
        return _cell(None, column.text)
    compared = column.key == f"best/{found.metric}"  # by seed, and lost where a run is lost
    mean, spread = found.mean(group) if compared else mean_and_spread(values)
    cell = _cell(mean, column.text)
    sd = percent(spread) if column.text is percent else rounded(spread, 2)
    return cell._replace(text=f"{cell.text} ± {sd}") if spread else cell


def _compared(found: Findings, group: Group, run: Run | None) -> list[Cell]:
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
    hint = f"{plural(one.seeds, 'seed')}; p {rounded(one.p, 2)} before correction; they show a "
    hint += f"true difference of {rounded(one.visible, 2)} four times in five"
    return [value._replace(hint=hint), _cell(one.corrected, partial(rounded, digits=2))]


def difference(one: Difference) -> str:
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


_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"}
    | {"[": "{[}", "−": "$-$", "±": r"$\pm$", "–": "--", "∞": r"$\infty$", "Δ": r"$\Delta$"}
    | {"…": r"\ldots{}", "λ": r"$\lambda$", "‖": r"$\Vert$", "\n": " ", "\u00a0": "~"}
)


def records(found: Findings) -> list[dict[str, Any]]:
    """Return one row a run, in the order of the settings; None where a run recorded nothing."""
    return [
        {"run": run.number, "setting": group.label, "state": run.state}
        | {key: run.config.get(key, choice(run, key)) for key in found.columns}
        | found.measured[run.number]
        for group in found.groups
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


def as_csv(found: Findings) -> str:
    """Return `records` as CSV with a line of names."""
    rows = records(found)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_inert, rows[0] if rows else ["run"]))
    writer.writerows(map(_inert, row.values()) for row in rows)
    return text.getvalue()


def _inert(value: Any) -> Any:
    """Return a cell that a spreadsheet does not compute: text as text, numbers as they are."""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula and natural(value)[1] else value


def as_json(found: Findings) -> str:
    """Return `records`, settings with their differences, and the verdict as a JSON object."""
    other, winner = found.compared_with, found.winner
    settings = [
        {
            "setting": group.label,
            "runs": [run.number for run in group.runs],
            "seeds": len(found.seeds(group)),
            "mean": found.mean(group)[0] if found.seeds(group) else None,
            "sd": found.mean(group)[1],
            "difference": asdict(one) if (one := found.comparisons.get(group.index)) else None,
        }
        for group in found.groups
    ]
    whole = {
        "name": found.sweep.name,
        "verdict": verdict(found),
        "metric": found.metric,
        "higher_is_better": found.higher_is_better,
        "compared_with": other.label if other else None,
        "winner": winner.label if winner else None,
        "settings": settings,
        "runs": records(found),
    }
    return encode(whole, indent=2) + "\n"


def as_latex(found: Findings) -> str:
    columns = [key for key in found.columns if key != "seed"]
    titles = {one.key: one.title for one in headings(found)[1:]}
    wanted = [*columns, *(k for k in (f"best/{found.metric}", "difference", "p") if k in titles)]
    rows = [[*map(titles.__getitem__, wanted), "seeds"]]
    for group in found.groups:
        cells = dict(zip(titles, mean_row(found, group).cells, strict=True))
        rows.append([*(cells[key].text for key in wanted), str(len(found.seeds(group)))])
    head, *body = (" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in rows)
    alignment = "l" * len(columns) + "r" * (len(rows[0]) - len(columns))
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


# Name of the file and function of each format.
FORMATS: dict[str, tuple[str, Callable[[Findings], str]]] = {
    "csv": (files.TABLE_CSV, as_csv),
    "latex": (files.TABLE_LATEX, as_latex),
    "json": (files.TABLE_JSON, as_json),
}
