"""Measure the runs of a sweep once, and rank and compare its settings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

import numpy as np

from runner.config.notation import higher_is_better
from runner.report.run import Run, SweepRuns
from runner.report.settings import Setting, differences, named, settings_of, swept_keys
from runner.report.statistics import Difference, compare
from runner.run_folder import keys
from runner.run_folder.strict_json import number

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
DIVERGED = "diverged_at"
DONE = ("finished", "unknown")
Metrics = dict[str, float | None]  # of a run by columns; None where it recorded nothing
_METRICS = (keys.EVAL_LOSS, keys.EVAL_ACCURACY, keys.TRAIN_LOSS)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (n - 1); the latter is None for one value."""
    if not values or not all(math.isfinite(value) for value in values):
        return math.nan, None
    return fmean(values), stdev(values) if len(values) > 1 else None


def measure(run: Run, metrics: Sequence[str], maximized: Mapping[str | None, bool]) -> Metrics:
    """Return the metrics of a run, from its rows where it was killed before it wrote a summary."""
    summary = run.summary
    coef = run.of(keys.CLIP_COEF).finite
    measured: Metrics = {}
    for key in metrics:
        final = _last(run, summary.get("final"), key)
        higher = maximized.get(key, higher_is_better(key))
        measured[f"best/{key}"] = _best(run, key, higher, final)
        measured[f"final/{key}"] = final
    for key in (keys.CLIP_RATIO_TOTAL, keys.GRAD_NONFINITE, keys.CLIP_SKIPPED):
        measured[key] = _last(run, summary, key)
    norms = run.of(keys.GRAD_NORM).finite
    recorded = summary.get(keys.GRAD_NORM)
    for name, point in PERCENTILES.items():
        norm = number(recorded.get(name)) if isinstance(recorded, dict) else None
        from_rows = float(np.percentile(norms, point)) if len(norms) else None
        measured[f"{keys.GRAD_NORM}/{name}"] = from_rows if norm is None else norm
    wall = number(summary.get(keys.WALL_SECONDS, run.status.get(keys.WALL_SECONDS)))
    return measured | {
        keys.CLIP_FRACTION: number(summary.get(keys.CLIP_FRACTION)) if run.info.parts else None,
        keys.CLIP_COEF: float(coef.mean()) if len(coef) else None,
        DIVERGED: run.diverged_at,
        "steps": run.steps or None,
        "seconds": wall,
    }


def _best(run: Run, key: str, higher: bool, final: float | None) -> float | None:
    # The summary keeps the best value of the metric's usual direction.
    recorded = run.summary.get("best") if higher == higher_is_better(key) else None
    best = number(recorded.get(key)) if isinstance(recorded, dict) else None
    finite = run.of(key).finite
    if best is None and len(finite):
        best = float(finite.max() if higher else finite.min())
    lost = len(run.of(key)) or (final is not None and math.isnan(final))
    return math.nan if best is None and lost else best


def _last(run: Run, record: object, key: str) -> float | None:
    value = number(record.get(key)) if isinstance(record, Mapping) else None
    rows = run.of(key).values
    return float(rows[-1]) if value is None and len(rows) else value


@dataclass(frozen=True)
class Scores:
    """The numbers of runs, and of settings as means over their runs.

    Attributes:
        metric: name of the metric by which settings are compared.
        measured: what each run has measured, by its number.
        has_finished: whether any run has come to its end; of rows of somebody's own loop this is
            assumed.
    """

    metric: str | None
    measured: Mapping[str, Metrics]
    has_finished: bool

    def score(self, run: Run) -> float | None:
        """Return the best value of the metric; NaN for a run that diverged."""
        measured = self.measured[run.number]
        score = measured.get(f"best/{self.metric}")
        return math.nan if score is not None and measured[DIVERGED] is not None else score

    def counts(self, run: Run) -> bool:
        """Return whether a run is compared: it finished, or no run of the sweep did."""
        return run.state in DONE or not self.has_finished

    def judged(self, setting: Setting) -> list[Run]:
        """Return the runs of a setting that are compared."""
        return [run for run in setting.runs if self.counts(run)]

    def diverged(self, setting: Setting) -> list[Run]:
        """Return the runs of a setting whose training loss was lost."""
        return [run for run in setting.runs if self.measured[run.number][DIVERGED] is not None]

    def seeds(self, setting: Setting) -> dict[Hashable, float]:
        """Return the scores of a setting's compared runs by seed, or their mean."""
        by_seed: dict[Hashable, list[float]] = {}
        for run in self.judged(setting):
            score = self.score(run)
            if score is not None:
                by_seed.setdefault(run.seed, []).append(score)
        return {seed: fmean(scores) for seed, scores in by_seed.items()}

    def mean(self, setting: Setting) -> tuple[float, float | None]:
        """Return mean and standard deviation over a setting's seeds; NaN if a run diverged."""
        return mean_and_spread(list(self.seeds(setting).values()))

    def average(self, setting: Setting, key: str) -> float | None:
        """Return the mean of a metric over the runs of a setting; None if none has measured it."""
        values = [self.measured[run.number][key] for run in self.judged(setting) or setting.runs]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        return fmean(finite) if finite else None

    def ratio(self, setting: Setting) -> float | None:
        """Return the mean share of steps that were clipped."""
        return self.average(setting, keys.CLIP_RATIO_TOTAL)

    def share(self, setting: Setting) -> float | None:
        """Return the mean share clipped of what the mode clips: steps, elements or units."""
        fraction = self.average(setting, keys.CLIP_FRACTION)
        return self.ratio(setting) if fraction is None else fraction


@dataclass(frozen=True)
class Findings:
    """A sweep, by settings and measured.

    Attributes:
        columns: keys in which runs differ, and ``keys_without_column`` those too many to show.
        swept: keys in which settings differ, most important first.
        metric: name of the metric by which settings are compared.
        unknown: the baseline that was asked for, if there is no such setting.
    """

    sweep: SweepRuns
    columns: tuple[str, ...]
    keys_without_column: tuple[str, ...]
    swept: tuple[str, ...]
    settings: tuple[Setting, ...]
    metric: str | None
    metrics: tuple[str, ...]
    measured: Mapping[str, Metrics]
    higher_is_better: bool = False
    baseline: Setting | None = None
    unknown: str | None = None

    @cached_property
    def scores(self) -> Scores:
        """The numbers of the runs and of the settings."""
        has_finished = any(run.state in DONE for run in self.sweep.runs)
        return Scores(self.metric, self.measured, has_finished)

    @cached_property
    def ranked(self) -> list[Setting]:
        """Settings of which no seed diverged, best first."""
        means = {setting.index: self.scores.mean(setting)[0] for setting in self.settings}
        scored = [setting for setting in self.settings if math.isfinite(means[setting.index])]
        sign = -1.0 if self.higher_is_better else 1.0
        return sorted(scored, key=lambda setting: sign * means[setting.index])

    @property
    def best(self) -> Setting | None:
        """The setting with the best mean."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def listed(self) -> list[Setting]:
        """All settings, best first; those without a mean last."""
        return [*self.ranked, *(s for s in self.settings if s not in self.ranked)]

    @property
    def compared_with(self) -> Setting | None:
        """The setting that others are compared with: the baseline, or the best one."""
        return self.baseline or self.best

    @cached_property
    def comparisons(self) -> dict[int, Difference]:
        """Difference of each setting to `compared_with`, by its index."""
        return self.differences_to(self.baseline) if self.baseline else self.rivals

    @cached_property
    def rivals(self) -> dict[int, Difference]:
        """Difference of each setting to the best one, by its index."""
        return self.differences_to(self.best) if self.best else {}

    def differences_to(self, reference: Setting) -> dict[int, Difference]:
        """Return the difference of each setting to another one, by its index."""
        scores = [self.scores.seeds(setting) for setting in self.settings]
        return compare(scores, reference.index)

    @cached_property
    def winner(self) -> Setting | None:
        """Best setting if each other setting with a mean is clearly worse."""
        if not self.scores.has_finished:
            return None
        rivals = self.ranked[1:]
        return self.best if rivals and all(self.is_worse(rival) for rival in rivals) else None

    def is_worse(self, setting: Setting) -> bool:
        """Return whether a setting is clearly worse than the best one.

        Where seeds are missing, the common seeds alone may favour the setting with the worse mean.
        """
        difference = self.rivals.get(setting.index)
        if difference is None or not difference.seen:
            return False
        return (difference.value < 0) == self.higher_is_better

    @cached_property
    def identical(self) -> bool:
        """Whether all settings have the same scores, such as thresholds that clip no step."""
        rivals = self.ranked[1:]
        if not rivals or len(self.ranked) < len(self.settings) or self.best is None:
            return False
        scores = self.scores.seeds(self.best)
        return all(self.scores.seeds(setting) == scores for setting in rivals)


def find(sweep: SweepRuns) -> Findings:
    """Group the runs of a sweep into settings, and measure each run."""
    runs = sweep.runs
    columns, keys_without_column = differences(runs)
    metric, maximizes = _metric(runs)
    metrics = [key for key in _METRICS if any(run.recorded(key) for run in runs)]
    if metric is not None:
        metrics = [metric, *(key for key in metrics if key != metric)]
    settings = settings_of(runs, columns)
    baseline = _baseline(sweep)
    baseline_setting = None if baseline is None else named(settings, baseline)
    swept = swept_keys([setting.runs[0] for setting in settings], columns)
    return Findings(
        sweep=sweep,
        columns=columns,
        keys_without_column=keys_without_column,
        swept=tuple(swept),
        settings=settings,
        metric=metric,
        metrics=tuple(metrics),
        measured={run.number: measure(run, metrics, {metric: maximizes}) for run in runs},
        higher_is_better=maximizes,
        baseline=baseline_setting,
        unknown=baseline if baseline_setting is None else None,
    )


def _metric(runs: Sequence[Run]) -> tuple[str | None, bool]:
    """Return the metric by which settings are compared, and whether a higher value is better."""
    objectives = [run.config.get("sweep.objective") for run in runs]
    candidates = [key for key in objectives if isinstance(key, str)]
    candidates += [keys.EVAL_LOSS, keys.TRAIN_LOSS]
    metric = next((key for key in candidates if any(run.recorded(key) for run in runs)), None)
    directions = {run.config.get("sweep.direction") for run in runs} - {None}
    if metric in objectives and len(directions) == 1:
        return metric, directions == {"maximize"}
    return metric, higher_is_better(metric or "")


def _baseline(sweep: SweepRuns) -> str | None:
    """Return the name of the baseline setting that the page or a run's configuration asks for."""
    if sweep.baseline or sweep.single:
        return sweep.baseline
    for run in sweep.runs:
        configured = run.config.get("report.baseline")
        if configured is not None:
            return str(configured)
    return None
