"""What happened over time: losses, the norm, and what clipping did to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runner.report.chart import Curve, Level, line_chart
from runner.report.groups import Group
from runner.report.markup import Markup
from runner.report.run import Run
from runner.report.scale import Axis, covering
from runner.report.series import Floats, Series
from runner.report.thin import rolling_mean
from runner.run_folder import keys

# Share of a run over which a rolling mean looks back, and the least rows that make one.
_LOOK_BACK, _FEWEST = 0.05, 20
# A diverging run ends many decades above the rest; the chart ends this factor above the start.
_HEADROOM = 4.0


def buckets_for(runs: int) -> int:
    """How finely to draw: all curves of a chart together stay under a fixed number of points."""
    return min(400, max(60, 24_000 // max(runs, 1)))


def facets(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Settings by mode, since thresholds of two modes are no common scale.

    Runs without clipping join each mode as the reference, and stand alone where there is no other.
    """
    modes = sorted({group.mode for group in groups} - {"none", ""})
    return [
        (mode, [group for group in groups if group.mode in (mode, "none")])
        for mode in modes or ["none"]
    ]


def loss_charts(groups: Sequence[Group]) -> list[Markup]:
    """Training loss (each step, and its rolling mean), and evaluations where there are any."""
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
        if any(len(run.of(key)) for group in groups for run in group.runs):
            charts.append(
                _chart(
                    key.replace("/", "-"),
                    title,
                    f"{key}, measured on held-out data.",
                    groups,
                    lambda run, key=key: run.of(key),  # type: ignore[misc]
                    ceiling=key == keys.EVAL_LOSS,
                    percent=key == keys.EVAL_ACCURACY,
                )
            )
    return [chart for chart in charts if chart]


def norm_charts(groups: Sequence[Group]) -> list[Markup]:
    """‖G‖ before clipping on a log axis, one chart a mode, with thresholds where they apply."""
    charts = []
    for mode, members in facets(groups):
        # Of ‖G‖ itself only this mode's threshold is a value; the others' are of parts of it.
        levels = [
            Level(group.index, group.label, group.threshold, group.color)
            for group in members
            if mode == "norm" and group.mode == mode and group.threshold is not None
        ]
        note = {
            "norm": "Dashed: the threshold of the same colour; what rises above it is scaled "
            "down to it.",
            "value": "A threshold of this mode bounds single elements and is no value of ‖G‖, so "
            "none is drawn.",
            "adaptive": "A threshold of this mode is a ratio to each unit's weights and is no "
            "value of ‖G‖, so none is drawn.",
            "none": "These runs clip nothing.",
        }.get(mode, "")
        charts.append(
            _chart(
                f"norm-{mode}",
                f"Gradient norm ‖G‖{_suffix(mode, groups)}",
                f"Before clipping; bold: rolling mean. {note}",
                members,
                _norm,
                log=True,
                smooth=True,
                behind="fine",
                levels=levels,
                title="‖G‖",
            )
        )
    return [chart for chart in charts if chart]


def clip_charts(groups: Sequence[Group]) -> list[Markup]:
    """Share of steps clipped and coefficient over time, one pair a mode."""
    charts = []
    for mode, members in facets(groups):
        own = [group for group in members if group.mode == mode]
        suffix = _suffix(mode, groups)
        charts.append(
            _chart(
                f"ratio-{mode}",
                f"Clip ratio{suffix}",
                "Share of the steps that clipping changed, over 5 % of the run around each.",
                own,
                lambda run: run.of(keys.CLIP_RATIO),
                smooth=True,
                percent=True,
                title=keys.CLIP_RATIO,
            )
        )
        charts.append(
            _chart(
                f"coef-{mode}",
                f"Coefficient{suffix}",
                "‖G‖ after clipping ÷ before, rolling mean over 5 % of the run: 1 leaves the "
                "gradient as it is, 0.1 takes nine tenths of its length.",
                own,
                lambda run: run.of(keys.CLIP_COEF),
                smooth=True,
                unit=True,
                title=keys.CLIP_COEF,
            )
        )
    return [chart for chart in charts if chart]


def _chart(
    key: str,
    name: str,
    note: str,
    groups: Sequence[Group],
    pick: Callable[[Run], Series],
    *,
    log: bool = False,
    smooth: bool = False,
    behind: str | None = None,
    ceiling: bool = False,
    percent: bool = False,
    unit: bool = False,
    levels: Sequence[Level] = (),
    title: str | None = None,
) -> Markup | None:
    """One chart of one series of each run; None where no run recorded it."""
    found = [(group, run, pick(run)) for group in groups for run in group.runs if len(pick(run))]
    if not found:
        return None
    series = [one for *_, one in found]
    if percent or unit:
        vertical = Axis(0.0, 1.02, False, title or name, percent)
    else:
        log = log or _spans_decades(series)
        vertical = _vertical(series, levels, log, ceiling, title or name)
    steps = [one.steps for one in series]
    horizontal = covering(steps, log=False, title="optimizer step", least=0.0)
    longest = max(float(one.steps[-1]) for one in series)
    curves = []
    for group, run, one in found:
        values = one.values
        if smooth:
            width = max(_FEWEST, round(_LOOK_BACK * len(values)))
            width = min(width, max(1, len(values) // 4))
            values = _geometric(values, width) if log else rolling_mean(values, width)
        if behind:
            curves.append(_line(group, run, one, behind))
        prefix = "rolling mean of " if behind == "fine" else ""
        curves.append(_line(group, run, Series(one.steps, values), prefix=prefix))
    # Bold over thin, whatever the setting.
    curves.sort(key=lambda curve: curve.kind == "curve")
    horizontal = Axis(0.0, longest * 1.01 or 1.0, False, horizontal.title)
    fine = buckets_for(len(found))
    return line_chart(key, name, note, (horizontal, vertical), curves, levels, fine)


def _line(group: Group, run: Run, series: Series, kind: str = "curve", prefix: str = "") -> Curve:
    name = prefix + (group.label if len(group.runs) == 1 else f"{group.label} · run {run.number}")
    dash = group.dash if kind == "curve" else ""
    return Curve(group.index, name, series.steps, series.values, group.color, dash, kind)


def _norm(run: Run) -> Series:
    """‖G‖ of each row, or the highest since the row before where rows are not every step."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    highest = run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) else run.of(keys.GRAD_NORM)


def _vertical(
    series: Sequence[Series], levels: Sequence[Level], log: bool, ceiling: bool, title: str
) -> Axis:
    values = [one.finite for one in series]
    if ceiling:
        # A short series, such as evaluations, begins with its first value alone.
        beginnings = [
            float(np.median(v[: max(1, min(10, len(v) // 20))])) for v in values if len(v)
        ]
        top = _HEADROOM * max(beginnings, default=np.inf)
        values = [v[v <= top] if top > 0 else v for v in values]
    marked = np.asarray([level.y for level in levels])
    return covering([*values, marked], log=log, title=title)


def _geometric(values: Floats, width: int) -> Floats:
    """A rolling mean as a log axis has it, which one spike does not lift into a plateau."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(values)
    return np.asarray(np.exp(rolling_mean(logs, width)))


def _spans_decades(series: Sequence[Series]) -> bool:
    """Whether values are all positive and their bulk spans more than a factor of thirty."""
    every = np.concatenate([one.finite for one in series]) if series else np.empty(0)
    if not len(every) or every.min() <= 0:
        return False
    low, high = np.percentile(every, (2, 98))
    return bool(high / low > 30)


def _suffix(mode: str, groups: Sequence[Group]) -> str:
    several = len({group.mode for group in groups} - {"none", ""}) > 1
    return f" · clip={mode}" if several else ""
