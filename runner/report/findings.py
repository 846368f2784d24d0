"""What a sweep's runs come to, worked out once and read by every part of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runner.config.objective import higher_is_better
from runner.report.figures import RunMetrics, figures
from runner.report.groups import Differences, Group, differences, grouped, mean_and_spread
from runner.report.notation import percent
from runner.report.run import Run
from runner.report.series import Floats
from runner.report.sweep import SweepRuns
from runner.run_folder import keys

_METRICS = (keys.EVAL_LOSS, keys.EVAL_ACCURACY, keys.TRAIN_LOSS)


@dataclass(frozen=True)
class Findings:
    """A sweep, grouped and measured.

    Attributes:
        sweep: as read.
        differences: the keys that tell runs apart.
        groups: settings in their order.
        metric: the key that settings are judged by; None where no run recorded any.
        metrics: the keys the table gives final and best values of, ``metric`` first.
        figures: of each run, by its number.
        higher_is_better: whether a larger ``metric`` is the better one.
    """

    sweep: SweepRuns
    differences: Differences
    groups: tuple[Group, ...]
    metric: str | None
    metrics: tuple[str, ...]
    figures: Mapping[str, RunMetrics]
    higher_is_better: bool = False

    def score(self, run: Run) -> float | None:
        """The best value of the metric in a run; None where it recorded none.

        NaN where the run diverged: what it reached before is no result of its setting.
        """
        of = self.figures[run.number]
        score = of.best.get(self.metric or "")
        return math.nan if score is not None and of.diverged_at is not None else score

    def counts(self, run: Run) -> bool:
        """Whether a run is judged: it finished, or none did and all show how far they came."""
        return run.state == "finished" or all(r.state != "finished" for r in self.sweep.runs)

    def judged(self, group: Group) -> list[Run]:
        """The runs of a setting that count."""
        return [run for run in group.runs if self.counts(run)]

    def scores(self, group: Group) -> list[float]:
        """The scores of a setting's judged runs that have one."""
        scores = [self.score(run) for run in self.judged(group)]
        return [score for score in scores if score is not None]

    def mean(self, group: Group) -> tuple[float, float | None]:
        """Mean score of a setting and its spread over seeds; NaN where a seed was lost."""
        scores = self.scores(group)
        return mean_and_spread(scores) if scores else (math.nan, None)

    def ranked(self) -> list[Group]:
        """The settings with a finite mean score, the best first."""
        scored = [group for group in self.groups if math.isfinite(self.mean(group)[0])]
        sign = -1.0 if self.higher_is_better else 1.0
        return sorted(scored, key=lambda group: sign * self.mean(group)[0])

    def ratio(self, group: Group) -> float | None:
        """Mean share of steps that clipping changed over a setting's runs."""
        return _mean(self.figures[run.number].ratio for run in group.runs)

    def fraction(self, group: Group) -> float | None:
        """Mean share clipped of what the mode clips, over a setting's runs."""
        return _mean(self.figures[run.number].fraction for run in group.runs)

    def clipped(self, group: Group) -> str | None:
        """How much a setting clipped, of what its mode clips: ``31 % of its steps``."""
        if group.mode == "none":
            return None
        parts = {"value": "elements", "adaptive": "units"}.get(group.mode)
        share = self.fraction(group)
        if parts is not None and share is not None:
            return f"{percent(share)} of the {parts} on average"
        ratio = self.ratio(group)
        return None if ratio is None else f"{percent(ratio)} of its steps"

    def differ(self, one: Group, other: Group) -> bool:
        """Whether two settings have different scores, as far as their seeds tell.

        With several seeds each, the difference of the means has to exceed the sum of their
        standard deviations. Single runs differ where their scores do.
        """
        (first, spread), (second, wide) = self.mean(one), self.mean(other)
        if not (math.isfinite(first) and math.isfinite(second)):
            return one is not other
        return abs(first - second) >= (spread or 0.0) + (wide or 0.0) and first != second

    def reference(self) -> Group | None:
        """The setting whose norms clipping disturbed least: no clipping, or the fewest steps."""
        recorded = [group for group in self.groups if len(norms(group))]
        if not recorded:
            return None
        return min(recorded, key=lambda group: (group.mode != "none", self.ratio(group) or 0.0))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def norms(group: Group) -> Floats:
    """All finite ‖G‖ above 0 of a setting's runs, before clipping."""
    found = [run.of(keys.GRAD_NORM).finite for run in group.runs]
    together = np.concatenate(found) if found else np.empty(0)
    return np.asarray(together[together > 0])


def find(sweep: SweepRuns) -> Findings:
    """Group the runs of a sweep and measure each."""
    runs = sweep.runs
    differing = differences(runs) if runs else Differences(())
    metric = _objective(runs)
    recorded = [key for key in _METRICS if any(_records(run, key) for run in runs)]
    metrics = list(dict.fromkeys([*([metric] if metric else []), *recorded]))
    asked = {run.config.get("sweep.direction") for run in runs} - {None}
    maximizes = higher_is_better(metric or "")
    if metric in {run.config.get("sweep.objective") for run in runs} and len(asked) == 1:
        maximizes = asked == {"maximize"}
    return Findings(
        sweep=sweep,
        differences=differing,
        groups=tuple(grouped(runs, differing.columns)),
        metric=metric,
        metrics=tuple(metrics),
        figures={run.number: figures(run, metrics, {metric: maximizes}) for run in runs},
        higher_is_better=maximizes,
    )


def _objective(runs: Sequence[Run]) -> str | None:
    """The configured objective where runs recorded it, else the first loss they did."""
    asked = [run.config.get("sweep.objective") for run in runs]
    candidates = [*(key for key in asked if isinstance(key, str)), keys.EVAL_LOSS, keys.TRAIN_LOSS]
    for key in dict.fromkeys(candidates):
        if any(_records(run, key) for run in runs):
            return key
    return None


def _records(run: Run, key: str) -> bool:
    final = run.summary.get("final")
    return len(run.of(key)) > 0 or (isinstance(final, dict) and key in final)
