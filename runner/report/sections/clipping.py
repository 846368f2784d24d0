"""The charts of what clipping did: norms, shares clipped, coefficients, thresholds, what-if."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.charts import curves, shares, what_if
from runner.report.charts.curves import Curve
from runner.report.figure import Chart, Entry
from runner.report.look import percent
from runner.report.run import Run
from runner.report.sections.norms import distribution_chart, limits_shown, moving, norm_chart
from runner.report.sections.tables import Tables
from runner.report.settings import MODE, Setting
from runner.run_folder import keys

_MODES = 3  # most modes with a chart of their own of other thresholds


def clipping_charts(tables: Tables) -> list[Chart]:
    """Return the charts for which runs recorded something, in the order of the page."""
    clipping = [setting for setting in tables.findings.settings if setting.clips]
    charts = [
        norm_chart(tables),
        _share_chart(tables, clipping),
        _coefficient_chart(tables, clipping),
        _threshold_chart(tables, clipping),
        distribution_chart(tables),
        _cause_chart(tables),
        *_what_if_charts(tables, clipping),
    ]
    return [chart for chart in charts if chart is not None]


def _cause_chart(tables: Tables) -> Chart | None:
    """Return which parameters made the norm in the clipped steps of a single run."""
    runs = tables.findings.sweep.runs
    if len(runs) != 1:
        return None
    [run] = runs
    named = run.by_suffix(keys.TOP)
    [setting] = tables.findings.settings
    return shares.draw(tables.entry(setting), run.number, named) if named else None


def _share_chart(tables: Tables, clipping: Sequence[Setting]) -> Chart | None:
    recorded: list[Curve] = []
    kinds = set()
    for setting in clipping:
        shares = _shares(tables, setting)
        if shares:
            kinds.add(setting.info.parts or "steps")
        recorded += shares
    if not recorded:
        return None
    title = "Share clipped"
    what = "steps, elements or units"
    if len(kinds) == 1:
        what = kinds.pop()
        title = f"Share of {what} clipped"
    return curves.draw(
        name="clipped",
        title=title,
        note=f"Share of {what} that clipping changed, mean over the steps around.",
        axis="clipped",
        curves=recorded,
        smooth=True,
        percent=True,
        share=True,
        log=False,
    )


def _shares(tables: Tables, setting: Setting) -> list[Curve]:
    """Return the share clipped of each run; the name says of what, where modes differ."""
    parts = setting.info.parts
    shares = tables.curves(keys.CLIP_FRACTION if parts else keys.CLIP_RATIO, [setting])
    if not parts or MODE not in tables.findings.swept:
        return shares
    entry = tables.entry(setting)
    with_parts = Entry(entry.index, f"{entry.label} ({parts})", entry.color)
    return [share._replace(entry=with_parts) for share in shares]


def _coefficient_chart(tables: Tables, clipping: Sequence[Setting]) -> Chart | None:
    recorded = tables.curves(keys.CLIP_COEF, clipping)
    if not recorded:
        return None
    return curves.draw(
        name="coef",
        title="Coefficient",
        note="‖G‖ after clipping ÷ before, mean over the steps around: 1 leaves the gradient.",
        axis=keys.CLIP_COEF,
        curves=recorded,
        smooth=True,
        share=True,
        log=False,
    )


def _threshold_chart(tables: Tables, clipping: Sequence[Setting]) -> Chart | None:
    recorded = []
    for setting in clipping:
        if limits_shown(setting):
            continue
        for run in setting.runs:
            thresholds = moving(run)
            if len(thresholds):
                recorded.append(Curve(tables.entry(setting), run.number, thresholds))
    if not recorded:
        return None
    return curves.draw(
        name="threshold",
        title="Threshold",
        note="The threshold of each step.",
        axis="threshold",
        curves=recorded,
    )


def _what_if_charts(tables: Tables, clipping: Sequence[Setting]) -> list[Chart]:
    """Return the shares that other thresholds would have clipped, a chart for each mode."""
    modes = list(dict.fromkeys(setting.mode for setting in clipping))
    charts = []
    for mode in modes:
        recorded = _what_if(tables, [setting for setting in clipping if setting.mode == mode])
        if not recorded:
            continue
        several_modes = len(modes) > 1
        chart = what_if.draw(
            name=f"what-if-{mode}" if several_modes else "what-if",
            title="Share of steps that other thresholds clip"
            + (f" · clip={mode}" if several_modes else ""),
            note="Lines: what runs recorded by clip.what_if. ◆ The share that a run clipped.",
            recorded=recorded,
        )
        charts.append(chart)
    return charts[:_MODES]


def would_clip(run: Run) -> dict[float, float]:
    """Return the last recorded share of steps that each threshold would have clipped, rising."""
    shares: dict[float, float] = {}
    for threshold, series in run.by_suffix(keys.WHAT_IF).items():
        if len(series.finite):
            shares[float(threshold)] = float(series.finite[-1])
    return dict(sorted(shares.items()))


def _what_if(tables: Tables, settings: Sequence[Setting]) -> list[what_if.Recorded]:
    """Return what runs recorded of other thresholds, and the share that they clipped."""
    recorded = []
    for setting in settings:
        for run in setting.runs:
            shares = would_clip(run)
            if not shares:
                continue
            ratio = tables.findings.measured[run.number][keys.CLIP_RATIO_TOTAL]
            clipped = None
            if setting.threshold is not None and ratio is not None:
                clipped = (setting.threshold, ratio)
            text = f"{setting.label}, run {run.number}: clipped {percent(ratio)} of its steps"
            entry = tables.entry(setting)
            recorded.append(what_if.Recorded(entry, run.number, shares, clipped, text))
    return recorded
