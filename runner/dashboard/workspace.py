"""Build the workspace: the sections of ``report.html`` as panels of wandb.

All metrics are in the rows, the summary or the configuration of a run, as
:class:`runner.telemetry.sinks.wandb_sink.WandbSink` records them.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import wandb_workspaces.reports.v2.interface as wr
import wandb_workspaces.workspaces as ws

from runner.dashboard.saving import WorkspaceRequest
from runner.run_folder import keys
from runner.telemetry.sinks.wandb_sink import SWEEP_JOB_TYPE

STEP = keys.TRAIN_STEP
"""Horizontal axis of every curve. It is set at each level: wandb's own step counts rows."""

MODE = wr.Config("clip.mode")
THRESHOLD = wr.Config("clip.threshold")
RATE = wr.Config("optimizer.lr")
ACCUMULATION = wr.Config("accumulation.steps")
BEST_LOSS = f"best/{keys.EVAL_LOSS}"
BEST_ACCURACY = f"best/{keys.EVAL_ACCURACY}"
CLIPPED = keys.CLIP_RATIO_TOTAL

SHARE = (0.0, 1.0)

_MEANS: dict[str, Any] = {
    "groupby": THRESHOLD,
    "groupby_aggfunc": "mean",
    "groupby_rangefunc": "stddev",
}
"""Options of a panel that shows mean and standard deviation over runs of the same threshold."""

_REFUSED = {"So", "Sk", "Sm", "Sc", "Cs"}
"""Unicode categories that wandb_workspaces.utils.validators.validate_no_emoji refuses."""

MOST_RUNS = 50
"""Most curves in a panel; wandb's default of ten would leave out most of a sweep."""

_READING = """\
**How to read this.** ‖G‖ is the norm of the whole gradient *before* clipping, after \
synchronisation, unscaling and normalisation. The threshold is drawn beside it: with `clip=norm` \
the two compare, with `value` and `adaptive` the threshold bounds elements and units instead.

The clip ratio is the share of steps that clipping changed. Near 0 the threshold hardly ever \
binds; near 1 it sets the size of nearly every step, as a lower learning rate would.

Thresholds of different modes do not compare: choose runs of one `clip.mode`.
"""


def build(request: WorkspaceRequest) -> ws.Workspace:
    """Return the workspace, without saving it or asking a server."""
    return ws.Workspace(
        entity=request.entity or "",
        project=request.project,
        name=request.name,
        sections=[_metric(), _loss(), _gradient(), _threshold(), _parameters(), _over_seeds()],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=_runs(request.group),
    )


def specification(workspace: ws.Workspace) -> str:
    """Return the workspace as JSON text: entity, project, displayName and spec."""
    view = workspace._to_model()
    kept = {"entity", "project", "display_name", "spec"}
    text: str = view.model_dump_json(by_alias=True, exclude_none=True, indent=2, include=kept)
    return text + "\n"


def unfit(name: str) -> str:
    """Return the characters of ``name`` that wandb refuses as emoji, such as = and <."""
    return "".join(sorted({c for c in name if unicodedata.category(c) in _REFUSED}))


def default_name(group: str | None) -> str:
    """Return a name for the workspace of a group, with - for characters that wandb refuses."""
    if group is None:
        return "Clipping"
    return "Clipping, " + "".join("-" if unfit(character) else character for character in group)


def _metric() -> ws.Section:
    parallel = [
        wr.ParallelCoordinatesPlotColumn(MODE, display_name="mode"),
        wr.ParallelCoordinatesPlotColumn(THRESHOLD, display_name="threshold", log=True),
        wr.ParallelCoordinatesPlotColumn(RATE, display_name="learning rate", log=True),
        wr.ParallelCoordinatesPlotColumn(ACCUMULATION, display_name="accumulation"),
        wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(CLIPPED), display_name="clip ratio"),
        wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(BEST_LOSS), display_name="best loss"),
    ]
    return _section(
        "Metric",
        _against_threshold("Best held-out loss against the threshold", BEST_LOSS),
        _against_threshold("Best held-out accuracy against the threshold", BEST_ACCURACY),
        wr.ScatterPlot(
            title="Learning rate and threshold; the colour is the best held-out loss",
            x=RATE,
            y=THRESHOLD,
            z=wr.SummaryMetric(BEST_LOSS),
            log_x=True,
            log_y=True,
            gradient=[wr.GradientPoint("#440154", 0), wr.GradientPoint("#5ec962", 100)],
        ),
        wr.ParallelCoordinatesPlot(
            title="Mode, threshold, learning rate, accumulation and the best loss", columns=parallel
        ),
        wr.ParameterImportancePlot(with_respect_to=BEST_LOSS),
        wr.RunComparer(diff_only=True),
    )


def _loss() -> ws.Section:
    return _section(
        "Loss",
        _curve("Loss of a step", keys.TRAIN_LOSS),
        _curve("Held-out loss", keys.EVAL_LOSS, log_y=True),
        _curve("Held-out accuracy", keys.EVAL_ACCURACY),
    )


def _gradient() -> ws.Section:
    # wandb draws no line at a fixed value, but the threshold is also a metric.
    both = (keys.GRAD_NORM, keys.CLIP_THRESHOLD)
    ratios = (keys.CLIP_RATIO, CLIPPED)
    return _section(
        "Gradient norm and clipping",
        _curve("‖G‖ before clipping, and the threshold", *both, log_y=True),
        _curve("Clip ratio: since the last row, and of the run so far", *ratios, range_y=SHARE),
        _curve("Share of steps, elements or units clipped", keys.CLIP_FRACTION, range_y=SHARE),
        _curve("Coefficient: ‖G‖ after / before clipping", keys.CLIP_COEF, range_y=SHARE),
        _every("Gradient noise scale, where it is recorded", "grad/noise_scale"),
    )


def _threshold() -> ws.Section:
    percentiles: list[Any] = [f"{keys.GRAD_NORM}/{name}" for name in ("p50", "p90", "p99", "max")]
    return _section(
        "Choosing a threshold",
        wr.BarPlot(title="‖G‖ before clipping: p50, p90, p99, max", metrics=percentiles),
        _every("Share of steps that other thresholds clip (clip.what_if)", f"{keys.WHAT_IF}.*"),
        wr.BarPlot(
            title="Share of steps clipped",
            metrics=[CLIPPED],
            range_x=SHARE,
            max_bars_to_show=MOST_RUNS,
        ),
        wr.MarkdownPanel(markdown=_READING),
    )


def _parameters() -> ws.Section:
    title = "‖G‖ of each parameter (telemetry.per_layer=true)"
    return _section("By parameter", _every(title, f"{keys.LAYER_NORM}.*", log_y=True))


def _over_seeds() -> ws.Section:
    """Return means over runs of the same threshold."""
    return _section(
        "Averaged over runs of one threshold (seeds)",
        _curve("Held-out loss, mean ± sd", keys.EVAL_LOSS, **_MEANS),
        _curve("‖G‖ before clipping, mean ± sd", keys.GRAD_NORM, log_y=True, **_MEANS),
        wr.BarPlot(title="Best held-out loss, mean ± sd", metrics=[BEST_LOSS], **_MEANS),
        is_open=False,
    )


def _runs(group: str | None) -> ws.RunsetSettings:
    """Show the runs that train, not those of sweeps, by sweep, mode and threshold."""
    order = [ws.Metric("Group"), *map(_stored, (MODE, THRESHOLD)), ws.Metric("CreatedTimestamp")]
    columns = [
        "run:displayName",
        "run:state",
        *(f"config:{_stored(key).name}" for key in (MODE, THRESHOLD, RATE, ACCUMULATION)),
        *(f"summary:{key}" for key in (BEST_LOSS, BEST_ACCURACY, CLIPPED, f"{keys.GRAD_NORM}/p50")),
    ]
    shown = f"Metric('JobType') != {_quoted(SWEEP_JOB_TYPE)}"
    if group is not None:
        shown += f" and Metric('Group') == {_quoted(group)}"
    return ws.RunsetSettings(
        filters=shown,
        order=[ws.Ordering(key, ascending=True) for key in order],
        pinned_columns=columns,
    )


def _stored(key: wr.Config) -> ws.Config:
    """Return the key as a server stores it, with ``value`` after the name of the section."""
    section, _, rest = key.name.partition(".")
    return ws.Config(f"{section}.value.{rest}")


def _quoted(text: str) -> str:
    """Return ``text`` as a literal of wandb's filter language, each character by its code."""
    return "'" + "".join(f"\\U{ord(character):08x}" for character in text) + "'"


def _section(name: str, *panels: wr.PanelTypes, is_open: bool = True) -> ws.Section:
    return ws.Section(
        name=name,
        panels=list(panels),
        is_open=is_open,
        panel_settings=ws.SectionPanelSettings(x_axis=STEP),
    )


def _curve(title: str, *metrics: str, **options: Any) -> wr.LinePlot:
    return wr.LinePlot(title=title, x=STEP, y=list(metrics), **options)


def _every(title: str, pattern: str, **options: Any) -> wr.LinePlot:
    """Return the curves of every metric whose whole key matches, which may be none."""
    return wr.LinePlot(title=title, x=STEP, metric_regex=f"^{pattern}$", **options)


def _against_threshold(title: str, metric: str) -> wr.ScatterPlot:
    return wr.ScatterPlot(title=title, x=THRESHOLD, y=wr.SummaryMetric(metric), log_x=True)
