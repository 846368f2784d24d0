"""What the workspace shows: the sections of ``report.html`` as panels of wandb.

Every metric named here is in a run's rows, its summary or its configuration, as
:class:`runner.telemetry.sinks.wandb_sink.WandbSink` records them. Tests compare it with a run.
"""

from __future__ import annotations

import unicodedata

import wandb_workspaces.reports.v2.interface as wr
import wandb_workspaces.workspaces as ws

from runner.run_folder import keys

STEP = keys.TRAIN_STEP
"""The x axis of every curve. Set at each level, for wandb's own step counts rows, not steps."""

MODE = wr.Config("clip.mode")
THRESHOLD = wr.Config("clip.threshold")
RATE = wr.Config("optimizer.lr")
ACCUMULATION = wr.Config("accumulation.steps")
BEST_LOSS = f"best/{keys.EVAL_LOSS}"
BEST_ACCURACY = f"best/{keys.EVAL_ACCURACY}"
CLIPPED = keys.CLIP_RATIO_TOTAL

SHARE = (0.0, 1.0)

MOST_RUNS = 50
"""Curves to a panel; wandb's own limit of ten would leave out most of a sweep."""

_READING = """\
**How to read this.** ‖G‖ is the norm of the whole gradient *before* clipping, after \
synchronisation, unscaling and normalisation. The threshold is drawn beside it: with `clip=norm` \
the two compare, with `value` and `adaptive` the threshold bounds elements and units instead.

The clip ratio is the share of steps that clipping changed. Near 0 the threshold hardly ever \
binds; near 1 it sets the size of nearly every step, as a lower learning rate would.

Thresholds of different modes do not compare: choose runs of one `clip.mode`.
"""


def build(entity: str, project: str, name: str, group: str | None) -> ws.Workspace:
    """The workspace, not saved yet. No server is asked.

    Args:
        entity: user or team that owns the project.
        project: whose runs are shown.
        name: shown for the workspace; see :func:`unfit`.
        group: runs of this group alone, such as a sweep's name; None for all.
    """
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_loss(), _gradient(), _threshold(), _over_seeds()],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=_runs(group),
    )


def specification(workspace: ws.Workspace) -> str:
    """The workspace as JSON text: entity, project, displayName, and the spec that a server keeps.

    wandb-workspaces builds this without a server, but hands it out by a private name alone.
    """
    view = workspace._to_model()
    kept = {"entity", "project", "display_name", "spec"}
    text: str = view.model_dump_json(by_alias=True, exclude_none=True, indent=2, include=kept)
    return text + "\n"


def unfit(name: str) -> str:
    """The characters of ``name`` that wandb takes for emoji, such as = and <; they are refused."""
    return "".join(sorted({c for c in name if unicodedata.category(c) in _REFUSED}))


def default_name(group: str | None) -> str:
    """A name for the workspace of this group; what wandb refuses in it is left out."""
    if group is None:
        return "Clipping"
    return "Clipping, " + "".join("-" if unfit(character) else character for character in group)


_REFUSED = {"So", "Sk", "Sm", "Sc", "Cs"}  # wandb_workspaces.utils.validators.validate_no_emoji


def _loss() -> ws.Section:
    return _section(
        "Loss and evaluation",
        _curve("Loss of a step", keys.TRAIN_LOSS),
        _curve("Held-out loss", keys.EVAL_LOSS),
        _curve("Held-out accuracy", keys.EVAL_ACCURACY),
    )


def _gradient() -> ws.Section:
    # wandb draws no line at a value, so the threshold is drawn as the metric that it is too.
    return _section(
        "Gradient and clipping",
        wr.LinePlot(
            title="‖G‖ before clipping, and the threshold",
            x=STEP,
            y=[keys.GRAD_NORM, keys.CLIP_THRESHOLD],
            log_y=True,
        ),
        wr.LinePlot(
            title="Clip ratio: since the last row, and of the run so far",
            x=STEP,
            y=[keys.CLIP_RATIO, CLIPPED],
            range_y=SHARE,
        ),
        wr.LinePlot(
            title="Coefficient: ‖G‖ after / before clipping",
            x=STEP,
            y=[keys.CLIP_COEF],
            range_y=SHARE,
        ),
    )


def _threshold() -> ws.Section:
    parallel = [
        wr.ParallelCoordinatesPlotColumn(MODE, display_name="mode"),
        wr.ParallelCoordinatesPlotColumn(THRESHOLD, display_name="threshold", log=True),
        wr.ParallelCoordinatesPlotColumn(RATE, display_name="learning rate", log=True),
        wr.ParallelCoordinatesPlotColumn(ACCUMULATION, display_name="accumulation"),
        wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(CLIPPED), display_name="clip ratio"),
        wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(BEST_LOSS), display_name="best loss"),
    ]
    return _section(
        "Choosing a threshold",
        _against_threshold("Best held-out loss against the threshold", BEST_LOSS),
        _against_threshold("Best held-out accuracy against the threshold", BEST_ACCURACY),
        wr.BarPlot(
            title="Share of steps clipped",
            metrics=[CLIPPED],
            range_x=SHARE,
            max_bars_to_show=MOST_RUNS,
        ),
        wr.ParallelCoordinatesPlot(
            title="Mode, threshold, learning rate, accumulation and the best loss", columns=parallel
        ),
        wr.ParameterImportancePlot(with_respect_to=BEST_LOSS),
        wr.MarkdownPanel(markdown=_READING),
        wr.RunComparer(diff_only=True),
    )


def _over_seeds() -> ws.Section:
    """Means over runs that share a threshold. They are seeds only where nothing else differs, so
    this is a section of its own and closed, and no other panel averages anything.
    """
    return _section(
        "Averaged over runs of one threshold (seeds)",
        _average("Held-out loss, mean ± sd", keys.EVAL_LOSS),
        _average("‖G‖ before clipping, mean ± sd", keys.GRAD_NORM, log_y=True),
        wr.BarPlot(
            title="Best held-out loss, mean ± sd",
            metrics=[BEST_LOSS],
            groupby=THRESHOLD,
            groupby_aggfunc="mean",
            groupby_rangefunc="stddev",
        ),
        is_open=False,
    )


def _runs(group: str | None) -> ws.RunsetSettings:
    """Runs stand by sweep, then mode, then threshold, so that neighbours compare.

    They are not grouped: wandb draws the mean of a group in every panel, which would hide that its
    runs differ in more than a seed.
    """
    order = [ws.Metric("Group"), *map(_stored, (MODE, THRESHOLD)), ws.Metric("CreatedTimestamp")]
    columns = [
        "run:displayName",
        "run:state",
        *(f"config:{_stored(key).name}" for key in (MODE, THRESHOLD, RATE, ACCUMULATION)),
        *(f"summary:{key}" for key in (BEST_LOSS, BEST_ACCURACY, CLIPPED, f"{keys.GRAD_NORM}/p50")),
    ]
    return ws.RunsetSettings(
        filters="" if group is None else f"Metric('Group') == {_quoted(group)}",
        order=[ws.Ordering(key, ascending=True) for key in order],
        pinned_columns=columns,
    )


def _stored(key: wr.Config) -> ws.Config:
    """The key as a server stores it: each top-level section of a config is wrapped in ``value``.

    Panels wrap their keys themselves; the order and the columns of runs are taken as they are.
    """
    section, _, rest = key.name.partition(".")
    return ws.Config(f"{section}.value.{rest}")


def _quoted(text: str) -> str:
    """``text`` as a literal of wandb's filter language, every character by its number.

    That language rewrites = < > and the like inside of literals as well, and its own way of quoting
    fails at an apostrophe; the numbers reach the parser as they are.
    """
    return "'" + "".join(f"\\U{ord(character):08x}" for character in text) + "'"


def _section(name: str, *panels: wr.PanelTypes, is_open: bool = True) -> ws.Section:
    return ws.Section(
        name=name,
        panels=list(panels),
        is_open=is_open,
        panel_settings=ws.SectionPanelSettings(x_axis=STEP),
    )


def _curve(title: str, metric: str) -> wr.LinePlot:
    return wr.LinePlot(title=title, x=STEP, y=[metric])


def _average(title: str, metric: str, log_y: bool = False) -> wr.LinePlot:
    return wr.LinePlot(
        title=title,
        x=STEP,
        y=[metric],
        log_y=log_y,
        groupby=THRESHOLD,
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
    )


def _against_threshold(title: str, metric: str) -> wr.ScatterPlot:
    return wr.ScatterPlot(title=title, x=THRESHOLD, y=wr.SummaryMetric(metric), log_x=True)
