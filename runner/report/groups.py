"""Group runs that differ in their seed alone, and find in which keys the groups differ."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from runner.config.modes import NAMES, ModeInfo
from runner.config.problem import shown
from runner.report.notation import rounded
from runner.report.palette import DASHES, NEUTRAL, OTHER_DASH, ordered
from runner.report.run import Run

ABSENT = "–"
CLIP = ("clip.mode", "clip.threshold")
# Sections that decide where a run is stored and shown, not what it computes.
_ASIDE = ("hydra.", "tracker.", "sweep.", "report.", "log.", "launch.", "checkpoint.")
# Most columns of configuration keys; the others are named below the table.
_COLUMNS = 8


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
        """Clipping mode."""
        return self.runs[0].mode

    @property
    def info(self) -> ModeInfo:
        """Facts about the clipping mode."""
        return self.runs[0].info

    @property
    def clips(self) -> bool:
        """Whether the mode clips anything."""
        return self.info.clips is not None

    @property
    def threshold(self) -> float | None:
        """λ; None for ``clip=none``."""
        return self.runs[0].threshold


@dataclass(frozen=True)
class Facet:
    """Settings that one chart compares."""

    mode: str
    groups: tuple[Group, ...]
    suffix: str

    @property
    def own(self) -> list[Group]:
        """Settings of the mode itself."""
        return [group for group in self.groups if group.mode == self.mode]

    @property
    def info(self) -> ModeInfo:
        """Facts about the mode."""
        return next((group.info for group in self.own), ModeInfo())


def clipping_modes(groups: Iterable[Group]) -> list[str]:
    """Return the names of the modes that clip anything, sorted."""
    return sorted({group.mode for group in groups if group.mode and group.clips})


def facets(groups: Sequence[Group]) -> list[Facet]:
    """Return the settings by mode, because thresholds of two modes do not compare."""
    modes = clipping_modes(groups) or ["none"]
    compared = {m: tuple(g for g in groups if g.mode == m or not g.clips) for m in modes}
    return [Facet(m, of, f" · clip={m}" if len(modes) > 1 else "") for m, of in compared.items()]


@dataclass(frozen=True)
class Differences:
    """Configuration keys in which runs differ."""

    columns: tuple[str, ...]
    others: tuple[str, ...] = ()


def differences(runs: Sequence[Run]) -> Differences:
    """Return the configuration keys in which runs differ."""
    if len(runs) == 1:
        return Differences(CLIP)
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [
        key
        for key in keys
        if not key.startswith(_ASIDE)
        and len({_value(run.config.get(key)) for run in runs if run.config}) > 1
    ]
    typed = {key for run in runs for key in run.typed}
    sections = {key.split(".")[0] for key in keys if "." in key}
    options = sorted(typed & sections - {"clip"})
    chosen = [key for key in options if len({choice(run, key) for run in runs}) > 1]
    derived = {key for key in differing if key.split(".")[0] in (*chosen, "clip")}
    implied = derived - typed - set(CLIP)
    shown = sorted(
        (*chosen, *(key for key in differing if key not in implied)),
        # The sort is stable: mode, threshold, then overridden keys in the order they were found.
        key=lambda key: (key != "clip.mode", key not in CLIP, key == "seed", key not in typed),
    )
    left = [key for key in shown[_COLUMNS:] if key != "seed"]
    columns = [key for key in shown if key not in left]
    return Differences(tuple(columns), (*left, *sorted(implied)))


def choice(run: Run, key: str) -> str:
    """Return the text of a run in a column: the value of a key, or the option of a group."""
    if key == "clip.threshold" and run.info.clips is None:
        return "none"
    if key in run.config:
        return shown(run.config[key])
    if key in run.typed:
        return run.typed[key]
    for inner in ("name", "mode", "_target_"):
        value = run.config.get(f"{key}.{inner}")
        if value is not None:
            return str(value).rpartition(".")[2]
    return ABSENT


def grouped(runs: Sequence[Run], columns: Sequence[str]) -> list[Group]:
    """Return the settings by mode and rising threshold, ``none`` last; one colour each."""
    buckets: dict[str, list[Run]] = {}
    # A run that has not begun belongs to the setting of runs with the same overrides.
    known = {_words(run): _setting(run) for run in runs if run.config}
    for run in sorted(runs, key=lambda run: not run.config):
        own = _setting(run) if run.config else known.get(_words(run), _words(run))
        buckets.setdefault(own, []).append(run)
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
    """Return a short name of a setting: its clipping, and the other keys in which it differs."""
    if not run.config and not run.mode:
        return _brief(_words(run)) or "?"
    clip = run.mode if run.threshold is None else f"{run.mode} {rounded(run.threshold)}"
    rest = [
        f"{key.rpartition('.')[2]}={_brief(value)}"
        for key in columns
        if key not in ("seed", *CLIP) and (value := choice(run, key)) != ABSENT
    ]
    return ", ".join([clip, *rest])


def named(groups: Iterable[Group], text: str) -> Group | None:
    """Return the setting that ``text`` names: by its label, or by the number of one of its runs."""
    typed = text.replace("-", "−")
    known = ((g, (g.label.replace("-", "−"), *(run.number for run in g.runs))) for g in groups)
    return next((group for group, names in known if typed in names), None)


def natural(text: str) -> tuple[float, str]:
    """Return a sort key that orders numbers by size and before other text."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (n − 1); the latter is None for one value."""
    if not all(math.isfinite(value) for value in values):
        return math.nan, None
    return fmean(values), stdev(values) if len(values) > 1 else None


def _brief(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _value(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _words(run: Run) -> str:
    """Return the overrides of a run but for its seed."""
    return " ".join(word for word in run.overrides if not word.startswith("seed="))


def _setting(run: Run) -> str:
    """Return what all runs of a setting have in common: everything but the seed."""
    return _value({k: v for k, v in run.config.items() if k != "seed" and not k.startswith(_ASIDE)})


def _order(run: Run, columns: Sequence[str]) -> tuple[object, ...]:
    rest = tuple(natural(choice(run, key)) for key in columns if key != "seed")
    threshold = math.inf if run.threshold is None else run.threshold
    return (not run.config, run.info.clips is None, run.mode, threshold, rest)
