"""Group runs that differ in their seed alone into settings, and measure and compare them once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

import numpy as np

from runner.config.modes import NAMES, ModeInfo
from runner.config.notation import higher_is_better
from runner.config.problem import shown
from runner.report.look import DASHES, NEUTRAL, OTHER_DASH, ordered, rounded
from runner.report.run import Run, SweepRuns, natural
from runner.report.statistics import Difference, compare
from runner.run_folder import keys
from runner.run_folder.strict_json import number

ABSENT = "–"
CLIP = ("clip.mode", "clip.threshold")
# What decides where a run is stored and shown, not what it computes
_ASIDE = ("hydra.", "tracker.", "sweep.", "report.", "log.", "launch.", "checkpoint.")
_COLUMNS = 8  # most of configuration keys; the others are named below the table
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
DIVERGED = "diverged_at"
ALIKE = 0.05  # relative difference up to which results of single runs count as equal
Metrics = dict[str, float | None]  # of a run by columns; None where it recorded nothing
_METRICS = (keys.EVAL_LOSS, keys.EVAL_ACCURACY, keys.TRAIN_LOSS)


@dataclass(frozen=True)
class Group:
    """One setting: runs that differ in their seed alone."""

    index: int
    label: str
    runs: tuple[Run, ...]
    color: str
    dash: str

    @property
    def mode(self) -> str:
        return self.runs[0].mode

    @property
    def info(self) -> ModeInfo:
        return self.runs[0].info

    @property
    def clips(self) -> bool:
        return self.info.clips is not None

    @property
    def threshold(self) -> float | None:
        return self.runs[0].threshold


def differences(runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the configuration keys in which runs differ: those with a column, and the others."""
    if len(runs) == 1:
        return CLIP, ()
    every = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in every if _differs(key, runs)]
    typed = {key for run in runs for key in run.typed}
    chosen = _chosen_options(runs, every, typed)
    implied = {key for key in differing if key.split(".")[0] in (*chosen, "clip")}
    implied -= {*typed, *CLIP}
    listed = sorted(
        (*chosen, *(key for key in differing if key not in implied)),
        # The sort is stable: mode, threshold, then overridden keys in the order they were found.
        key=lambda key: (key != "clip.mode", key not in CLIP, key == "seed", key not in typed),
    )
    hidden = [key for key in listed[_COLUMNS:] if key != "seed"]
    return tuple(key for key in listed if key not in hidden), (*hidden, *sorted(implied))


def _chosen_options(runs: Sequence[Run], every: Iterable[str], typed: set[str]) -> list[str]:
    """Return the groups of which runs chose several options, such as ``optimizer``.

    Such a group has one column, instead of one for each key of its options.
    """
    groups = {key.split(".")[0] for key in every if "." in key} - {"clip"}
    return [key for key in sorted(typed & groups) if len({choice(run, key) for run in runs}) > 1]


def _differs(key: str, runs: Sequence[Run]) -> bool:
    """Return whether the runs have several values of a key that decides what a run computes."""
    if key.startswith(_ASIDE):
        return False
    return len({_value(run.config.get(key)) for run in runs if run.config}) > 1


def choice(run: Run, key: str) -> str:
    """Return the text of a run in a column: the value of a key, or the option of a group."""
    if key == "clip.threshold" and run.info.clips is None:
        return "none"
    if key in run.config:
        value = run.config[key]
        return f"{value:.12g}" if type(value) is float else shown(value)
    names = (run.config.get(f"{key}.{inner}") for inner in ("name", "mode", "_target_"))
    name = next((str(name).rpartition(".")[2] for name in names if name is not None), ABSENT)
    return run.typed.get(key, name)


def grouped(runs: Sequence[Run], columns: Sequence[str]) -> list[Group]:
    """Return the settings by mode and rising threshold, ``none`` last; one colour each."""
    buckets: dict[str, list[Run]] = {}
    # A run that has not begun belongs to the setting of runs with the same overrides.
    by_overrides = {_words(run): _setting(run) for run in runs if run.config}
    for run in sorted(runs, key=lambda run: not run.config):
        words = _words(run)
        setting = _setting(run) if run.config else by_overrides.get(words, words)
        buckets.setdefault(setting, []).append(run)
    settings = sorted(buckets.values(), key=lambda members: _order(members[0], columns))
    counts = Counter(members[0].mode for members in settings)
    palettes = {mode: iter(ordered(count)) for mode, count in counts.items()}
    groups = []
    for index, members in enumerate(settings):
        first = members[0]
        unclipped = first.info.clips is None and len(palettes) > 1
        color = NEUTRAL if unclipped else next(palettes[first.mode])
        dash = DASHES.get(first.info.clips, OTHER_DASH) if first.mode in NAMES else OTHER_DASH
        groups.append(Group(index, label(first, columns), tuple(members), color, dash))
    return groups


def label(run: Run, columns: Iterable[str]) -> str:
    if not run.config and not run.mode:
        return _brief(_words(run)) or "?"
    clip = run.mode if run.threshold is None else f"{run.mode} {rounded(run.threshold)}"
    parts = [clip]
    for key in columns:
        value = choice(run, key)
        if key not in ("seed", *CLIP) and value != ABSENT:
            parts.append(f"{key.rpartition('.')[2]}={_brief(value)}")
    return ", ".join(parts)


def named(groups: Iterable[Group], text: str) -> Group | None:
    """Return the setting that ``text`` names: by its label, or by the number of one of its runs."""
    for group in groups:
        names = (group.label.replace("-", "−"), *(run.number for run in group.runs))
        if text.replace("-", "−") in names:
            return group
    return None


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (n - 1); the latter is None for one value."""
    if not values or not all(math.isfinite(value) for value in values):
        return math.nan, None
    return fmean(values), stdev(values) if len(values) > 1 else None


def _brief(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _value(value: object) -> str:
    plain = json.loads(json.dumps(value, default=str))  # names of several types have no order
    return json.dumps(plain, sort_keys=True)


def _words(run: Run) -> str:
    return " ".join(word for word in run.overrides if not word.startswith("seed="))


def _setting(run: Run) -> str:
    return _value({k: v for k, v in run.config.items() if k != "seed" and not k.startswith(_ASIDE)})


def _order(run: Run, columns: Sequence[str]) -> tuple[object, ...]:
    values = tuple(natural(choice(run, key)) for key in columns if key != "seed")
    threshold = math.inf if run.threshold is None else run.threshold
    return (not run.config, run.info.clips is None, run.mode, threshold, values)


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
class Findings:
    """A sweep, grouped and measured."""

    sweep: SweepRuns
    columns: tuple[str, ...]
    keys_without_column: tuple[str, ...]
    groups: tuple[Group, ...]
    metric: str | None
    metrics: tuple[str, ...]
    measured: Mapping[str, Metrics]
    higher_is_better: bool = False
    baseline: Group | None = None
    unknown: str | None = None

    def score(self, run: Run) -> float | None:
        measured = self.measured[run.number]
        score = measured.get(f"best/{self.metric}")
        return math.nan if score is not None and measured[DIVERGED] is not None else score

    def counts(self, run: Run) -> bool:
        """Return whether a run is compared: it finished, or no run of the sweep did."""
        return run.state == "finished" or all(r.state != "finished" for r in self.sweep.runs)

    def judged(self, group: Group) -> list[Run]:
        return [run for run in group.runs if self.counts(run)]

    def seeds(self, group: Group) -> dict[Hashable, float]:
        """Return the scores of a setting's compared runs by seed, or their mean."""
        by_seed: dict[Hashable, list[float]] = {}
        for run in self.judged(group):
            score = self.score(run)
            if score is not None:
                by_seed.setdefault(run.seed, []).append(score)
        return {seed: fmean(scores) for seed, scores in by_seed.items()}

    def mean(self, group: Group) -> tuple[float, float | None]:
        """Return mean and standard deviation over a setting's seeds; NaN if a run diverged."""
        return mean_and_spread(list(self.seeds(group).values()))

    @cached_property
    def ranked(self) -> list[Group]:
        scored = [group for group in self.groups if math.isfinite(self.mean(group)[0])]
        sign = -1.0 if self.higher_is_better else 1.0
        return sorted(scored, key=lambda group: sign * self.mean(group)[0])

    @property
    def best(self) -> Group | None:
        return self.ranked[0] if self.ranked else None

    def average(self, group: Group, key: str) -> float | None:
        values = [self.measured[run.number][key] for run in self.judged(group) or group.runs]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        return fmean(finite) if finite else None

    def ratio(self, group: Group) -> float | None:
        return self.average(group, keys.CLIP_RATIO_TOTAL)

    @property
    def compared_with(self) -> Group | None:
        return self.baseline or self.best

    @cached_property
    def comparisons(self) -> dict[int, Difference]:
        """Difference of each setting to `compared_with`, by its index."""
        return self._compare(self.groups, self.baseline, False) if self.baseline else self.rivals

    @cached_property
    def rivals(self) -> dict[int, Difference]:
        return self._compare(self.groups, self.best, True) if self.best else {}

    @property
    def winner(self) -> Group | None:
        """Best setting if the intervals tell each other setting with a score from it."""
        if all(run.state != "finished" for run in self.sweep.runs):
            return None
        rivals = self.ranked[1:]
        return self.best if rivals and all(self._beats(rival) for rival in rivals) else None

    def _beats(self, rival: Group) -> bool:
        """Return whether the interval of a setting's difference says that the best one is better.

        Where seeds are missing, the common seeds alone may favour the setting with the worse mean.
        """
        difference = self.rivals.get(rival.index)
        if difference is None or not difference.seen:
            return False
        return (difference.value < 0) == self.higher_is_better

    def differ(self, groups: Sequence[Group]) -> bool:
        """Return whether seeds tell the best of ``groups`` from another one; a lost run does."""
        ranked = [group for group in self.ranked if group in groups]
        if len(ranked) < len(groups) or any(len(self.seeds(group)) < 2 for group in groups):
            means = [self.mean(group)[0] for group in groups]
            lost = not all(math.isfinite(mean) for mean in means)
            largest = max(abs(mean) for mean in means)
            return lost or max(means) - min(means) > ALIKE * largest
        differences = self._compare(ranked, ranked[0], True).values()
        return any(difference.seen for difference in differences)

    def _compare(
        self, groups: Sequence[Group], reference: Group, chosen: bool
    ) -> dict[int, Difference]:
        scores = [self.seeds(group) for group in groups]
        differences = compare(scores, groups.index(reference), chosen)
        return {groups[place].index: difference for place, difference in differences.items()}


def find(sweep: SweepRuns) -> Findings:
    """Group the runs of a sweep into settings, and measure each run."""
    runs = sweep.runs
    columns, keys_without_column = differences(runs)
    metric, maximizes = _metric(runs)
    metrics = [key for key in _METRICS if any(run.recorded(key) for run in runs)]
    if metric is not None:
        metrics = [metric, *(key for key in metrics if key != metric)]
    groups = tuple(grouped(runs, columns))
    baseline = _baseline(sweep)
    baseline_group = None if baseline is None else named(groups, baseline)
    return Findings(
        sweep=sweep,
        columns=columns,
        keys_without_column=keys_without_column,
        groups=groups,
        metric=metric,
        metrics=tuple(metrics),
        measured={run.number: measure(run, metrics, {metric: maximizes}) for run in runs},
        higher_is_better=maximizes,
        baseline=baseline_group,
        unknown=baseline if baseline_group is None else None,
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
