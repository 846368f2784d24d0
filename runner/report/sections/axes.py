"""The horizontal axis of curves: samples, tokens and seconds at some steps."""

from __future__ import annotations

import numpy as np

from runner.report.findings import Findings
from runner.report.run import Series
from runner.run_folder import keys


def axes_of(findings: Findings) -> dict[str, dict[str, list[list[float]]]]:
    """Return samples, tokens and seconds at some steps, by setting."""
    axes = {}
    for setting in findings.settings:
        run = max(setting.runs, key=lambda run: run.steps)
        spent = run.of(keys.TIME_STEP)
        columns = {
            "samples": run.of(keys.TRAIN_SAMPLES),
            "tokens": run.of(keys.TRAIN_TOKENS),
            "seconds": _elapsed(spent),
        }
        axes[str(setting.index)] = {
            name: _thin(series) for name, series in columns.items() if len(series) > 1
        }
    return axes


def _elapsed(spent: Series) -> Series:
    """Return the seconds since the first step, from the mean duration of steps."""
    passed = np.diff(spent.steps, prepend=0.0)
    seconds = np.where(np.isfinite(spent.values), spent.values, 0.0)
    return Series(spent.steps, np.cumsum(passed * seconds))


def _thin(series: Series) -> list[list[float]]:
    places = np.unique(np.linspace(0, len(series) - 1, min(40, len(series))).round().astype(int))
    values = [float(f"{value:.6g}") for value in series.values[places]]
    return [series.steps[places].tolist(), values]
