"""The charts of the metric against what was swept: one number, two numbers, or a choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from runner.report.charts import dots, heat, points
from runner.report.figure import Chart
from runner.report.findings import Findings
from runner.report.look import rounded
from runner.report.sections.colors import kinds_of
from runner.report.sections.tables import Tables
from runner.report.settings import RATE, THRESHOLD, Setting, choice, short

_MULTIPLES = 4  # most charts of the metric
_ROWS = 60  # most rows of a dot plot
_GRID = 0.6  # share of the pairs of two numbers that have to have run for a map


def metric_charts(tables: Tables) -> list[Chart]:
    """Return the charts of the metric, of a kind that follows what was swept.

    A note that is the same for all of them stands below the first one.
    """
    charts = _charts(tables)
    notes = {chart.note for chart in charts}
    if len(notes) > 1:
        return charts
    return [*charts[:1], *(replace(chart, note="") for chart in charts[1:])]


def _charts(tables: Tables) -> list[Chart]:
    findings = tables.findings
    scored = [setting for setting in findings.settings if _has_score(findings, setting)]
    if len(scored) < 2:
        return []
    numbers, choices = kinds_of(findings)
    if numbers and not choices:
        return _of_numbers(tables, scored, numbers)
    if len(choices) == 1 and 1 <= len(numbers) <= 2:
        charts = _by_choice(tables, scored, numbers, choices[0])
        if len(charts) in range(1, _MULTIPLES + 1):
            return charts
    return [_dots(tables, scored)]


def _has_score(findings: Findings, setting: Setting) -> bool:
    return any(findings.scores.score(run) is not None for run in setting.runs)


def _by_choice(
    tables: Tables, settings: Sequence[Setting], numbers: Sequence[str], key: str
) -> list[Chart]:
    """Return the charts of the settings with each value of a choice; none if these are many."""
    by_value: dict[str, list[Setting]] = {}
    for setting in settings:
        by_value.setdefault(choice(setting.runs[0], key), []).append(setting)
    if len(by_value) > _MULTIPLES:
        return []
    charts = []
    for value, members in by_value.items():
        charts += _of_numbers(tables, members, numbers, f" · {short(key)} {value}")
    return charts


def _of_numbers(
    tables: Tables, settings: Sequence[Setting], numbers: Sequence[str], suffix: str = ""
) -> list[Chart]:
    """Return a chart for one number, a map for two, maps for three if few, else one for each."""
    if len(numbers) == 2 and is_grid(settings, numbers):
        return [_heat(tables, settings, numbers, suffix)]
    if len(numbers) == 3:
        for key in numbers:
            maps = _maps(tables, settings, key, [number for number in numbers if number != key])
            if maps:
                return maps
    return [_points(tables, settings, key, suffix) for key in numbers[:_MULTIPLES]]


def _maps(
    tables: Tables, settings: Sequence[Setting], key: str, pair: Sequence[str]
) -> list[Chart]:
    """Return a map of two numbers for each value of a third one; none if they are no grids."""
    by_value: dict[float, list[Setting]] = {}
    for setting in sorted(settings, key=lambda setting: setting.number(key) or 0.0):
        by_value.setdefault(setting.number(key) or 0.0, []).append(setting)
    if len(by_value) > _MULTIPLES:
        return []
    if not all(is_grid(members, pair) for members in by_value.values()):
        return []
    charts = []
    for members in by_value.values():
        suffix = f" · {short(key)} {choice(members[0].runs[0], key)}"
        charts.append(_heat(tables, members, pair, suffix))
    return charts


def is_grid(settings: Sequence[Setting], numbers: Sequence[str]) -> bool:
    """Return whether most pairs of two numbers have run."""
    sizes = [len({setting.number(key) for setting in settings}) for key in numbers]
    return min(sizes) > 1 and len(settings) >= _GRID * math.prod(sizes)


def _name_of(key: str) -> str:
    return {RATE: "learning rate", THRESHOLD: "threshold"}.get(key, key)


def _better(findings: Findings) -> str:
    return f"{'higher' if findings.higher_is_better else 'lower'} is better"


def _half(tables: Tables, setting: Setting) -> float | None:
    """Return half of the interval of a setting's difference to the reference."""
    difference = tables.findings.comparisons.get(setting.index)
    if difference is None or difference.high is None:
        return None
    return difference.high - difference.value


def _slug(suffix: str) -> str:
    return suffix.replace(" · ", "-").replace(" ", "-")


def _points(tables: Tables, settings: Sequence[Setting], key: str, suffix: str) -> Chart:
    """Return the chart of the metric against a number."""
    findings = tables.findings
    placed: list[Setting] = []
    unplaced: list[Setting] = []
    for setting in settings:
        (unplaced if setting.number(key) is None else placed).append(setting)
    means = [_mean(tables, setting, key) for setting in placed]
    has_seeds = any(len(setting.runs) > 1 for setting in settings)
    note = f"One point a run, × diverged; {_better(findings)}."
    level_of_reference = None
    reference = findings.compared_with
    if reference is not None and any(mean.half is not None for mean in means):
        note += f" Bars that cross the dotted line do not differ clearly from {reference.label}."
        level_of_reference = findings.scores.mean(reference)[0]
    all_scores: list[points.Point] = []
    for setting in placed:
        all_scores += _scores(tables, setting, key)
    return points.draw(
        name=f"metric-{short(key)}{_slug(suffix)}",
        title=f"Best {findings.metric} against {_name_of(key)}{suffix}",
        note=note,
        axes=(_name_of(key), f"best {findings.metric}"),
        points=all_scores,
        means=means if has_seeds or len(findings.swept) == 1 else [],
        levels=_levels(tables, unplaced),
        names={_place(setting, key): choice(setting.runs[0], key) for setting in placed},
        published=_published(placed) if key == THRESHOLD else (),
        reference=level_of_reference,
        enclosed=_heights(tables, key) if suffix else (),
    )


def _heights(tables: Tables, key: str) -> list[float]:
    """Return all scores and ends of intervals of the page, whose charts share one axis."""
    heights = []
    for setting in tables.findings.settings:
        heights += [point.score for point in _scores(tables, setting, key)]
        mean = _mean(tables, setting, key)
        if math.isfinite(mean.mean):
            heights += points.interval(mean)
    return heights


def _published(settings: Sequence[Setting]) -> Sequence[tuple[float, str]]:
    """Return the published thresholds of the first mode that clips."""
    for setting in settings:
        if setting.clips:
            return setting.info.published
    return ()


def _place(setting: Setting, key: str) -> float:
    """Return where a setting stands on the axis of a number."""
    return setting.number(key) or math.nan


def _scores(tables: Tables, setting: Setting, key: str) -> list[points.Point]:
    """Return the score of each run of a setting."""
    findings = tables.findings
    scores = []
    for run in setting.runs:
        score = findings.scores.score(run)
        if score is None:
            continue
        hollow = not findings.scores.counts(run)
        text = f"{setting.label}, run {run.number}: {findings.metric} {rounded(score)}"
        point = points.Point(
            entry=tables.entry(setting),
            run=run.number,
            place=_place(setting, key),
            score=score,
            text=f"{text} ({run.state})" if hollow else text,
            hollow=hollow,
        )
        scores.append(point)
    return scores


def _mean(tables: Tables, setting: Setting, key: str) -> points.Mean:
    """Return the mean of a setting with its interval."""
    mean, _ = tables.findings.scores.mean(setting)
    return points.Mean(
        entry=tables.entry(setting),
        place=_place(setting, key),
        mean=mean,
        half=_half(tables, setting),
        text=tables.text_of(setting),
    )


def _levels(tables: Tables, settings: Sequence[Setting]) -> list[points.Level]:
    """Return the means of settings that have no place on the axis."""
    levels = []
    for setting in settings:
        mean, _ = tables.findings.scores.mean(setting)
        if math.isfinite(mean):
            levels.append(points.Level(tables.entry(setting), mean, tables.text_of(setting)))
    return levels


def _heat(
    tables: Tables, settings: Sequence[Setting], numbers: Sequence[str], suffix: str
) -> Chart:
    findings = tables.findings
    across = THRESHOLD if THRESHOLD in numbers else numbers[0]
    [up] = [key for key in numbers if key != across]

    def values_of(key: str) -> list[str]:
        ordered_settings = sorted(settings, key=lambda setting: setting.number(key) or math.inf)
        return list(dict.fromkeys(choice(setting.runs[0], key) for setting in ordered_settings))

    cells = []
    for setting in settings:
        first = setting.runs[0]
        cells.append(
            heat.Cell(
                entry=tables.entry(setting),
                x=choice(first, across),
                y=choice(first, up),
                mean=findings.scores.mean(setting)[0],
                stable=not findings.scores.diverged(setting),
                text=tables.text_of(setting),
            )
        )
    lost = [setting for setting in findings.settings if findings.scores.diverged(setting)]
    note = f"Mean over seeds, {_better(findings)}."
    if lost:
        note += f" Hatched: a seed diverged. Bar: the highest {_name_of(up)} at which every seed "
        note += f"stayed stable, for each {_name_of(across)}."
    return heat.draw(
        name=f"metric-map{_slug(suffix)}",
        title=f"Best {findings.metric} by {_name_of(up)} and {_name_of(across)}{suffix}",
        note=note,
        axes=(_name_of(across), _name_of(up)),
        xs=values_of(across),
        ys=values_of(up),
        cells=cells,
        all_means=[findings.scores.mean(setting)[0] for setting in findings.settings],
        limits_marked=bool(lost),
        lower_is_better=not findings.higher_is_better,
    )


def _dots(tables: Tables, settings: Sequence[Setting]) -> Chart:
    """Return the chart of settings as rows: the difference of each to the reference."""
    findings = tables.findings
    listed = [setting for setting in findings.listed if setting in settings]
    reference = findings.compared_with
    name = reference.label if reference else "the best"
    note = f"Difference to {name}, seed by seed, with its 95 % interval; {_better(findings)}."
    if any(findings.scores.diverged(setting) for setting in listed):
        note += " × diverged."
    if len(listed) > _ROWS:
        note += f" {len(listed) - _ROWS} more settings stand in the table."
    return dots.draw(
        name="metric-settings",
        title=f"Best {findings.metric}: difference to {name}",
        note=note,
        axis=f"difference in {findings.metric}",
        rows=[_row(tables, setting) for setting in listed[:_ROWS]],
    )


def _row(tables: Tables, setting: Setting) -> dots.Row:
    """Return the row of a setting."""
    findings = tables.findings
    return dots.Row(
        entry=tables.entry(setting),
        difference=_difference(findings, setting),
        half=_half(tables, setting),
        seeds=_paired(findings, setting) if len(setting.runs) > 1 else [],
        text=tables.text_of(setting),
        diverged=bool(findings.scores.diverged(setting)),
    )


def _difference(findings: Findings, setting: Setting) -> float:
    """Return the difference of a mean to the reference, NaN without a mean."""
    mean, _ = findings.scores.mean(setting)
    reference = findings.compared_with
    if reference is None or not math.isfinite(mean):
        return math.nan
    difference = findings.comparisons.get(setting.index)
    if difference is not None:
        return difference.value
    return mean - findings.scores.mean(reference)[0]


def _paired(findings: Findings, setting: Setting) -> list[tuple[str, float]]:
    """Return the difference of each run to the reference's run of the same seed."""
    reference = findings.compared_with
    if reference is None:
        return []
    scores = findings.scores.seeds(reference)
    differences = []
    for run in findings.scores.judged(setting):
        score = findings.scores.score(run)
        base = scores.get(run.seed)
        if score is not None and base is not None and math.isfinite(score):
            differences.append((run.number, score - base))
    return differences
