"""All charts of the page, and those over optimizer steps: losses, norms, what clipping did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

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
    of: str | Callable[[Run], Series]
    note: str
    kind: Literal["points", "steps", "share"] = "points"
    percent: bool = False
    log: bool | None = None
    late: bool = False  # the axis leaves out what begins far from the end


def sections(found: Findings) -> dict[str, list[Chart]]:
    """Return the charts of the page by heading, without sections that have none."""
    every = {
        "Metric": [*metric_charts(found)],
        "Loss": [*_loss(found.groups)],
        "Gradient norm and clipping": [*_clipping(found.groups)],
        "Choosing a threshold": [*threshold_charts(found)],
        "By parameter": heat_maps(found),
    }
    return {title: charts for title, charts in every.items() if charts}


def _loss(groups: Sequence[Group]) -> Iterator[Chart]:
    held, title, name = "Measured on held-out data.", "Evaluation loss", "evaluation loss"
    yield from _draw(Curves("eval-loss", title, name, keys.EVAL_LOSS, held), groups)
    of: dict[str, Any] = {"of": keys.EVAL_ACCURACY, "percent": True, "log": False, "late": True}
    yield from _draw(Curves("eval-accuracy", "Accuracy", "accuracy", note=held, **of), groups)
    note = "Bold: mean over the steps around. Faint: every step, thinned so that spikes stay."
    title, name = "Training loss", "training loss"
    yield from _draw(Curves("loss", title, name, keys.TRAIN_LOSS, note, "steps"), groups)


def _clipping(groups: Sequence[Group]) -> Iterator[Chart]:
    for facet in draw.facets(groups):
        mode, of, parts = facet.mode, facet.suffix, facet.info.parts or "steps"
        note = f"Before clipping; bold: geometric mean. {facet.info.note}"
        note += scaled_note(facet.groups)
        title = f"Gradient norm ‖G‖{of}"
        what = Curves(f"norm-{mode}", title, "‖G‖", norm, note, "steps", log=True)
        yield from _draw(what, facet.groups, groups, facet)
        # Of elements or units, nearly every step has some clipped, so steps are not counted.
        key = keys.CLIP_FRACTION if facet.info.parts else keys.CLIP_RATIO
        note = f"Share of the {parts} that clipping changed, mean over the steps around."
        title, name = f"Share of {parts} clipped{of}", f"{parts} clipped"
        what = Curves(f"clipped-{mode}", title, name, key, note, "share", percent=True)
        yield from _draw(what, facet.own)
        note = "‖G‖ after clipping ÷ before, mean over the steps around: 1 leaves the gradient."
        key, title = keys.CLIP_COEF, f"Coefficient{of}"
        yield from _draw(Curves(f"coef-{mode}", title, key, key, note, "share"), facet.own)
        if not _in_norms(facet.info):
            title, note = f"Threshold{of}", "The threshold of each step."
            what = Curves(f"threshold-{mode}", title, "threshold", moving, note)
            yield from _draw(what, facet.own)


def norm(run: Run) -> Series:
    """Return ‖G‖ of each row, or the highest since the row before if rows skip steps."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    scaled, highest = run.of(keys.GRAD_NORM_SCALED), run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) and not len(scaled) else run.limited


def moving(run: Run) -> Series:
    """Return the thresholds of a run's steps; empty if they are all the same."""
    one = run.of(keys.CLIP_THRESHOLD)
    return one if len(one.finite) and np.ptp(one.finite) else EMPTY


def _in_norms(info: ModeInfo) -> bool:
    """Return whether the thresholds of a mode are limits of ‖G‖, which its chart shows."""
    moves = info.follows == "norms" or (info.follows == "steps" and info.unit == "‖G‖")
    return moves or info.limits_norm


def _draw(
    what: Curves, groups: Sequence[Group], among: Sequence[Group] = (), facet: Facet | None = None
) -> Iterator[Chart]:
    """Yield a chart of recorded series, with the axis of ``among`` and the limits of ``facet``."""
    of = what.of if callable(what.of) else partial(Run.of, key=what.of)
    found = [(group, run, one) for group in groups for run in group.runs if len(one := of(run))]
    if not found:
        return
    last = max(float(one.steps[-1]) for *_, one in found)
    buckets = min(400, max(60, 24_000 // len(found)))
    compared = [(group, run) for group in (among or groups) for run in group.runs]
    values = [_before_lost(run, of(run)) for _, run in compared]
    share, log = what.kind == "share", bool(what.log)
    log = draw.spans(values, _DECADES) if what.log is None and not share else log
    traces = [one for of_run in found for one in _curves(*of_run, what, log, buckets)]
    traces.sort(key=lambda one: one.get("hoverinfo") != "skip")  # bold curves are drawn last
    values = [one[len(one) // 4 :] for one in values] if what.late else values
    if facet:
        own = facet.own if _in_norms(facet.info) else []
        traces += [one for group in own for one in _levels(group, last)]
        values += [moving(run).finite for group, run in compared if _in_norms(group.info)]
        values += [np.array([g.threshold or np.nan]) for g, _ in compared if g.info.limits_norm]
    crossed = [one for of_run in found for one in _lost(*of_run)]
    scales, kind = draw.scales(values, log)
    if share:
        scales["linear"] = (0.0, 1.02)
    yield draw.chart(
        what.key,
        what.title,
        what.note + (" × marks the first value that is not a number." if crossed else ""),
        traces + crossed,
        draw.axis("optimizer step", (0.0, last * 1.01 or 1.0), tickformat=",d", showgrid=False),
        draw.axis(what.axis, scales[kind], log=log, percent=what.percent),
        meta={"scales": scales, "steps": True, "smooth": kind if what.kind != "points" else None},
        hovermode="x unified" if len(found) <= _COMPARED else "closest",
    )


def _named(group: Group, run: Run) -> str:
    return group.label if len(group.runs) == 1 else f"{group.label} · run {run.number}"


def _curves(
    group: Group, run: Run, one: Series, what: Curves, log: bool, buckets: int
) -> Iterator[Trace]:
    xs, ys = draw.thinned(one, buckets)
    of = partial(draw.line, group, name=_named(group, run), run=run.number)
    if what.kind == "steps":
        yield of(xs, ys, line={"width": 0.8}, opacity=0.3, hoverinfo="skip")
    more: Trace = {"marker": {"size": 5}}
    if what.kind != "points":
        steps, means, rolled = draw.smoothed(one, buckets, log)
        xs, ys, more["customdata"] = steps.astype(np.int64), draw.floats(rolled), draw.floats(means)
    mode = "lines+markers" if len(xs) <= _DOTS else "lines"
    yield of(xs, ys, line={"dash": group.dash}, mode=mode, showlegend=True, **more)


def _levels(group: Group, last: float) -> Iterator[Trace]:
    """Yield the threshold of a setting as a dashed line or, if it moves, curves."""
    stroke = {"width": 1.3, "dash": "6px,4px"}
    name = f"threshold of {group.label}"
    moved = [(run, one) for run in group.runs if len(one := moving(run))]
    for run, one in moved:
        xs, ys = draw.thinned(one, 400)
        yield draw.line(group, xs, ys, name, line=stroke | {"shape": "hv"}, run=run.number)
    if not moved and group.info.limits_norm and group.threshold is not None:
        level = [group.threshold] * 2
        yield draw.line(group, [0, last * 1.01], level, name, line=stroke, hoverinfo="skip")


def _lost(group: Group, run: Run, one: Series) -> Iterator[Trace]:
    gone = np.flatnonzero(~np.isfinite(one.values))
    if len(gone):
        step, value = one.steps[gone[0]], rounded(float(one.values[gone[0]]))
        text = f"{_named(group, run)}: {value} at step {rounded(float(step), 9)}"
        text += f", and at {len(gone) - 1} more of the recorded steps" if len(gone) > 1 else ""
        yield draw.cross(group, run.number, step, text)


def _before_lost(run: Run, one: Series) -> Floats:
    """Return the finite values from before a run diverged: later ones would flatten all others."""
    lost = run.diverged_at
    before = one.steps < (np.inf if lost is None else lost)
    return Series(one.steps[before], one.values[before]).finite


def heat_maps(found: Findings) -> list[Chart]:
    # The first seed of each setting comes before the second of any.
    turns = zip_longest(*(group.runs for group in found.groups))
    recorded = [
        (group, run)
        for turn in turns
        for group, run in zip(found.groups, turn, strict=True)
        if run and run.layers
    ]
    tables = [_table(run.layers) for _, run in recorded[:_RUNS]]
    ends = draw.limits([logs for *_, logs in tables], False)
    each = zip(recorded, tables, strict=False)
    return [_map(group, run, *table, ends) for (group, run), table in each]


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
    left = len(run.layers) - len(names)
    note += f" The {left} parameters with the smallest norms are left out." if left else ""
    x = {"title": {"text": "optimizer step", "standoff": 8}, "tickformat": ",d", "showgrid": False}
    short = [name if len(name) <= 30 else f"…{name[-29:]}" for name in names]
    y: Trace = {"type": "category", "autorange": "reversed", "tickfont": {"size": 10}}
    y |= {"tickvals": names, "ticktext": short}
    size: Trace = {"height": max(240, 110 + 13 * len(names)), "margin": draw.FRAME | {"l": 190}}
    title = f"Norm by parameter · {group.label} · run {run.number}"
    return draw.chart(f"heat-{run.number}", title, note, [heat], x, y, **size)


def _table(rows: Mapping[str, Series]) -> tuple[list[str], Floats, Floats]:
    """Return names, the steps of each range, and log10 of the highest norm by row and range."""
    size = {key: np.median(one.finite) if len(one.finite) else 0.0 for key, one in rows.items()}
    largest = sorted(rows, key=size.__getitem__)[-_ROWS:]
    names = [key for key in rows if key in largest]
    steps = np.unique(np.concatenate([one.steps for one in rows.values()]))
    table = np.full((len(names), len(steps)), np.nan)
    for cells, one in zip(table, map(rows.__getitem__, names), strict=True):
        known = np.isfinite(one.values) & (one.values > 0)
        cells[np.searchsorted(steps, one.steps[known])] = one.values[known]
    starts = np.linspace(0, len(steps), min(_COLUMNS, len(steps)), endpoint=False).astype(int)
    return names, steps[starts], np.log10(np.fmax.reduceat(table, starts, axis=1))
