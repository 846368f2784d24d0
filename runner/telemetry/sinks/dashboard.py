"""Save a wandb workspace that shows the runs of a project as ``report.html`` does.

It needs the extra ``[dashboard]``, and runs in a process of its own, which ends with :func:`main`.
"""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import wandb
import wandb_workspaces.reports.v2.interface as wr
import wandb_workspaces.workspaces as ws

from runner.run_folder import keys

STEP = keys.TRAIN_STEP  # the axis of every curve, set at each level: wandb's own step counts rows
MODE = wr.Config("clip.mode")
THRESHOLD = wr.Config("clip.threshold")
RATE = wr.Config("optimizer.lr")
ACCUMULATION = wr.Config("accumulation.steps")
BEST_LOSS = f"best/{keys.EVAL_LOSS}"
BEST_ACCURACY = f"best/{keys.EVAL_ACCURACY}"
CLIPPED = keys.CLIP_RATIO_TOTAL
SHARE = (0.0, 1.0)
# Unicode categories of characters that wandb refuses in a name as emoji, such as = and <.
_REFUSED = {"So", "Sk", "Sm", "Sc", "Cs"}


def save(project: str, entity: str, group: str, name: str) -> str:
    """Save the workspace as a new view of its project, and return its URL; empty texts are open."""
    owner = entity or wandb.Api().default_entity
    if not owner:
        raise ValueError("the server knows no entity for this key; name one by --entity")
    title = name or (f"Clipping, {group}" if group else "Clipping")
    workspace = ws.Workspace(
        entity=owner,
        project=project,
        name="".join("-" if unicodedata.category(c) in _REFUSED else c for c in title),
        sections=_sections(),
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=50),
        runset_settings=_runs(group),
    )
    url: str = workspace.save().url  # type: ignore[no-untyped-call]
    return url


def _sections() -> list[ws.Section]:
    summary = wr.SummaryMetric
    what_if = f"^{keys.WHAT_IF}.*$"
    layers = f"^{keys.LAYER_NORM}.*$"
    percentiles: list[Any] = [f"{keys.GRAD_NORM}/{name}" for name in ("p50", "p90", "p99", "max")]
    panels: dict[str, list[wr.PanelTypes]] = {
        "Metric": [
            wr.ScatterPlot(
                title="Best loss against threshold", x=THRESHOLD, y=summary(BEST_LOSS), log_x=True
            ),
            _by_threshold("Best loss: mean and deviation over seeds", BEST_LOSS),
            _by_threshold("Share of steps clipped", CLIPPED, range_x=SHARE),
            wr.ScatterPlot(title="Accuracy", x=THRESHOLD, y=summary(BEST_ACCURACY), log_x=True),
            wr.ParameterImportancePlot(with_respect_to=BEST_LOSS),
            wr.RunComparer(diff_only=True),
        ],
        "Loss": [
            _curve("Loss of a step", keys.TRAIN_LOSS),
            _curve("Held-out loss", keys.EVAL_LOSS, log_y=True),
            _curve("Held-out accuracy", keys.EVAL_ACCURACY),
        ],
        "Gradient norm and clipping": [
            # wandb draws no line at a fixed value, but the threshold is also a metric.
            _curve("‖G‖ and the threshold", keys.GRAD_NORM, keys.CLIP_THRESHOLD, log_y=True),
            _curve("Share of steps clipped", keys.CLIP_RATIO, CLIPPED, range_y=SHARE),
            _curve("Share of what the mode clips", keys.CLIP_FRACTION, range_y=SHARE),
            _curve("Coefficient: ‖G‖ after / before clipping", keys.CLIP_COEF, range_y=SHARE),
        ],
        "Choosing a threshold": [
            wr.BarPlot(title="‖G‖ before clipping: p50, p90, p99, max", metrics=percentiles),
            _curve(
                "Share of steps that other thresholds clip (clip.what_if)", metric_regex=what_if
            ),
            _curve("‖G‖ by parameter (telemetry.per_layer)", metric_regex=layers, log_y=True),
        ],
    }
    axis = ws.SectionPanelSettings(x_axis=STEP)
    options: Any = {"is_open": True, "panel_settings": axis}
    return [ws.Section(name=name, panels=listed, **options) for name, listed in panels.items()]


def _runs(group: str) -> ws.RunsetSettings:
    """Show runs by setting: the seeds of a mode and a threshold are one group."""
    order = [
        ws.Metric("Group"),
        _stored(MODE),
        _stored(THRESHOLD),
        ws.Metric("CreatedTimestamp"),
    ]
    columns = [
        "run:displayName",
        "run:state",
        *(f"config:{_stored(key).name}" for key in (MODE, THRESHOLD, RATE, ACCUMULATION)),
        *(f"summary:{key}" for key in (BEST_LOSS, BEST_ACCURACY, CLIPPED, f"{keys.GRAD_NORM}/p50")),
    ]
    shown = f"Metric('Group') == {_quoted(group)}" if group else ""
    rising = [ws.Ordering(key, ascending=True) for key in order]
    setting = [_stored(MODE), _stored(THRESHOLD)]
    return ws.RunsetSettings(
        filters=shown, groupby=[*setting], order=rising, pinned_columns=columns
    )


def _stored(key: wr.Config) -> ws.Config:
    """Return the key as a server stores it, with ``value`` after the name of the section."""
    section, _, inner_key = key.name.partition(".")
    return ws.Config(f"{section}.value.{inner_key}")


def _quoted(text: str) -> str:
    """Return ``text`` as a literal of wandb's filter language, each character by its code."""
    return "'" + "".join(f"\\U{ord(character):08x}" for character in text) + "'"


def _by_threshold(title: str, metric: str, **options: Any) -> wr.BarPlot:
    return wr.BarPlot(
        title=title,
        metrics=[metric],
        groupby=_stored(THRESHOLD).name,
        groupby_aggfunc="mean",
        groupby_rangefunc="stddev",
        **options,
    )


def _curve(title: str, *metrics: str, **options: Any) -> wr.LinePlot:
    return wr.LinePlot(title=title, x=STEP, y=list(metrics), **options)


def main() -> None:
    """Save the workspace of the arguments PROJECT ENTITY GROUP NAME, and print its URL."""
    try:
        print(save(*sys.argv[1:]))
    except Exception as error:
        sys.exit((str(error).strip() or type(error).__name__).splitlines()[0])
