"""The table of the page: one row a setting, best first, with its seeds behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from runner.config.notation import higher_is_better
from runner.report.findings import DIVERGED, Findings, mean_and_spread
from runner.report.look import percent, rounded, signed
from runner.report.run import Run, natural
from runner.report.settings import ABSENT, Setting, choice
from runner.report.statistics import Difference
from runner.report.worth import in_words
from runner.run_folder import keys

Text = Callable[[float | None], str]
_LONGEST_IN_HEADING = 14  # most characters of a name in a heading


class Column(NamedTuple):
    """A column. ``more``: it is shown on demand; ``phone``: it is shown on a narrow screen too."""

    key: str
    title: str
    hint: str
    text: Text | None = None
    more: bool = True
    phone: bool = False


class Cell(NamedTuple):
    """A cell of the table: text, value for sorting, style, and a hint under the pointer."""

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
        title = f"Δ to {_name_in_heading(findings, reference)}"
        shown.append(Column("difference", title, hint, signed_or_dash, more=False, phone=True))
        if any(difference.p is not None for difference in findings.comparisons.values()):
            hint = "Tukey's test over seeds, for all settings together"
            shown.append(Column("p", "p", hint, _p_text, more=False))
    share = "share of what the mode clips: the steps, the elements or the units"
    shown.append(Column("share", "clipped", share, percent, more=False, phone=True))
    for name in ("p50", "p99"):
        hint = f"{name} of the gradient norm before clipping"
        key = f"{keys.GRAD_NORM}/{name}"
        shown.append(Column(key, f"‖G‖ {name}", hint, rounded, more=False))
    shown.append(Column("seeds", "seeds", "runs of this setting", rounded, more=False))
    shown.append(Column("state", "state", "how its runs ended", more=False))
    return [*shown, *_more_columns(findings)]


def _name_in_heading(findings: Findings, reference: Setting) -> str:
    """Return the name of the reference, or what it is where the name is long."""
    if len(reference.label) <= _LONGEST_IN_HEADING:
        return reference.label
    return "best" if findings.baseline is None else "baseline"


def _p_text(p: float | None) -> str:
    """Format p with two digits, and with more of them beside 0.05, where words depend on it."""
    if p is None or abs(p - 0.05) >= 0.005:
        return rounded(p, digits=2)
    return rounded(p, digits=3 if abs(p - 0.05) >= 0.0005 else 5)


def _more_columns(findings: Findings) -> list[Column]:
    further = []
    if len(findings.swept) > 1 and not findings.sweep.single:
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
    """Format a number with its sign; a dash for None."""
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
    """Return the cell of a setting."""
    key = column.key
    if key.startswith("key:"):
        return _key(choice(setting.runs[0], key.removeprefix("key:")))
    if key == f"best/{findings.metric}":
        return _metric(findings, setting)
    special = _OF_SETTING.get(key)
    if special is not None:
        return special(findings, setting)
    runs = findings.scores.judged(setting) or setting.runs
    recorded = [findings.measured[run.number].get(key) for run in runs]
    values = [value for value in recorded if value is not None]
    if not values:
        return _cell(None, column.text)
    mean, spread = mean_and_spread(values)
    is_norm = key.startswith(keys.GRAD_NORM)
    return _with_spread(mean, None if is_norm else spread, column.text or rounded)


def _metric(findings: Findings, setting: Setting) -> Cell:
    """Return the mean of the metric over seeds; none if a seed diverged."""
    mean, spread = findings.scores.mean(setting)
    if findings.scores.diverged(setting):
        return Cell("diverged", value="nan", style="figure lost", hint="no mean: a seed diverged")
    return _with_spread(mean if findings.scores.seeds(setting) else None, spread, rounded)


def _seeds(findings: Findings, setting: Setting) -> Cell:
    """Return how many seeds ran, and how many of them count."""
    ran = len({run.seed for run in setting.runs})
    counted = len({run.seed for run in findings.scores.judged(setting)})
    text = f"{ran}" if ran == counted else f"{counted} of {ran}"
    return Cell(text, value=repr(counted), style="figure")


def _share(findings: Findings, setting: Setting) -> Cell:
    return _cell(findings.scores.share(setting), percent)


def state_of(findings: Findings, setting: Setting) -> str:
    """Return how the runs of a setting ended: ``finished``, or ``1 of 3 diverged, 1 failed``."""
    runs = setting.runs
    lost = len(findings.scores.diverged(setting))
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
    lost = findings.scores.diverged(setting) or any(
        r.state in ("failed", "killed") for r in setting.runs
    )
    return Cell(text, value=text, style=f"state{' lost' if lost else ''}", hint=error[:500])


def _difference(findings: Findings, setting: Setting) -> Cell:
    """Return the difference to the reference, with its interval."""
    difference = findings.comparisons.get(setting.index)
    if difference is None:
        return Cell(ABSENT, style="figure")
    hint = in_words(findings, difference)
    text = with_interval(difference)
    return Cell(text, value=repr(difference.value), style="figure", hint=hint)


def _p(findings: Findings, setting: Setting) -> Cell:
    """Return p of the difference to the reference."""
    difference = findings.comparisons.get(setting.index)
    if difference is None:
        return Cell(ABSENT, style="figure")
    cell = _cell(difference.p, _p_text)
    return cell._replace(hint=in_words(findings, difference))


_OF_SETTING: Mapping[str, Callable[[Findings, Setting], Cell]] = {
    "seeds": _seeds,
    "state": _state,
    "share": _share,
    "difference": _difference,
    "p": _p,
}
"""The columns of a setting that are not a mean of what its runs recorded."""


def _of_run(findings: Findings, setting: Setting, run: Run, column: Column) -> Cell:
    """Return the cell of a run."""
    key = column.key
    measured = findings.measured[run.number]
    if key.startswith("key:") or key == "p":
        return Cell("")
    if key == "seeds":
        return Cell(f"seed {run.seed}" if run.has_seed else run.seed, style="figure")
    if key == "state":
        return _state_of_run(run, measured[DIVERGED])
    if key == "share":
        fraction = measured[keys.CLIP_FRACTION]
        share = measured[keys.CLIP_RATIO_TOTAL] if fraction is None else fraction
        return _cell(share, column.text)
    if key == "difference":
        difference = _difference_of_run(findings, setting, run)
        if difference is None:
            return Cell(ABSENT, style="figure")
        return _cell(difference, column.text)
    return _cell(measured.get(key), column.text)


def _state_of_run(run: Run, diverged: float | None) -> Cell:
    """Return how a run ended."""
    text = ABSENT if run.state == "unknown" else run.state
    if diverged is not None:
        text = f"diverged at {diverged:,.0f}"
    lost = diverged is not None or run.state in ("failed", "killed")
    style = "state lost" if lost else "state"
    return Cell(text, value=text, style=style, hint=(run.error or "")[:500])


def _difference_of_run(findings: Findings, setting: Setting, run: Run) -> float | None:
    """Return the difference of a run to the reference's run of the same seed."""
    reference = findings.compared_with
    if reference is None or setting is reference or not findings.scores.counts(run):
        return None
    base = findings.scores.seeds(reference).get(run.seed)
    score = findings.scores.score(run)
    return None if base is None or score is None else score - base


def _with_spread(mean: float | None, spread: float | None, text: Text) -> Cell:
    cell = _cell(mean, text)
    if not spread:
        return cell
    shown = text(spread) if text is percent else rounded(spread, 2)
    return cell._replace(text=f"{cell.text} ± {shown}")


def with_interval(difference: Difference) -> str:
    """Format a difference with its confidence interval, if it has one."""
    if difference.low is None or difference.high is None:
        return signed(difference.value)
    low = signed(difference.low, 2)
    return f"{signed(difference.value)} [{low},\u00a0{signed(difference.high, 2)}]"


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
