"""All charts of the page, and those over optimizer steps: losses, norms, what clipping did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np

from runner.config.modes import ModeInfo
from runner.report import draw
from runner.report.draw import Chart, Facet, Trace
from runner.report.findings import Findings, Group
from runner.report.look import rounded
from runner.report.run import EMPTY, Floats, Run, Series
from runner.report.thresholds import metric_charts, scaled_note, threshold_charts
from runner.run_folder import keys

_DECADES = 5.0  # factor above which values get a logarithmic axis
_DOTS = 30  # most points of a curve that are dots
_COMPARED = 20  # most curves that are read off at once
_COLUMNS, _ROWS, _RUNS = 160, 64, 6  # of a map at most, and most maps


@dataclass(frozen=True)
class Curves:
    """A chart with one series of each run over steps."""

    key: str
    title: str
    axis: str
    metric: str | Callable[[Run], Series]
    note: str
    kind: Literal["points", "steps", "share"] = "points"
    percent: bool = False
    log: bool | None = None
    late: bool = False  # the axis leaves out what begins far from the end

    def series(self, run: Run) -> Series:
        return self.metric(run) if callable(self.metric) else run.of(self.metric)


class Recorded(NamedTuple):
    """The series that a run recorded of a chart's metric."""

    group: Group
    run: Run
    series: Series


def sections(findings: Findings) -> dict[str, list[Chart]]:
    """Return the charts of the page by heading, without sections that have none."""
    every = {
        "Metric": [*metric_charts(findings)],
        "Loss": [*_loss(findings.groups)],
        "Gradient norm and clipping": [*_clipping(findings.groups)],
        "Choosing a threshold": [*threshold_charts(findings)],
        "By parameter": heat_maps(findings),
    }
    return {title: charts for title, charts in every.items() if charts}


def _loss(groups: Sequence[Group]) -> Iterator[Chart]:
    evaluation_loss = Curves(
        key="eval-loss",
        title="Evaluation loss",
        axis="evaluation loss",
        metric=keys.EVAL_LOSS,
        note="Measured on held-out data.",
    )
    accuracy = Curves(
        key="eval-accuracy",
        title="Accuracy",
        axis="accuracy",
        metric=keys.EVAL_ACCURACY,
        note="Measured on held-out data.",
        percent=True,
        log=False,
        late=True,
    )
    training_loss = Curves(
        key="loss",
        title="Training loss",
        axis="training loss",
        metric=keys.TRAIN_LOSS,
        note="Bold: mean over the steps around. Faint: every step, thinned so that spikes stay.",
        kind="steps",
    )
    for curves in (evaluation_loss, accuracy, training_loss):
        yield from _draw(curves, groups)


def _clipping(groups: Sequence[Group]) -> Iterator[Chart]:
    for facet in draw.facets(groups):
        norms = Curves(
            key=f"norm-{facet.mode}",
            title=f"Gradient norm ‖G‖{facet.suffix}",
            axis="‖G‖",
            metric=norm,
            note=f"Before clipping; bold: geometric mean. {facet.info.note}"
            + scaled_note(facet.groups),
            kind="steps",
            log=True,
        )
        yield from _draw(norms, facet.groups, groups, facet)
        # Nearly every step clips some elements or units, so a share of the steps would say nothing.
        parts = facet.info.parts or "steps"
        clipped = Curves(
            key=f"clipped-{facet.mode}",
            title=f"Share of {parts} clipped{facet.suffix}",
            axis=f"{parts} clipped",
            metric=keys.CLIP_FRACTION if facet.info.parts else keys.CLIP_RATIO,
            note=f"Share of the {parts} that clipping changed, mean over the steps around.",
            kind="share",
            percent=True,
        )
        yield from _draw(clipped, facet.clipping)
        coefficients = Curves(
            key=f"coef-{facet.mode}",
            title=f"Coefficient{facet.suffix}",
            axis=keys.CLIP_COEF,
            metric=keys.CLIP_COEF,
            note="‖G‖ after clipping ÷ before, mean over the steps around: 1 leaves the gradient.",
            kind="share",
        )
        yield from _draw(coefficients, facet.clipping)
        if not _in_norms(facet.info):
            thresholds = Curves(
                key=f"threshold-{facet.mode}",
                title=f"Threshold{facet.suffix}",
                axis="threshold",
                metric=moving,
                note="The threshold of each step.",
            )
            yield from _draw(thresholds, facet.clipping)


def norm(run: Run) -> Series:
    """Return ‖G‖ of each row, or the highest since the row before if rows skip steps."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    scaled = run.of(keys.GRAD_NORM_SCALED)
    highest = run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) and not len(scaled) else run.limited


def moving(run: Run) -> Series:
    """Return the thresholds of a run's steps; empty if they are all the same."""
    thresholds = run.of(keys.CLIP_THRESHOLD)
    return thresholds if len(thresholds.finite) and np.ptp(thresholds.finite) else EMPTY


def _in_norms(info: ModeInfo) -> bool:
    """Return whether the thresholds of a mode are limits of ‖G‖, which its chart shows."""
    moves = info.follows == "norms" or (info.follows == "steps" and info.unit == "‖G‖")
    return moves or info.limits_norm


def _draw(
    what: Curves, groups: Sequence[Group], among: Sequence[Group] = (), facet: Facet | None = None
) -> Iterator[Chart]:
    """Yield a chart of recorded series, with the axis of ``among`` and the limits of ``facet``."""
    recorded = _recorded(what, groups)
    if not recorded:
        return
    compared = _recorded(what, among or groups)
    values = [_before_lost(run, series) for _, run, series in compared]
    log = _has_log_axis(what, values)
    last = _last_step(recorded)
    traces = _all_curves(what, recorded, log)
    crosses = _all_crosses(recorded)
    if what.late:
        values = [series[len(series) // 4 :] for series in values]
    if facet:
        traces += _all_levels(facet, last)
        values += _thresholds(among or groups)
    scales, kind = draw.scales(values, log)
    if what.kind == "share":
        scales["linear"] = (0.0, 1.02)
    yield draw.chart(
        what.key,
        what.title,
        what.note + (" × marks the first value that is not a number." if crosses else ""),
        [*traces, *crosses],
        draw.axis("optimizer step", (0.0, last * 1.01 or 1.0), tickformat=",d", showgrid=False),
        draw.axis(what.axis, scales[kind], log=log, percent=what.percent),
        meta={"scales": scales, "steps": True, "smooth": kind if what.kind != "points" else None},
        hovermode="x unified" if len(recorded) <= _COMPARED else "closest",
    )


def _recorded(what: Curves, groups: Sequence[Group]) -> list[Recorded]:
    """Return the series of all runs that recorded the metric of a chart."""
    curves = [Recorded(group, run, what.series(run)) for group in groups for run in group.runs]
    return [curve for curve in curves if len(curve.series)]


def _last_step(recorded: Sequence[Recorded]) -> float:
    return max(float(curve.series.steps[-1]) for curve in recorded)


def _has_log_axis(what: Curves, values: Sequence[Floats]) -> bool:
    """Return whether an axis is logarithmic: as the chart says, or for values that span decades."""
    if what.log is not None:
        return what.log
    return what.kind != "share" and draw.spans(values, _DECADES)


def _all_curves(what: Curves, recorded: Sequence[Recorded], log: bool) -> list[Trace]:
    buckets = min(400, max(60, 24_000 // len(recorded)))
    traces = [trace for curve in recorded for trace in _curves(*curve, what, log, buckets)]
    # Bold curves are drawn last.
    return sorted(traces, key=lambda trace: trace.get("hoverinfo") != "skip")


def _all_crosses(recorded: Sequence[Recorded]) -> list[Trace]:
    return [cross for group, run, series in recorded for cross in _lost(group, run, series)]


def _all_levels(facet: Facet, last: float) -> list[Trace]:
    if not _in_norms(facet.info):
        return []
    return [trace for group in facet.clipping for trace in _levels(group, last)]


def _thresholds(groups: Sequence[Group]) -> Iterator[Floats]:
    """Yield the thresholds that a chart of norms shows, so that its axis encloses them."""
    for group in groups:
        if group.info.limits_norm and group.threshold:
            yield np.array([group.threshold])
        if _in_norms(group.info):
            for run in group.runs:
                yield moving(run).finite


def _named(group: Group, run: Run) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label} · run {run.number}"


def _curves(
    group: Group, run: Run, series: Series, what: Curves, log: bool, buckets: int
) -> Iterator[Trace]:
    """Yield the faint curve of every step, if the chart has one, and the bold one of means."""
    name = _named(group, run)
    xs, ys = draw.thinned(series, buckets)
    if what.kind == "steps":
        faint: Trace = {"line": {"width": 0.8}, "opacity": 0.3, "hoverinfo": "skip"}
        yield draw.line(group, xs, ys, name, run=run.number, **faint)
    bold: Trace = {"line": {"dash": group.dash}, "marker": {"size": 5}, "showlegend": True}
    if what.kind != "points":
        steps, means, rolled = draw.smoothed(series, buckets, log)
        xs = steps.astype(np.int64)
        ys = draw.floats(rolled)
        bold["customdata"] = draw.floats(means)
    bold["mode"] = "lines+markers" if len(xs) <= _DOTS else "lines"
    yield draw.line(group, xs, ys, name, run=run.number, **bold)


def _levels(group: Group, last: float) -> Iterator[Trace]:
    """Yield the threshold of a setting as a dashed line or, if it moves, curves."""
    stroke = {"width": 1.3, "dash": "6px,4px"}
    name = f"threshold of {group.label}"
    moving_runs = [run for run in group.runs if len(moving(run))]
    for run in moving_runs:
        xs, ys = draw.thinned(moving(run), 400)
        yield draw.line(group, xs, ys, name, line=stroke | {"shape": "hv"}, run=run.number)
    if not moving_runs and group.info.limits_norm and group.threshold is not None:
        level = [group.threshold] * 2
        yield draw.line(group, [0, last * 1.01], level, name, line=stroke, hoverinfo="skip")


def _lost(group: Group, run: Run, series: Series) -> Iterator[Trace]:
    """Yield a cross at the first value that is not finite."""
    lost = np.flatnonzero(~np.isfinite(series.values))
    if len(lost):
        step = series.steps[lost[0]]
        value = rounded(float(series.values[lost[0]]))
        text = f"{_named(group, run)}: {value} at step {rounded(float(step), 9)}"
        text += f", and at {len(lost) - 1} more of the recorded steps" if len(lost) > 1 else ""
        yield draw.cross(group, run.number, step, text)


def _before_lost(run: Run, series: Series) -> Floats:
    """Return the finite values from before a run diverged: later ones would flatten all others."""
    lost = run.diverged_at
    before = series.steps < (np.inf if lost is None else lost)
    return Series(series.steps[before], series.values[before]).finite


def heat_maps(findings: Findings) -> list[Chart]:
    # The first seed of each setting comes before the second of any.
    turns = zip_longest(*(group.runs for group in findings.groups))
    recorded = [
        (group, run)
        for turn in turns
        for group, run in zip(findings.groups, turn, strict=True)
        if run and run.layers
    ]
    tables = [_table(run.layers) for _, run in recorded[:_RUNS]]
    ends = draw.limits([logs for *_, logs in tables], False)
    charts = []
    for (group, run), (names, steps, logs) in zip(recorded, tables, strict=False):
        charts.append(_map(group, run, names, steps, logs, ends))
    return charts


def _map(
    group: Group, run: Run, names: list[str], steps: Floats, logs: Floats, ends: tuple[float, float]
) -> Chart:
    ticks = np.unique(np.linspace(*ends, 5).round(1))
    texts = [f"{10**tick:.2g}" for tick in ticks]
    heat: Trace = {"type": "heatmap", "colorscale": "Viridis", "zmin": ends[0], "zmax": ends[1]}
    heat |= {"x": steps.astype(np.int64), "y": names, "z": draw.floats(logs)}
    heat |= {
        "meta": {"group": group.index, "run": run.number},
        "colorbar": {"thickness": 10, "tickvals": ticks, "ticktext": texts},
        "hovertemplate": "%{y}, step %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
    }
    note = "Highest norm in each range of steps; one logarithmic scale for all runs."
    hidden = len(run.layers) - len(names)
    note += f" The {hidden} parameters with the smallest norms are left out." if hidden else ""
    x = {"title": {"text": "optimizer step", "standoff": 8}, "tickformat": ",d", "showgrid": False}
    short = [name if len(name) <= 30 else f"…{name[-29:]}" for name in names]
    y: Trace = {"type": "category", "autorange": "reversed", "tickfont": {"size": 10}}
    y |= {"tickvals": names, "ticktext": short}
    size: Trace = {"height": max(240, 110 + 13 * len(names)), "margin": draw.FRAME | {"l": 190}}
    title = f"Norm by parameter · {group.label} · run {run.number}"
    return draw.chart(f"heat-{run.number}", title, note, [heat], x, y, **size)


def _table(rows: Mapping[str, Series]) -> tuple[list[str], Floats, Floats]:
    """Return names, the steps of each range, and log10 of the highest norm by row and range."""
    median = {}
    for key, series in rows.items():
        median[key] = np.median(series.finite) if len(series.finite) else 0.0
    largest = sorted(rows, key=median.__getitem__)[-_ROWS:]
    names = [key for key in rows if key in largest]
    steps = np.unique(np.concatenate([series.steps for series in rows.values()]))
    table = np.full((len(names), len(steps)), np.nan)
    for cells, name in zip(table, names, strict=True):
        series = rows[name]
        positive = np.isfinite(series.values) & (series.values > 0)
        cells[np.searchsorted(steps, series.steps[positive])] = series.values[positive]
    starts = np.linspace(0, len(steps), min(_COLUMNS, len(steps)), endpoint=False).astype(int)
    return names, steps[starts], np.log10(np.fmax.reduceat(table, starts, axis=1))
