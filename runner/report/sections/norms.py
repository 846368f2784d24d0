"""The charts of ‖G‖: over the steps with its thresholds, and its distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from runner.report.charts import curves, norms
from runner.report.charts.curves import Curve, Level, Mark
from runner.report.figure import Chart, Entry
from runner.report.look import percent
from runner.report.run import EMPTY, Floats, Run, Series
from runner.report.sections.tables import Tables, before_lost
from runner.report.settings import Setting
from runner.run_folder import keys

_LEVELS = 8  # most settings whose thresholds widen the axis of norms
_MARKS = 300  # most marked steps of a run
_SKIPPED = {
    keys.CLIP_SKIPPED: "left out as a spike (clip.skip)",
    keys.GRAD_NONFINITE: "left out: the gradient was not finite",
}


def norm_chart(tables: Tables) -> Chart | None:
    """Return the chart of ‖G‖ with the thresholds that limit it."""
    recorded: list[Curve] = []
    until: list[Floats] = []
    levels: list[Level] = []
    marks: list[Mark] = []
    settings = tables.findings.settings
    for setting in settings:
        entry = tables.entry(setting)
        for run in setting.runs:
            series = norm(run)
            if len(series):
                recorded.append(tables.joined(entry, run, series, keys.GRAD_NORM))
                until.append(before_lost(run, series))
                marks += _skipped(entry, run, series)
        if limits_shown(setting):
            levels += _levels(entry, setting)
    if not recorded:
        return None
    if len(settings) <= _LEVELS:
        for level in levels:
            until.append(_values_of(level))
    return curves.draw(
        name="norm",
        title="Gradient norm ‖G‖",
        note=_note(tables, marked=bool(marks)),
        axis="‖G‖",
        curves=recorded,
        levels=levels,
        marks=marks,
        smooth=True,
        log=True,
        until=until,
    )


def _note(tables: Tables, marked: bool) -> str:
    """Return what the chart shows: how modes limit ‖G‖, Muon's part, skipped steps."""
    clipping = [setting for setting in tables.findings.settings if setting.clips]
    notes = {setting.info.note for setting in clipping} or {"These clip nothing."}
    limits = notes.pop() if len(notes) == 1 else "Dashed: thresholds that limit it."
    note = f"Before clipping, geometric mean. {limits}"
    if any(len(run.of(keys.GRAD_NORM_SCALED)) for run in tables.findings.sweep.runs):
        note += " Where Muon steps matrices: the norm of all other gradients, which λ limits."
    return f"{note} △ Steps that were left out." if marked else note


def norm(run: Run) -> Series:
    """Return ‖G‖ of each row, or the highest since the row before if rows skip steps."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    scaled = run.of(keys.GRAD_NORM_SCALED)
    highest = run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) and not len(scaled) else limited(run)


def limited(run: Run) -> Series:
    """Return the norm of each row that λ limits: ‖G‖, without gradients that are not scaled."""
    return run.series.get(keys.GRAD_NORM_SCALED, run.of(keys.GRAD_NORM))


def moving(run: Run) -> Series:
    """Return the thresholds of a run's steps; empty if they are all the same."""
    thresholds = run.of(keys.CLIP_THRESHOLD)
    return thresholds if len(thresholds.finite) and np.ptp(thresholds.finite) else EMPTY


def limits_shown(setting: Setting) -> bool:
    """Return whether the thresholds of a setting are limits of ‖G‖, which its chart shows."""
    info = setting.info
    moves = info.follows == "norms" or (info.follows == "steps" and info.unit == "‖G‖")
    return setting.clips and (moves or info.limits_norm)


def _values_of(level: Level) -> Floats:
    """Return the finite values of a threshold."""
    return level.value.finite if isinstance(level.value, Series) else np.array([level.value])


def _levels(entry: Entry, setting: Setting) -> Iterator[Level]:
    moving_runs = [run for run in setting.runs if len(moving(run))]
    for run in moving_runs[:1]:
        yield Level(entry, run.number if len(setting.runs) == 1 else None, moving(run))
    if not moving_runs and setting.info.limits_norm and setting.threshold is not None:
        yield Level(entry, None, setting.threshold)


def _skipped(entry: Entry, run: Run, series: Series) -> Iterator[Mark]:
    """Yield the steps that a run left out, each with its reason."""
    highest = float(series.finite.max()) if len(series.finite) else 1.0
    for key, reason in _SKIPPED.items():
        counts = run.of(key)
        if not len(counts):
            continue
        new = np.diff(counts.values, prepend=0.0) > 0
        for step in counts.steps[new][:_MARKS]:
            position = int(np.searchsorted(series.steps, step))
            value = series.values[position] if position < len(series) else math.nan
            height = float(value) if math.isfinite(value) and value > 0 else highest
            text = f"{entry.label}, run {run.number}: step {step:,.0f} {reason}"
            yield Mark(entry, run.number, float(step), height, text)


def finite_norms(setting: Setting) -> Floats:
    """Return all finite ‖G‖ > 0 of a setting's runs, before clipping; see :func:`limited`."""
    finite = np.concatenate([limited(run).finite for run in setting.runs])
    return np.asarray(finite[finite > 0])


def distribution_chart(tables: Tables) -> Chart | None:
    """Return the distribution of ‖G‖ of the setting that clipping changed least."""
    findings = tables.findings
    measured = [setting for setting in findings.settings if len(finite_norms(setting))]
    if not measured:
        return None
    # The setting that clipping changed least: without clipping, else fewest steps.
    reference = min(measured, key=lambda s: (s.clips, findings.scores.ratio(s) or 0.0))
    values = finite_norms(reference)
    thresholds = []
    for setting in findings.settings:
        if setting.info.limits_norm and setting.threshold is not None:
            thresholds.append((tables.entry(setting), setting.threshold))
    note = f"All steps of “{reference.label}”, {len(values):,} norms."
    ratio = findings.scores.ratio(reference)
    if ratio:
        note += f" No run went unclipped; this one was clipped least ({percent(ratio)} of steps)."
    return norms.draw(
        name="histogram",
        title="Distribution of ‖G‖" + ("" if reference.clips else " without clipping"),
        note=note,
        norms=values,
        thresholds=thresholds,
    )
