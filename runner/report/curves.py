"""Charts over optimizer steps: losses, gradient norms, and what clipping did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runner.report.chart import Curve, Level, line_chart
from runner.report.groups import Facet, Group, facets
from runner.report.markup import Markup
from runner.report.run import Run
from runner.report.scale import Axis, covering
from runner.report.series import Floats, Series
from runner.report.thin import rolling_mean
from runner.run_folder import keys

# A rolling mean covers this share of a run, and at least so many rows.
_WINDOW, _FEWEST = 0.05, 20
# A diverging run ends many decades above the others; the axis ends this factor above the start.
_HEADROOM = 4.0


def loss_charts(groups: Sequence[Group]) -> list[Markup | None]:
    """Return charts of the training loss and of evaluations; None for what no run recorded."""
    charts = [
        _chart(
            "loss",
            "Training loss",
            "Bold: rolling mean over 5 % of the run. Faint: every step, thinned so that spikes "
            "stay. × marks the step from which a loss is not a number.",
            groups,
            lambda run: run.of(keys.TRAIN_LOSS),
            ceiling=True,
            smooth=True,
            behind="faint",
        )
    ]
    for key, title in ((keys.EVAL_LOSS, "Evaluation loss"), (keys.EVAL_ACCURACY, "Accuracy")):
        charts.append(
            _chart(
                key.replace("/", "-"),
                title,
                f"{key}, measured on held-out data.",
                groups,
                lambda run, key=key: run.of(key),  # type: ignore[misc]
                ceiling=key == keys.EVAL_LOSS,
                axis=_share(title, percent=True) if key == keys.EVAL_ACCURACY else None,
            )
        )
    return charts


def norm_charts(groups: Sequence[Group]) -> list[Markup | None]:
    """Return a chart of ‖G‖ before clipping for each mode, on a log axis; None without values."""
    return [_norm_chart(facet) for facet in facets(groups)]


def clip_charts(groups: Sequence[Group]) -> list[Markup | None]:
    """Return, for each mode, charts of the share of steps clipped and of the coefficient.

    None stands for a chart without values.
    """
    charts = []
    for facet in facets(groups):
        charts.append(
            _chart(
                f"ratio-{facet.mode}",
                f"Clip ratio{facet.suffix}",
                "Share of the steps that clipping changed, over 5 % of the run around each.",
                facet.own,
                lambda run: run.of(keys.CLIP_RATIO),
                smooth=True,
                axis=_share(keys.CLIP_RATIO, percent=True),
            )
        )
        charts.append(
            _chart(
                f"coef-{facet.mode}",
                f"Coefficient{facet.suffix}",
                "‖G‖ after clipping ÷ before, rolling mean over 5 % of the run: 1 leaves the "
                "gradient as it is, 0.1 takes nine tenths of its length.",
                facet.own,
                lambda run: run.of(keys.CLIP_COEF),
                smooth=True,
                axis=_share(keys.CLIP_COEF),
            )
        )
    return charts


def _norm_chart(facet: Facet) -> Markup | None:
    levels = [
        Level(group.index, group.label, group.threshold, group.color)
        for group in facet.own
        if facet.info.limits_norm and group.threshold is not None
    ]
    return _chart(
        f"norm-{facet.mode}",
        f"Gradient norm ‖G‖{facet.suffix}",
        f"Before clipping; bold: rolling mean. {facet.info.note}",
        facet.groups,
        _norm,
        log=True,
        smooth=True,
        behind="fine",
        levels=levels,
        title="‖G‖",
    )


def _chart(
    key: str,
    name: str,
    note: str,
    groups: Sequence[Group],
    pick: Callable[[Run], Series],
    *,
    axis: Axis | None = None,
    log: bool = False,
    smooth: bool = False,
    behind: str | None = None,
    ceiling: bool = False,
    levels: Sequence[Level] = (),
    title: str | None = None,
) -> Markup | None:
    """Return a chart of one series of each run; None if no run recorded it.

    Args:
        key: name of the chart in the page.
        name: heading.
        note: how to read the chart.
        groups: settings to draw.
        pick: returns the series of a run.
        axis: vertical axis; by default one that covers all values.
        log: whether that axis is logarithmic even if values span few decades.
        smooth: whether to draw rolling means.
        behind: kind of the curves of the values themselves, behind the rolling means.
        ceiling: whether values far above the start may lie outside the axis.
        levels: thresholds to mark.
        title: title of the vertical axis; ``name`` by default.
    """
    found = [
        (group, run, series) for group in groups for run in group.runs if len(series := pick(run))
    ]
    if not found:
        return None
    every = [series for *_, series in found]
    if axis is None:
        log = log or _spans_decades(every)
        axis = _vertical(every, levels, log, ceiling, title or name)
    last = max(float(series.steps[-1]) for series in every)
    horizontal = Axis(0.0, last * 1.01 or 1.0, False, "optimizer step")
    curves = []
    for group, run, series in found:
        values = _smooth(series.values, log) if smooth else series.values
        if behind:
            curves.append(_curve(group, run, series, behind))
        prefix = "rolling mean of " if behind == "fine" else ""
        curves.append(_curve(group, run, Series(series.steps, values), prefix=prefix))
    curves.sort(key=lambda curve: curve.kind == "curve")  # bold curves are drawn last
    return line_chart(key, name, note, (horizontal, axis), curves, levels, _buckets(len(found)))


def _buckets(runs: int) -> int:
    """Return how finely to draw, so that all curves of a chart have a bounded number of points."""
    return min(400, max(60, 24_000 // runs))


def _curve(group: Group, run: Run, series: Series, kind: str = "curve", prefix: str = "") -> Curve:
    name = prefix + (group.label if len(group.runs) == 1 else f"{group.label} · run {run.number}")
    dash = group.dash if kind == "curve" else ""
    return Curve(group.index, name, series.steps, series.values, group.color, dash, kind)


def _norm(run: Run) -> Series:
    """Return ‖G‖ of each row, or the highest since the row before if rows skip steps."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    highest = run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) else run.of(keys.GRAD_NORM)


def _share(title: str, percent: bool = False) -> Axis:
    return Axis(0.0, 1.02, False, title, percent)


def _vertical(
    every: Sequence[Series], levels: Sequence[Level], log: bool, ceiling: bool, title: str
) -> Axis:
    values = [series.finite for series in every]
    if ceiling:
        # Short series, such as evaluations, begin with their first value alone.
        beginnings = [
            float(np.median(v[: max(1, min(10, len(v) // 20))])) for v in values if len(v)
        ]
        top = _HEADROOM * max(beginnings, default=np.inf)
        values = [v[v <= top] if top > 0 else v for v in values]
    marked = np.asarray([level.y for level in levels])
    return covering([*values, marked], log=log, title=title)


def _smooth(values: Floats, log: bool) -> Floats:
    """Return the rolling mean; geometric on a log axis, so that one spike makes no plateau."""
    width = max(_FEWEST, round(_WINDOW * len(values)))
    width = min(width, max(1, len(values) // 4))
    if not log:
        return rolling_mean(values, width)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.exp(rolling_mean(np.log(values), width)))


def _spans_decades(every: Sequence[Series]) -> bool:
    """Return whether all values are positive and most of them span a factor of over thirty."""
    values = np.concatenate([series.finite for series in every])
    if not len(values) or values.min() <= 0:
        return False
    low, high = np.percentile(values, (2, 98))
    return bool(high / low > 30)
