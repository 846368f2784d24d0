"""What charts of all sections are made from: entries of settings, and curves of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import numpy as np

from runner.config.reading import DamagedFile
from runner.report.charts import layers
from runner.report.charts.curves import Curve
from runner.report.figure import Entry
from runner.report.findings import Findings
from runner.report.look import percent, plural, rounded
from runner.report.run import EMPTY, Floats, Run, Series, read_run
from runner.report.sections.colors import colors_of
from runner.report.settings import Setting
from runner.run_folder import keys


@dataclass(frozen=True)
class Tables:
    """Entries and curves of the settings of a sweep."""

    findings: Findings

    @cached_property
    def entries(self) -> list[Entry]:
        """Entries of the legend, in the order of the settings."""
        colors = colors_of(self.findings)
        return [Entry(s.index, s.label, colors[s.index]) for s in self.findings.settings]

    def entry(self, setting: Setting) -> Entry:
        """Return the entry of a setting in the legend."""
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
        """Return the curve of a run, which begins with its parent's if it was branched."""
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
        """Norms of layers of all runs that have recorded them."""
        # The first seed of each setting comes before the second of any, the best setting first.
        turns = zip_longest(*(setting.runs for setting in self.findings.listed))
        recorded = []
        for turn in turns:
            for setting, run in zip(self.findings.listed, turn, strict=True):
                norms = {} if run is None else run.by_suffix(keys.LAYER_NORM)
                if run is not None and norms:
                    recorded.append(layers.Layers(self.entry(setting), run.number, norms))
        return recorded

    def text_of(self, setting: Setting) -> str:
        """Return what a chart says of a setting under the pointer."""
        findings = self.findings
        mean, spread = findings.scores.mean(setting)
        seeds = plural(len(findings.scores.seeds(setting)), "seed")
        text = f"{setting.label}: {findings.metric} {rounded(mean)}"
        text += f" ± {rounded(spread, 2)} over {seeds}" if spread is not None else ""
        lost = len(findings.scores.diverged(setting))
        text += f", {lost} of {plural(len(setting.runs), 'seed')} diverged" if lost else ""
        share = findings.scores.share(setting)
        if share is None:
            return text
        return f"{text}, {percent(share)} of {setting.info.parts or 'steps'} clipped"


def _folder_of(source: str, folder: Path | None) -> Path | None:
    """Return the folder of a run that a configuration names, seen from the working directory."""
    path = Path(source).expanduser()
    above = [Path(), *(folder.parents if folder else ())]
    places = [place / path for place in above]
    return next((place for place in places if (place / "metrics.jsonl").exists()), None)


def before_lost(run: Run, series: Series) -> Floats:
    """Return the finite values from before a run diverged: later ones would flatten all others."""
    lost = run.diverged_at
    before = series.steps < (np.inf if lost is None else lost)
    return Series(series.steps[before], series.values[before]).finite
