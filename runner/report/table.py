"""The table of the page, one row a setting, best first, with its seeds behind it; and exports."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.notation import higher_is_better
from runner.report.findings import DIVERGED, Findings, find, mean_and_spread
from runner.report.look import percent, rounded, signed
from runner.report.run import Run, natural, read
from runner.report.settings import ABSENT, Setting, choice
from runner.report.statistics import Difference
from runner.report.verdict import in_words, remarks, verdict
from runner.run_folder import files, keys
from runner.run_folder.strict_json import encode

Text = Callable[[float | None], str]


class Column(NamedTuple):
    """A column. ``more``: it is shown on demand; ``phone``: it is shown on a narrow screen too."""

    key: str
    title: str
    hint: str
    text: Text | None = None
    more: bool = True
    phone: bool = False


class Cell(NamedTuple):
    text: str
    value: str = ""  # by which it is sorted
    style: str = ""
    hint: str = ""


class Row(NamedTuple):
    """A setting, and its runs."""

    setting: Setting
    cells: list[Cell]
    seeds: list[tuple[Run, list[Cell]]]


def columns_of(findings: Findings) -> list[Column]:
    """Return the columns that any setting has a value for, those shown on demand last."""
    metric = findings.metric
    reference = findings.compared_with
    shown = []
    if metric is not None:
        hint = f"best {metric} of a run: mean ± standard deviation over seeds"
        shown.append(Column(f"best/{metric}", metric, hint, rounded, more=False, phone=True))
    if findings.comparisons and reference is not None:
        hint = f"minus {reference.label}, seed by seed, with its 95 % interval"
        title = f"Δ to {reference.label}"
        shown.append(Column("difference", title, hint, signed_or_dash, more=False, phone=True))
        if any(difference.p is not None for difference in findings.comparisons.values()):
            hint = "Tukey's test over seeds, for all settings together"
            shown.append(Column("p", "p", hint, rounded, more=False))
    share = "share of what the mode clips: the steps, the elements or the units"
    shown.append(Column("share", "clipped", share, percent, more=False, phone=True))
    for name in ("p50", "p99"):
        hint = f"{name} of the gradient norm before clipping"
        key = f"{keys.GRAD_NORM}/{name}"
        shown.append(Column(key, f"‖G‖ {name}", hint, rounded, more=False))
    shown.append(Column("seeds", "seeds", "runs of this setting", more=False))
    shown.append(Column("state", "state", "how its runs ended", more=False))
    return [*shown, *_more_columns(findings)]


def _more_columns(findings: Findings) -> list[Column]:
    further = []
    if len(findings.swept) > 1:
        for key in findings.columns:
            if key != "seed":
                further.append(Column(f"key:{key}", key, f"configuration key {key}"))
    for key in findings.metrics:
        # The lowest loss of a single training step says little.
        which = "best" if higher_is_better(key) and key != findings.metric else "final"
        further.append(Column(f"{which}/{key}", f"{key} {which}", f"{which} {key}", rounded))
    for name in ("p90", "max"):
        hint = f"{name} of the gradient norm before clipping"
        further.append(Column(f"{keys.GRAD_NORM}/{name}", f"‖G‖ {name}", hint, rounded))
    lost = "step from which the training loss was lost to the end"
    further += [
        Column(
            keys.CLIP_RATIO_TOTAL, "steps clipped", "share of steps that clipping changed", percent
        ),
        Column(keys.CLIP_COEF, "coefficient", "mean of ‖G‖ after clipping ÷ before", rounded),
        Column(keys.GRAD_NONFINITE, "skipped", "steps whose gradient was not finite", rounded),
        Column(keys.CLIP_SKIPPED, "spikes", "steps skipped as spikes (clip.skip)", rounded),
        Column(DIVERGED, "diverged at", lost, rounded),
        Column("steps", "steps", "optimizer steps taken", rounded),
        Column("seconds", "seconds", "wall time", rounded),
    ]
    measured = findings.measured.values()
    recorded = []
    for column in further:
        if column.key.startswith("key:") or any(m.get(column.key) is not None for m in measured):
            recorded.append(column)
    return recorded


def signed_or_dash(value: float | None) -> str:
    return ABSENT if value is None else signed(value)


def rows_of(findings: Findings) -> list[Row]:
    """Return the settings, best first, with the runs of each."""
    columns = columns_of(findings)
    rows = []
    for setting in findings.listed:
        seeds = []
        for run in setting.runs:
            seeds.append((run, [_of_run(findings, setting, run, column) for column in columns]))
        cells = [_of_setting(findings, setting, column) for column in columns]
        rows.append(Row(setting, cells, seeds))
    return rows


def facts_of(findings: Findings) -> list[tuple[str, str]]:
    """Return what a page of a single run lists instead of a table."""
    [row] = rows_of(findings)
    columns = columns_of(findings)
    facts = [(key, choice(row.setting.runs[0], key)) for key in findings.columns]
    for column, cell in zip(columns, row.cells, strict=True):
        if column.key not in ("seeds", "difference", "p") and cell.text not in ("", ABSENT):
            title = (
                f"best {column.title}" if column.key == f"best/{findings.metric}" else column.title
            )
            facts.append((title, cell.text))
    return facts


def _of_setting(findings: Findings, setting: Setting, column: Column) -> Cell:
    key = column.key
    runs = setting.runs
    if key.startswith("key:"):
        return _key(choice(runs[0], key.removeprefix("key:")))
    if key == "seeds":
        ran = len({run.seed for run in runs})
        counted = len({run.seed for run in findings.judged(setting)})
        text = f"{ran}" if ran == counted else f"{counted} of {ran}"
        return Cell(text, value=repr(counted), style="figure")
    if key == "state":
        return _state(findings, setting)
    if key == "share":
        return _cell(findings.share(setting), column.text)
    if key == f"best/{findings.metric}":
        mean, spread = findings.mean(setting)
        if findings.diverged(setting):
            return Cell(ABSENT, value="nan", style="figure", hint="no mean: a seed diverged")
        return _with_spread(mean if findings.seeds(setting) else None, spread, rounded)
    if key in ("difference", "p"):
        return _compared(findings, setting, key)
    recorded = [findings.measured[run.number].get(key) for run in findings.judged(setting) or runs]
    values = [value for value in recorded if value is not None]
    if not values:
        return _cell(None, column.text)
    mean, spread = mean_and_spread(values)
    several = spread if not key.startswith(keys.GRAD_NORM) else None
    return _with_spread(mean, several, column.text or rounded)


def state_of(findings: Findings, setting: Setting) -> str:
    """Return how the runs of a setting ended: ``finished``, or ``1 of 3 diverged, 1 failed``."""
    runs = setting.runs
    lost = len(findings.diverged(setting))
    parts = []
    if lost:
        parts.append("diverged" if len(runs) == 1 else f"{lost} of {len(runs)} diverged")
    for state in dict.fromkeys(run.state for run in runs if run.state != "finished"):
        count = sum(run.state == state for run in runs)
        name = ABSENT if state == "unknown" else state
        parts.append(name if count == len(runs) else f"{count} {name}")
    return ", ".join(parts) or "finished"


def _state(findings: Findings, setting: Setting) -> Cell:
    text = state_of(findings, setting)
    error = next((run.error for run in setting.runs if run.error), None) or ""
    lost = findings.diverged(setting) or any(r.state in ("failed", "killed") for r in setting.runs)
    return Cell(text, value=text, style=f"state{' lost' if lost else ''}", hint=error[:500])


def _compared(findings: Findings, setting: Setting, key: str) -> Cell:
    """Return the cell of the difference to the reference, or of p."""
    difference = findings.comparisons.get(setting.index)
    if difference is None:
        return Cell(ABSENT, style="figure")
    hint = in_words(findings, difference)
    if key == "p":
        return _cell(difference.p, lambda p: rounded(p, digits=2))._replace(hint=hint)
    text = with_interval(difference)
    return Cell(text, value=repr(difference.value), style="figure", hint=hint)


def _of_run(findings: Findings, setting: Setting, run: Run, column: Column) -> Cell:
    key = column.key
    measured = findings.measured[run.number]
    if key.startswith("key:"):
        return Cell("")
    if key == "seeds":
        return Cell(f"seed {run.seed}" if not run.seed.startswith("run ") else run.seed)
    if key == "state":
        diverged = measured[DIVERGED]
        text = ABSENT if run.state == "unknown" else run.state
        text = text if diverged is None else f"diverged at {diverged:,.0f}"
        bad = " lost" if diverged is not None or run.state in ("failed", "killed") else ""
        return Cell(text, value=text, style=f"state{bad}", hint=(run.error or "")[:500])
    if key == "share":
        fraction = measured[keys.CLIP_FRACTION]
        share = measured[keys.CLIP_RATIO_TOTAL] if fraction is None else fraction
        return _cell(share, column.text)
    if key == "p":
        return Cell("")
    if key == "difference":
        reference = findings.compared_with
        base = findings.seeds(reference).get(run.seed) if reference else None
        score = findings.score(run)
        if base is None or score is None or not findings.counts(run) or setting is reference:
            return Cell(ABSENT, style="figure")
        return _cell(score - base, column.text)
    return _cell(measured.get(key), column.text)


def _with_spread(mean: float | None, spread: float | None, text: Text) -> Cell:
    cell = _cell(mean, text)
    if not spread:
        return cell
    return cell._replace(
        text=f"{cell.text} ± {text(spread) if text is percent else rounded(spread, 2)}"
    )


def with_interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return signed(difference.value)
    low = signed(difference.low, 2)
    return f"{signed(difference.value)} [{low}, {signed(difference.high, 2)}]"


def _key(text: str) -> Cell:
    size, _ = natural(text)
    return Cell(text, value=text if math.isinf(size) else repr(size))


def _cell(value: float | None, text: Text | None) -> Cell:
    lost = value is not None and not math.isfinite(value)
    shown = ABSENT if value is None or text is None else text(value)
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
        {"run": run.number, "setting": setting.label, "state": run.state}
        | {key: run.config.get(key, choice(run, key)) for key in findings.columns}
        | findings.measured[run.number]
        for setting in findings.settings
        for run in setting.runs
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
    """Return the verdict, the settings with their differences, the next command and `records`."""
    reference = findings.compared_with
    winner = findings.winner
    answer = verdict(findings)
    whole = {
        "name": findings.sweep.name,
        "verdict": answer.title,
        "sentences": answer.sentences,
        "remarks": remarks(findings),
        "metric": findings.metric,
        "higher_is_better": findings.higher_is_better,
        "swept": list(findings.swept),
        "compared_with": reference.label if reference else None,
        "winner": winner.label if winner else None,
        "commands": {"next": answer.command or None, "sweep": findings.sweep.command},
        "settings": [_record_of(findings, setting) for setting in findings.listed],
        "runs": records(findings),
    }
    return encode(whole, indent=2) + "\n"


def _record_of(findings: Findings, setting: Setting) -> dict[str, Any]:
    mean, spread = findings.mean(setting)
    difference = findings.comparisons.get(setting.index)
    return {
        "setting": setting.label,
        "runs": [run.number for run in setting.runs],
        "seeds": len(findings.seeds(setting)),
        "diverged": len(findings.diverged(setting)),
        "mean": mean if findings.seeds(setting) else None,
        "sd": spread,
        "clipped": findings.share(setting),
        "difference": asdict(difference) if difference else None,
        "worth": in_words(findings, difference) or None,
    }


def as_latex(findings: Findings) -> str:
    configured = [key for key in findings.columns if key != "seed"]
    columns = columns_of(findings)
    results = [c for c in columns if c.key in (f"best/{findings.metric}", "difference", "p")]
    body = []
    for setting in findings.listed:
        cells = [choice(setting.runs[0], key) for key in configured]
        cells += [_of_setting(findings, setting, column).text for column in results]
        body.append([*cells, str(len(findings.seeds(setting)))])
    head = [*configured, *(column.title for column in results), "seeds"]
    alignment = "l" * len(configured) + "r" * (len(results) + 1)
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        _latex_row(head),
        r"\midrule",
        *(_latex_row(cells) for cells in body),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"


# Name of the file and function of each format.
FORMATS: dict[str, tuple[str, Callable[[Findings], str]]] = {
    "csv": (files.TABLE_CSV, as_csv),
    "latex": (files.TABLE_LATEX, as_latex),
    "json": (files.TABLE_JSON, as_json),
}
