"""The charts of losses and metrics over steps."""

from __future__ import annotations

from runner.report.charts import curves
from runner.report.figure import Chart
from runner.report.run import Floats
from runner.report.sections.tables import Tables, before_lost
from runner.run_folder import keys

_TITLES = {
    keys.EVAL_LOSS: "Evaluation loss",
    keys.EVAL_ACCURACY: "Accuracy",
    keys.TRAIN_LOSS: "Training loss",
}


def loss_charts(tables: Tables) -> list[Chart]:
    """Return a chart for the metric, and for each loss that was recorded."""
    metric = tables.findings.metric
    names = dict.fromkeys([*([metric] if metric else []), *_TITLES])
    charts = [_loss_chart(tables, key) for key in names]
    return [chart for chart in charts if chart is not None]


def _loss_chart(tables: Tables, key: str) -> Chart | None:
    settings = tables.findings.settings
    recorded = tables.curves(key, settings)
    if not recorded:
        return None
    until: list[Floats] = []
    for setting in settings:
        for run in setting.runs:
            until.append(before_lost(run, run.of(key)))
    accuracy = key == keys.EVAL_ACCURACY
    training = key == keys.TRAIN_LOSS
    title = _TITLES.get(key, key)
    return curves.draw(
        name=key.replace("/", "-").removeprefix("train-"),
        title=title,
        note="Mean over the steps around." if training else "Measured on held-out data.",
        axis=title.lower(),
        curves=recorded,
        smooth=training,
        percent=accuracy,
        log=False if accuracy else None,
        until=() if accuracy else until,  # no accuracy is cut off
    )
