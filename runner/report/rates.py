"""Charts of several varied keys: learning rate with threshold, and three keys or more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from runner.report.evidence import RATE, THRESHOLD, value_of
from runner.report.findings import Findings
from runner.report.groups import Facet, Group, choice, clipping_modes, facets, natural
from runner.report.notation import rounded
from runner.report.palette import NEUTRAL, PAPER, ordered
from runner.report.plotting import Chart, axis, chart, crosses, floats, limits, line
from runner.report.threshold import vertical

# Most settings of which each has a line.
_LINES = 200


def rate_charts(found: Findings) -> Iterator[Chart]:
    """Yield a map and curves of the metric for each mode that ran with several learning rates."""
    for facet in facets(found.groups):
        grid = Grid.of(found, facet.groups)
        if grid is None:
            continue
        if len(grid.thresholds) > 1:
            yield _map(found, facet, grid)
        yield _curves(found, facet, grid)


@dataclass(frozen=True)
class Grid:
    """The metric of each learning rate and threshold."""

    rates: tuple[float, ...]
    thresholds: tuple[str, ...]
    settings: Mapping[str, Group]
    scores: Mapping[tuple[float, str], float]
    start: float
    alone: bool

    @classmethod
    def of(cls, found: Findings, groups: Sequence[Group]) -> Grid | None:
        """Return the grid of some settings; None if they have one learning rate."""
        cells: dict[tuple[float, str], list[float]] = {}
        settings: dict[str, Group] = {}
        for group in groups:
            if (rate := value_of(group, RATE)) and found.scores(group):
                text = choice(group.runs[0], THRESHOLD)
                cells.setdefault((rate, text), []).append(found.mean(group)[0])
                settings.setdefault(text, group)
        rates = tuple(sorted({rate for rate, _ in cells}))
        if len(rates) < 2:
            return None
        thresholds = tuple(sorted(settings, key=natural))
        scores = {cell: fmean(values) for cell, values in cells.items()}
        runs = [run.of(found.metric or "") for group in groups for run in group.runs]
        known = [*scores.values(), *(float(one.values[0]) for one in runs if len(one))]
        worst = min if found.higher_is_better else max
        start = worst((value for value in known if math.isfinite(value)), default=0.0)
        alone = all(len(values) == 1 for values in cells.values())
        return cls(rates, thresholds, settings, scores, start, alone)

    def highest(self, threshold: str) -> float | None:
        """Return the highest learning rate at which no seed diverged; None if there is none."""
        known = ((rate, self.scores.get((rate, threshold), math.nan)) for rate in self.rates)
        return max((rate for rate, score in known if math.isfinite(score)), default=None)

    def sensitivity(self, threshold: str, higher: bool) -> float | None:
        """Return by how much the metric falls behind its best value, on average over the rates."""
        values = [v for rate in self.rates if (v := self.scores.get((rate, threshold))) is not None]
        if not any(map(math.isfinite, values)):
            return None
        sign = -1.0 if higher else 1.0
        start = sign * self.start
        losses = [min(sign * v, start) if math.isfinite(v) else start for v in values]
        return fmean(losses) - min(losses)


def _map(found: Findings, facet: Facet, grid: Grid) -> Chart:
    rows = [rounded(rate, 6) for rate in grid.rates]
    table = [[grid.scores.get((r, t)) for t in grid.thresholds] for r in grid.rates]
    texts = [
        ["" if v is None else rounded(v) if math.isfinite(v) else "diverged" for v in row]
        for row in table
    ]
    heat = {
        "type": "heatmap",
        "x": grid.thresholds,
        "y": rows,
        "z": floats([[math.nan if v is None else v for v in row] for row in table]),
        "text": texts,
        "texttemplate": "%{text}",
        # Black text is read well on all of it, and on the background of what diverged.
        "colorscale": "Tealgrn_r" if found.higher_is_better else "Tealgrn",
        "textfont": {"color": "#000"},
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "threshold %{x}, learning rate %{y}: %{text}<extra></extra>",
        "colorbar": {"title": {"text": found.metric, "side": "right"}, "thickness": 12},
    }
    highest = [(i, grid.highest(text)) for i, text in enumerate(grid.thresholds)]
    stable = [(i, grid.rates.index(rate)) for i, rate in highest if rate]
    edges = [
        {"type": "rect", "x0": i - 0.49, "x1": i + 0.49, "y0": j - 0.49, "y1": j + 0.49}
        | {"line": {"width": 3, "color": "#e8590c"}}
        for i, j in stable
    ]
    mixed = "" if grid.alone else " and of settings that differ in other keys"
    note = f"Mean best {found.metric} of the seeds{mixed}. Orange: the highest learning rate of "
    note += "the sweep at which no seed diverged, for each threshold. "
    if any(j == len(rows) - 1 for _, j in stable):
        note += "Where it is the highest one tried, higher rates may be stable too."
    kind = {"type": "category", "showgrid": False}
    x = kind | {"title": {"text": f"{THRESHOLD}, clip={facet.mode}"}}
    y = kind | {"title": {"text": RATE}}
    title = f"Learning rate and threshold{facet.suffix}"
    paper = "#dde2e8"
    return chart(f"map-{facet.mode}", title, note, [heat], x, y, shapes=edges, plot_bgcolor=paper)


def _curves(found: Findings, facet: Facet, grid: Grid) -> Chart:
    traces = []
    for text in grid.thresholds:
        group = grid.settings[text]
        known = [(r, v) for r in grid.rates if (v := grid.scores.get((r, text))) is not None]
        xs, ys = np.asarray(known).T
        sharp = grid.sensitivity(text, found.higher_is_better)
        style = {"line": {"color": group.color}, "mode": "lines+markers", "showlegend": True}
        name = f"{text} · sensitivity {rounded(sharp, 3)}"
        traces.append(line(None, xs, floats(ys), name, **style))
        lost = [r for r, v in known if not math.isfinite(v)]
        if lost:
            traces.append(crosses(group, lost, [f"{text}: diverged at {rounded(r)}" for r in lost]))
    x = axis(RATE, limits([grid.rates], True), log=True, showgrid=False)
    y, meta = vertical(found, list(grid.scores.values()))
    note = "One curve for each threshold. Sensitivity: by how much the metric falls behind the "
    note += "best of its curve, on average over the learning rates; a run that diverged counts as "
    note += f"{rounded(grid.start)}, the value at the start (arXiv 2309.14322)."
    below = {"tracegroupgap": 0, "orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"}
    more: dict[str, Any] = {"meta": meta | {"legend": True}, "showlegend": True, "legend": below}
    title = f"Sensitivity to the learning rate{facet.suffix}"
    return chart(f"rate-{facet.mode}", title, note, traces, x, y, **more)


def parallel(found: Findings) -> Iterator[Chart]:
    """Yield parallel coordinates of the settings if three keys or more vary."""
    groups = found.ranked[::-1]
    columns = [
        key
        for key in found.differences.columns
        if key != "seed"
        and len({choice(group.runs[0], key) for group in groups}) > 1
        and (key != "clip.mode" or len(clipping_modes(groups)) > 1)
    ]
    if len(columns) < 3 or not 2 <= len(groups) <= _LINES:
        return
    places, texts = [], []
    for at, key in enumerate(columns):
        chosen = [choice(group.runs[0], key) for group in groups]
        values = sorted(set(chosen), key=natural)
        heights = {value: (i + 0.5) / len(values) for i, value in enumerate(values)}
        places.append([heights[value] for value in chosen])
        texts += [(at, height, value[:18], "right") for value, height in heights.items()]
    means = [found.mean(group)[0] for group in groups]
    low, high = limits([means], False)
    places.append([(mean - low) / (high - low) for mean in means])
    ticks = np.linspace(low, high, 6)[1:-1]
    texts += [(len(columns), (v - low) / (high - low), rounded(v, 3), "left") for v in ticks]
    traces, xs = [], list(range(len(places)))
    colors = ordered(len(groups))[::-1]
    for group, color, mean, *ys in zip(groups, colors, means, *places, strict=True):
        name = f"{group.label}: {found.metric} {rounded(mean)}<extra></extra>"
        stroke = {"color": color, "width": 1.8, "shape": "spline", "smoothing": 0.6}
        traces.append(line(group, xs, ys, group.label, line=stroke, hovertemplate=name))
    words = [
        {"x": x, "y": y, "text": text, "xanchor": side, "xshift": -4 if side == "right" else 4}
        | {"showarrow": False, "bgcolor": PAPER, "borderpad": 0, "font": {"size": 11}}
        for x, y, text, side in texts
    ]
    bars = [
        {"type": "line", "x0": i, "x1": i, "y0": 0, "y1": 1, "line": {"color": NEUTRAL, "width": 1}}
        for i in xs
    ]
    x = {"tickvals": xs, "range": [-0.35, len(columns) + 0.35]}
    x |= {"ticktext": [*columns, f"best {found.metric}"], "showgrid": False, "zeroline": False}
    y = {"visible": False, "range": [-0.02, 1.02]}
    note = "One line a setting: violet and blue ones are best, green and yellow ones worst."
    yield chart("parallel", "All varied keys", note, traces, x, y, shapes=bars, annotations=words)
