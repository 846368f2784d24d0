"""The charts of the page: plain tables of a sweep's findings, each drawn by a module of `charts`.

Which chart shows the metric follows what was swept: one number, two numbers, or a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runner.config.reading import DamagedFile
from runner.report.charts import curves, dots, heat, layers, norms, points, what_if
from runner.report.charts.curves import Curve, Level, Mark
from runner.report.figure import Chart, Entry
from runner.report.findings import Findings
from runner.report.look import HUES, NEUTRAL, ordered, percent, plural, rounded
from runner.report.run import EMPTY, Floats, Run, Series, read_run
from runner.report.settings import MODE, RATE, THRESHOLD, Setting, choice, short
from runner.run_folder import keys

MOST_FIGURES = 14
_MULTIPLES = 4  # most charts of the metric
_ROWS = 60  # most rows of a dot plot
_MAPS = 3  # most maps of parameters
_MODES = 3  # most modes with a chart of their own of other thresholds
_LEVELS = 8  # most settings whose thresholds widen the axis of norms
_MARKS = 300  # most marked steps of a run
_GRID = 0.6  # share of the pairs of two numbers that have to have run for a map


class Sections(NamedTuple):
    """The charts of the page, in its order."""

    answer: list[Chart]
    clipping: list[Chart]
    curves: list[Chart]
    parameters: list[Chart]

    @property
    def charts(self) -> list[Chart]:
        return [*self.answer, *self.clipping, *self.curves, *self.parameters]


def sections(findings: Findings) -> Sections:
    """Return the charts of a sweep; the first one of a single run is that of its norms."""
    tables = Tables(findings)
    answer = metric_charts(tables)
    clipping = [*clipping_charts(tables)]
    losses = [*loss_charts(tables)]
    if not answer:
        first = clipping or losses
        answer = [first.pop(0)] if first else []
    left = MOST_FIGURES - len(answer) - len(clipping) - len(losses)
    maps = layers.draw(tables.layers[: max(0, min(left, _MAPS))])
    return Sections(answer, clipping, losses, maps)


def colors_of(findings: Findings) -> dict[int, str]:
    """Return the colour of each setting: by the value of the number that was swept, or a hue."""
    settings = findings.settings
    numbers, choices = kinds_of(findings)
    if numbers and not choices:
        values = sorted({s.number(numbers[0]) or 0.0 for s in settings if s.number(numbers[0])})
        palette = dict(zip(values, ordered(len(values)), strict=True))
        colors = {}
        for setting in settings:
            value = setting.number(numbers[0])
            colors[setting.index] = NEUTRAL if value is None else palette[value]
        return colors
    if len(settings) == 1:
        return {0: ordered(1)[0]}
    hues = iter(HUES)
    return {setting.index: next(hues, NEUTRAL) for setting in findings.listed}


def kinds_of(findings: Findings) -> tuple[list[str], list[str]]:
    """Return the keys that were swept: those that are numbers, and the choices."""
    numbers: list[str] = []
    choices: list[str] = []
    for key in findings.swept:
        shown = findings.settings
        if key == THRESHOLD and MODE in findings.swept:
            choices.append(key)
            continue
        if key == THRESHOLD:
            shown = tuple(setting for setting in shown if setting.clips)
        values = [setting.number(key) for setting in shown]
        is_number = None not in values and len(set(values)) > 1
        (numbers if is_number else choices).append(key)
    return numbers, choices


@dataclass(frozen=True)
class Tables:
    """The plain tables that charts are drawn of."""

    findings: Findings

    @cached_property
    def entries(self) -> list[Entry]:
        colors = colors_of(self.findings)
        return [Entry(s.index, s.label, colors[s.index]) for s in self.findings.settings]

    def entry(self, setting: Setting) -> Entry:
        return self.entries[setting.index]

    @cached_property
    def parents(self) -> dict[str, Run]:
        """The runs that branches begin in, by how their configuration names them."""
        parents: dict[str, Run] = {}
        for run in self.findings.sweep.runs:
            if run.branch is None or run.branch[0] in parents:
                continue
            with suppress(OSError, DamagedFile):  # a page can do without it
                folder = _folder_of(run.branch[0], run.folder)
                if folder is not None:
                    parents[run.branch[0]] = read_run(folder)
        return parents

    def curves(self, key: str, settings: Sequence[Setting]) -> list[Curve]:
        return [
            self.joined(self.entry(setting), run, run.of(key), key)
            for setting in settings
            for run in setting.runs
            if len(run.of(key))
        ]

    def joined(self, entry: Entry, run: Run, series: Series, key: str) -> Curve:
        """Return a curve that begins with that of the run it was branched from."""
        if run.branch is None:
            return Curve(entry, run.number, series)
        source, step = run.branch
        parent = self.parents.get(source)
        before = EMPTY if parent is None else parent.of(key)
        kept = before.steps <= step
        kept &= before.steps < (series.steps[0] if len(series) else math.inf)
        steps = np.concatenate([before.steps[kept], series.steps])
        values = np.concatenate([before.values[kept], series.values])
        return Curve(entry, run.number, Series(steps, values), float(step))

    @cached_property
    def layers(self) -> list[layers.Layers]:
        # The first seed of each setting comes before the second of any, the best setting first.
        turns = zip_longest(*(setting.runs for setting in self.findings.listed))
        recorded = []
        for turn in turns:
            for setting, run in zip(self.findings.listed, turn, strict=True):
                if run is not None and run.layers:
                    recorded.append(layers.Layers(self.entry(setting), run.number, run.layers))
        return recorded

    def text_of(self, setting: Setting) -> str:
        """Return what a chart says of a setting under the pointer."""
        findings = self.findings
        mean, spread = findings.mean(setting)
        seeds = plural(len(findings.seeds(setting)), "seed")
        text = f"{setting.label}: {findings.metric} {rounded(mean)}"
        text += f" ± {rounded(spread, 2)} over {seeds}" if spread is not None else ""
        lost = len(findings.diverged(setting))
        text += f", {lost} of {plural(len(setting.runs), 'seed')} diverged" if lost else ""
        share = findings.share(setting)
        parts = setting.info.parts or "steps"
        return text + (f", {percent(share)} of {parts} clipped" if share is not None else "")


def _folder_of(source: str, folder: Path | None) -> Path | None:
    """Return the folder of a run that a configuration names, seen from the working directory."""
    path = Path(source).expanduser()
    above = [Path(), *(folder.parents if folder else ())]
    places = [place / path for place in above]
    return next((place for place in places if (place / "metrics.jsonl").exists()), None)


# ---- The metric against what was swept -----------------------------------------------------------


def metric_charts(tables: Tables) -> list[Chart]:
    """Return the charts of the metric, of a kind that follows what was swept."""
    findings = tables.findings
    scored = [s for s in findings.settings if any(findings.score(r) is not None for r in s.runs)]
    if len(scored) < 2:
        return []
    numbers, choices = kinds_of(findings)
    if numbers and not choices:
        return _of_numbers(tables, scored, numbers)
    if len(choices) == 1 and 1 <= len(numbers) <= 2:
        values = dict.fromkeys(choice(setting.runs[0], choices[0]) for setting in scored)
        if len(values) <= _MULTIPLES:
            charts = []
            for value in values:
                part = [s for s in scored if choice(s.runs[0], choices[0]) == value]
                charts += _of_numbers(tables, part, numbers, f" · {short(choices[0])} {value}")
            if len(charts) <= _MULTIPLES:
                return charts
    return [_dots(tables, scored)]


def _of_numbers(
    tables: Tables, settings: Sequence[Setting], numbers: Sequence[str], suffix: str = ""
) -> list[Chart]:
    if len(numbers) == 1:
        return [_points(tables, settings, numbers[0], suffix)]
    if len(numbers) == 2 and is_grid(settings, numbers):
        return [_heat(tables, settings, numbers, suffix)]
    if len(numbers) == 3:
        for key in numbers:
            pair = [other for other in numbers if other != key]
            values = sorted({setting.number(key) or 0.0 for setting in settings})
            parts = [[s for s in settings if s.number(key) == value] for value in values]
            if len(values) <= _MULTIPLES and all(is_grid(part, pair) for part in parts):
                return [
                    _heat(tables, part, pair, f" · {short(key)} {choice(part[0].runs[0], key)}")
                    for part in parts
                ]
    return [_points(tables, settings, key, suffix) for key in numbers[:_MULTIPLES]]


def is_grid(settings: Sequence[Setting], numbers: Sequence[str]) -> bool:
    """Return whether most pairs of two numbers have run."""
    sizes = [len({setting.number(key) for setting in settings}) for key in numbers]
    return min(sizes) > 1 and len(settings) >= _GRID * math.prod(sizes)


def _name_of(key: str) -> str:
    return {RATE: "learning rate", THRESHOLD: "threshold"}.get(key, key)


def _better(findings: Findings) -> str:
    return f"{'higher' if findings.higher_is_better else 'lower'} is better"


def _half(tables: Tables, setting: Setting) -> float | None:
    difference = tables.findings.comparisons.get(setting.index)
    if difference is None or difference.high is None:
        return None
    return difference.high - difference.value


def _points(tables: Tables, settings: Sequence[Setting], key: str, suffix: str) -> Chart:
    findings = tables.findings
    placed = [setting for setting in settings if setting.number(key) is not None]
    marks = []
    means = []
    several = any(len(setting.runs) > 1 for setting in settings)
    for setting in placed:
        place = setting.number(key) or math.nan
        for run in setting.runs:
            score = findings.score(run)
            if score is not None:
                hollow = not findings.counts(run)
                state = f" ({run.state})" if hollow else ""
                text = f"{setting.label}, run {run.number}: {findings.metric} {rounded(score)}"
                entry = tables.entry(setting)
                marks.append(points.Point(entry, run.number, place, score, text + state, hollow))
        mean, _ = findings.mean(setting)
        half = _half(tables, setting)
        means.append(points.Mean(tables.entry(setting), place, mean, half, tables.text_of(setting)))
    unplaced = [setting for setting in settings if setting.number(key) is None]
    levels = [
        points.Level(tables.entry(s), findings.mean(s)[0], tables.text_of(s))
        for s in unplaced
        if math.isfinite(findings.mean(s)[0])
    ]
    reference = findings.compared_with
    compared = reference is not None and any(mean.half is not None for mean in means)
    note = f"One point a run, × diverged; {_better(findings)}."
    if compared and reference is not None:
        note += f" Bars that cross the dotted line do not differ clearly from {reference.label}."
    mode = next((setting.info for setting in placed if setting.clips), None)
    return points.draw(
        name=f"metric-{short(key)}{suffix.replace(' · ', '-').replace(' ', '-')}",
        title=f"Best {findings.metric} against {_name_of(key)}{suffix}",
        note=note,
        axes=(_name_of(key), f"best {findings.metric}"),
        points=marks,
        means=means if several or len(findings.swept) == 1 else [],
        levels=levels,
        names={s.number(key) or math.nan: choice(s.runs[0], key) for s in placed},
        published=mode.published if mode and key == THRESHOLD else (),
        reference=findings.mean(reference)[0] if compared and reference is not None else None,
    )


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
                mean=findings.mean(setting)[0],
                stable=not findings.diverged(setting),
                text=tables.text_of(setting),
            )
        )
    return heat.draw(
        name=f"metric-map{suffix.replace(' · ', '-').replace(' ', '-')}",
        title=f"Best {findings.metric} by {_name_of(up)} and {_name_of(across)}{suffix}",
        note=f"Mean over seeds, {_better(findings)}. Hatched: a seed diverged. Bar: the highest "
        f"{_name_of(up)} at which every seed stayed stable, for each {_name_of(across)}.",
        axes=(_name_of(across), _name_of(up)),
        xs=values_of(across),
        ys=values_of(up),
        cells=cells,
        lower_is_better=not findings.higher_is_better,
    )


def _dots(tables: Tables, settings: Sequence[Setting]) -> Chart:
    findings = tables.findings
    reference = findings.compared_with
    listed = [setting for setting in findings.listed if setting in settings]
    rows = []
    for setting in listed[:_ROWS]:
        seeds = []
        mean = findings.mean(setting)[0]
        value = math.nan
        if reference is not None:
            scores = findings.seeds(reference)
            difference = findings.comparisons.get(setting.index)
            value = mean - findings.mean(reference)[0] if difference is None else difference.value
            for run in findings.judged(setting):
                score = findings.score(run)
                base = scores.get(run.seed)
                if score is not None and base is not None and math.isfinite(score):
                    seeds.append((run.number, score - base))
        if not math.isfinite(mean):
            value = math.nan
        half = _half(tables, setting)
        text = tables.text_of(setting)
        shown = seeds if len(setting.runs) > 1 else []
        lost = bool(findings.diverged(setting))
        rows.append(dots.Row(tables.entry(setting), value, half, shown, text, lost))
    name = reference.label if reference else "the best"
    note = f"Difference to {name}, seed by seed, with its 95 % interval; {_better(findings)}."
    note += " × diverged." if any(findings.diverged(s) for s in listed) else ""
    more = len(listed) - _ROWS
    note += f" {more} more settings stand in the table." if more > 0 else ""
    return dots.draw(
        name="metric-settings",
        title=f"Best {findings.metric}: difference to {name}",
        note=note,
        axis=f"difference in {findings.metric}",
        rows=rows,
    )


# ---- What clipping did ---------------------------------------------------------------------------


def clipping_charts(tables: Tables) -> Iterator[Chart]:
    settings = tables.findings.settings
    clipping = [setting for setting in settings if setting.clips]
    yield from _norms(tables)
    yield from _shares(tables, clipping)
    yield from _coefficients(tables, clipping)
    yield from _thresholds(tables, clipping)
    yield from _distribution(tables)
    yield from _what_if(tables, clipping)


def norm(run: Run) -> Series:
    """Return ‖G‖ of each row, or the highest since the row before if rows skip steps."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    scaled = run.of(keys.GRAD_NORM_SCALED)
    highest = run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) and not len(scaled) else run.limited


def moving(run: Run) -> Series:
    """Return the thresholds of a run's steps; empty if they are all the same."""
    thresholds = run.of(keys.CLIP_THRESHOLD)
    return thresholds if len(thresholds.finite) and np.ptp(thresholds.finite) else EMPTY


def _in_norms(setting: Setting) -> bool:
    """Return whether the thresholds of a setting are limits of ‖G‖, which its chart shows."""
    info = setting.info
    moves = info.follows == "norms" or (info.follows == "steps" and info.unit == "‖G‖")
    return setting.clips and (moves or info.limits_norm)


def _norms(tables: Tables) -> Iterator[Chart]:
    settings = tables.findings.settings
    recorded = []
    until = []
    levels: list[Level] = []
    marks: list[Mark] = []
    for setting in settings:
        entry = tables.entry(setting)
        for run in setting.runs:
            series = norm(run)
            if len(series):
                recorded.append(tables.joined(entry, run, series, keys.GRAD_NORM))
                until.append(_before_lost(run, series))
                marks += _skipped(entry, run, series)
        if _in_norms(setting):
            levels += _levels(entry, setting)
    if not recorded:
        return
    notes = {setting.info.note for setting in settings if setting.clips} or {"These clip nothing."}
    note = (
        f"Before clipping, geometric mean. {notes.pop()}"
        if len(notes) == 1
        else ("Before clipping, geometric mean. Dashed: thresholds that limit it.")
    )
    if any(len(run.of(keys.GRAD_NORM_SCALED)) for run in tables.findings.sweep.runs):
        note += " Where Muon steps matrices: the norm of all other gradients, which λ limits."
    if marks:
        note += " △ Steps that were left out."
    if len(settings) <= _LEVELS:
        for level in levels:
            moves = isinstance(level.value, Series)
            until.append(level.value.finite if moves else np.array([level.value]))  # type: ignore[union-attr]
    yield curves.draw(
        name="norm",
        title="Gradient norm ‖G‖",
        note=note,
        axis="‖G‖",
        curves=recorded,
        levels=levels,
        marks=marks,
        smooth=True,
        log=True,
        until=until,
    )


def _levels(entry: Entry, setting: Setting) -> Iterator[Level]:
    moving_runs = [run for run in setting.runs if len(moving(run))]
    for run in moving_runs[:1]:
        yield Level(entry, run.number if len(setting.runs) == 1 else None, moving(run))
    if not moving_runs and setting.info.limits_norm and setting.threshold is not None:
        yield Level(entry, None, setting.threshold)


def _skipped(entry: Entry, run: Run, series: Series) -> list[Mark]:
    """Return the steps that a run left out, each with its reason."""
    reasons = {
        keys.CLIP_SKIPPED: "left out as a spike (clip.skip)",
        keys.GRAD_NONFINITE: "left out: the gradient was not finite",
    }
    marks = []
    highest = float(series.finite.max()) if len(series.finite) else 1.0
    for key, reason in reasons.items():
        counts = run.of(key)
        if not len(counts):
            continue
        new = np.diff(counts.values, prepend=0.0) > 0
        for step in counts.steps[new][:_MARKS]:
            position = int(np.searchsorted(series.steps, step))
            value = series.values[position] if position < len(series) else math.nan
            height = float(value) if math.isfinite(value) and value > 0 else highest
            text = f"{entry.label}, run {run.number}: step {step:,.0f} {reason}"
            marks.append(Mark(entry, run.number, float(step), height, text))
    return marks


def _before_lost(run: Run, series: Series) -> Floats:
    """Return the finite values from before a run diverged: later ones would flatten all others."""
    lost = run.diverged_at
    before = series.steps < (np.inf if lost is None else lost)
    return Series(series.steps[before], series.values[before]).finite


def _shares(tables: Tables, clipping: Sequence[Setting]) -> Iterator[Chart]:
    recorded = []
    kinds = set()
    for setting in clipping:
        parts = setting.info.parts
        key = keys.CLIP_FRACTION if parts else keys.CLIP_RATIO
        shown = tables.curves(key, [setting])
        if parts and MODE in tables.findings.swept:
            entry = tables.entry(setting)
            renamed = entry.__class__(entry.index, f"{entry.label} ({parts})", entry.color)
            shown = [curve._replace(entry=renamed) for curve in shown]
        if shown:
            kinds.add(parts or "steps")
        recorded += shown
    if not recorded:
        return
    what = kinds.pop() if len(kinds) == 1 else "what the mode clips"
    yield curves.draw(
        name="clipped",
        title=f"Share of {what} clipped",
        note=f"Share of {what} that clipping changed, mean over the steps around.",
        axis="clipped",
        curves=recorded,
        smooth=True,
        percent=True,
        share=True,
        log=False,
    )


def _coefficients(tables: Tables, clipping: Sequence[Setting]) -> Iterator[Chart]:
    recorded = tables.curves(keys.CLIP_COEF, clipping)
    if recorded:
        yield curves.draw(
            name="coef",
            title="Coefficient",
            note="‖G‖ after clipping ÷ before, mean over the steps around: 1 leaves the gradient.",
            axis=keys.CLIP_COEF,
            curves=recorded,
            smooth=True,
            share=True,
            log=False,
        )


def _thresholds(tables: Tables, clipping: Sequence[Setting]) -> Iterator[Chart]:
    recorded = []
    for setting in clipping:
        if not _in_norms(setting):
            for run in setting.runs:
                if len(moving(run)):
                    recorded.append(Curve(tables.entry(setting), run.number, moving(run)))
    if recorded:
        yield curves.draw(
            name="threshold",
            title="Threshold",
            note="The threshold of each step.",
            axis="threshold",
            curves=recorded,
        )


def finite_norms(setting: Setting) -> Floats:
    """Return all finite ‖G‖ > 0 of a setting's runs, before clipping; see :attr:`Run.limited`."""
    finite = np.concatenate([run.limited.finite for run in setting.runs])
    return np.asarray(finite[finite > 0])


def _distribution(tables: Tables) -> Iterator[Chart]:
    findings = tables.findings
    measured = [setting for setting in findings.settings if len(finite_norms(setting))]
    if not measured:
        return
    # The setting that clipping changed least: without clipping, else fewest steps.
    reference = min(measured, key=lambda s: (s.clips, findings.ratio(s) or 0.0))
    values = finite_norms(reference)
    limits = []
    for setting in findings.settings:
        if setting.info.limits_norm and setting.threshold is not None:
            limits.append((tables.entry(setting), setting.threshold))
    note = f"All steps of “{reference.label}”, {len(values):,} norms."
    ratio = findings.ratio(reference)
    if ratio:
        note += f" No run went unclipped; this one was clipped least ({percent(ratio)} of steps)."
    yield norms.draw(
        name="histogram",
        title="Distribution of ‖G‖" + ("" if reference.clips else " without clipping"),
        note=note,
        norms=values,
        thresholds=limits,
    )


def _what_if(tables: Tables, clipping: Sequence[Setting]) -> Iterator[Chart]:
    findings = tables.findings
    modes = list(dict.fromkeys(setting.mode for setting in clipping))
    drawn = 0
    for mode in modes:
        recorded = []
        for setting in [setting for setting in clipping if setting.mode == mode]:
            for run in setting.runs:
                if not run.what_if:
                    continue
                ratio = findings.measured[run.number][keys.CLIP_RATIO_TOTAL]
                text = f"{setting.label}, run {run.number}: clipped {percent(ratio)} of its steps"
                has_place = setting.threshold is not None and ratio is not None
                clipped = (setting.threshold, ratio) if has_place else None
                entry = tables.entry(setting)
                recorded.append(
                    what_if.Recorded(entry, run.number, run.what_if, clipped, text)  # type: ignore[arg-type]
                )
        if recorded and drawn < _MODES:
            drawn += 1
            suffix = f" · clip={mode}" if len(modes) > 1 else ""
            yield what_if.draw(
                name=f"what-if{'-' + mode if len(modes) > 1 else ''}",
                title=f"Share of steps that other thresholds clip{suffix}",
                note="Lines: what runs recorded by clip.what_if. ◆ The share that a run clipped.",
                recorded=recorded,
            )


# ---- Losses and metrics --------------------------------------------------------------------------


def loss_charts(tables: Tables) -> Iterator[Chart]:
    findings = tables.findings
    settings = findings.settings
    titles = {
        keys.EVAL_LOSS: "Evaluation loss",
        keys.EVAL_ACCURACY: "Accuracy",
        keys.TRAIN_LOSS: "Training loss",
    }
    named = [findings.metric] if findings.metric else []
    for key in dict.fromkeys([*named, *titles]):
        recorded = tables.curves(key, settings)
        if not recorded:
            continue
        until = []
        for setting in settings:
            for run in setting.runs:
                until.append(_before_lost(run, run.of(key)))
        accuracy = key == keys.EVAL_ACCURACY
        training = key == keys.TRAIN_LOSS
        title = titles.get(key, key)
        note = "Mean over the steps around." if training else "Measured on held-out data."
        yield curves.draw(
            name=key.replace("/", "-").removeprefix("train-"),
            title=title,
            note=note,
            axis=title.lower(),
            curves=recorded,
            smooth=training,
            percent=accuracy,
            log=False if accuracy else None,
            until=until,
        )


# ---- The horizontal axis of curves ---------------------------------------------------------------


def axes_of(findings: Findings) -> dict[str, dict[str, list[list[float]]]]:
    """Return samples, tokens and seconds at some steps, by setting."""
    axes = {}
    for setting in findings.settings:
        run = max(setting.runs, key=lambda run: run.steps)
        spent = run.of(keys.TIME_STEP)
        known = {
            "samples": run.of(keys.TRAIN_SAMPLES),
            "tokens": run.of(keys.TRAIN_TOKENS),
            "seconds": _elapsed(spent),
        }
        axes[str(setting.index)] = {
            name: _thin(series) for name, series in known.items() if len(series) > 1
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
