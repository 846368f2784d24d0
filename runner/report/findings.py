"""Group and measure the runs of a sweep once, for all parts of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from runner.config.objective import higher_is_better
from runner.report.groups import Differences, Group, differences, grouped, mean_and_spread
from runner.report.notation import percent
from runner.report.run import Run
from runner.report.run_metrics import RunMetrics, measure
from runner.report.series import Floats
from runner.report.sweep import SweepRuns
from runner.run_folder import keys

_METRICS = (keys.EVAL_LOSS, keys.EVAL_ACCURACY, keys.TRAIN_LOSS)


@dataclass(frozen=True)
class Findings:
    """A sweep, grouped and measured.

    Attributes:
        sweep: runs of the page.
        differences: configuration keys in which runs differ.
        groups: settings in order.
        metric: key of the metric that settings are compared by; None if no run recorded one.
        metrics: keys that the table shows final and best values of, ``metric`` first.
        measured: metrics of each run by its number.
        higher_is_better: whether a higher ``metric`` is the better one.
    """

    sweep: SweepRuns
    differences: Differences
    groups: tuple[Group, ...]
    metric: str | None
    metrics: tuple[str, ...]
    measured: Mapping[str, RunMetrics]
    higher_is_better: bool = False

    def score(self, run: Run) -> float | None:
        """Return the best value of the metric in a run; None if it recorded none.

        NaN if the run diverged: what it reached before is no result of its setting.
        """
        measured = self.measured[run.number]
        score = measured.best.get(self.metric or "")
        return math.nan if score is not None and measured.diverged_at is not None else score

    def counts(self, run: Run) -> bool:
        """Return whether a run is compared: it finished, or no run of the sweep did."""
        return run.state == "finished" or all(r.state != "finished" for r in self.sweep.runs)

    def judged(self, group: Group) -> list[Run]:
        """Return the runs of a setting that are compared."""
        return [run for run in group.runs if self.counts(run)]

    def scores(self, group: Group) -> list[float]:
        """Return the scores of a setting's compared runs."""
        return [score for run in self.judged(group) if (score := self.score(run)) is not None]

    def mean(self, group: Group) -> tuple[float, float | None]:
        """Return mean and standard deviation of a setting's scores; NaN if a run diverged."""
        scores = self.scores(group)
        return mean_and_spread(scores) if scores else (math.nan, None)

    @cached_property
    def ranked(self) -> list[Group]:
        """Settings with a finite mean score, the best first."""
        scored = [group for group in self.groups if math.isfinite(self.mean(group)[0])]
        sign = -1.0 if self.higher_is_better else 1.0
        return sorted(scored, key=lambda group: sign * self.mean(group)[0])

    @property
    def best(self) -> Group | None:
        """Setting with the best mean score; None if no setting has a finite one."""
        return self.ranked[0] if self.ranked else None

    def ratio(self, group: Group) -> float | None:
        """Return the mean share of steps that clipping changed over a setting's runs."""
        return _mean(self.measured[run.number].ratio for run in group.runs)

    def clipped(self, group: Group) -> str | None:
        """Return how much a setting clipped, such as ``31 % of its steps``."""
        if not group.clips:
            return None
        share = _mean(self.measured[run.number].fraction for run in group.runs)
        if group.info.parts is not None and share is not None:
            return f"{percent(share)} of the {group.info.parts} on average"
        ratio = self.ratio(group)
        return None if ratio is None else f"{percent(ratio)} of its steps"

    def differ(self, one: Group, other: Group) -> bool:
        """Return whether the scores of two settings differ by more than their seeds do.

        With several seeds each, the difference of the means must exceed the sum of their standard
        deviations. Single runs differ if their scores do.
        """
        (first, spread), (second, wide) = self.mean(one), self.mean(other)
        if not (math.isfinite(first) and math.isfinite(second)):
            return one is not other
        return abs(first - second) >= (spread or 0.0) + (wide or 0.0) and first != second

    def reference(self) -> Group | None:
        """Return the setting that clipping changed least: without clipping, else fewest steps."""
        return min(
            (group for group in self.groups if len(norms(group))),
            key=lambda group: (group.clips, self.ratio(group) or 0.0),
            default=None,
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def norms(group: Group) -> Floats:
    """Return all finite ‖G‖ > 0 of a setting's runs, before clipping."""
    found = np.concatenate([run.of(keys.GRAD_NORM).finite for run in group.runs])
    return np.asarray(found[found > 0])


def find(sweep: SweepRuns) -> Findings:
    """Group the runs of a sweep and measure each."""
    runs = sweep.runs
    differing = differences(runs)
    metric = _objective(runs)
    recorded = [key for key in _METRICS if any(_records(run, key) for run in runs)]
    metrics = tuple(dict.fromkeys(filter(None, (metric, *recorded))))
    asked = {run.config.get("sweep.direction") for run in runs} - {None}
    maximizes = higher_is_better(metric or "")
    if metric in {run.config.get("sweep.objective") for run in runs} and len(asked) == 1:
        maximizes = asked == {"maximize"}
    return Findings(
        sweep=sweep,
        differences=differing,
        groups=tuple(grouped(runs, differing.columns)),
        metric=metric,
        metrics=metrics,
        measured={run.number: measure(run, metrics, {metric: maximizes}) for run in runs},
        higher_is_better=maximizes,
    )


def _objective(runs: Sequence[Run]) -> str | None:
    """Return the configured objective if runs recorded it, else the first loss they recorded."""
    asked = [run.config.get("sweep.objective") for run in runs]
    candidates = [*(key for key in asked if isinstance(key, str)), keys.EVAL_LOSS, keys.TRAIN_LOSS]
    return next((key for key in candidates if any(_records(run, key) for run in runs)), None)


def _records(run: Run, key: str) -> bool:
    final = run.summary.get("final")
    return len(run.of(key)) > 0 or (isinstance(final, dict) and key in final)
