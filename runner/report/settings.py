"""Group runs that differ in their seed alone into settings, named by what was swept."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.config.modes import ModeInfo
from runner.config.problem import shown
from runner.report.look import rounded
from runner.report.run import Run, natural
from runner.run_folder.strict_json import number

ABSENT = "–"
SEPARATOR = " · "  # between the values in the name of a setting
MODE = "clip.mode"
THRESHOLD = "clip.threshold"
RATE = "optimizer.lr"
NAMES = {THRESHOLD: "threshold", RATE: "learning rate", MODE: "mode"}
# What decides where a run is stored and shown, not what it computes
_ASIDE = ("hydra.", "tracker.", "sweep.", "report.", "log.", "launch.", "checkpoint.")
_COLUMNS = 8  # most keys with a column; the others are named below the table
_SHORT = 8  # most characters of a number that is shown as it was typed
_LONGEST = 40


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone; ``label`` is the value that was swept, as typed."""

    index: int
    label: str
    runs: tuple[Run, ...]

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

    def number(self, key: str) -> float | None:
        """Return the value of a key if it is a positive number."""
        if key == THRESHOLD:
            return self.threshold
        value = self.runs[0].config.get(key)
        size = None if isinstance(value, bool) else number(value)
        return size if size is not None and 0 < size < math.inf else None


def differences(runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the configuration keys in which runs differ: those with a column, and the others."""
    if len(runs) == 1:
        return (MODE, THRESHOLD), ()
    every = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in every if _differs(key, runs)]
    typed = {key for run in runs for key in run.typed}
    chosen = _chosen_options(runs, every, typed)
    implied = {key for key in differing if key.split(".")[0] in (*chosen, "clip")}
    implied -= {*typed, MODE, THRESHOLD}
    clip = (MODE, THRESHOLD)
    listed = sorted(
        (*chosen, *(key for key in differing if key not in implied)),
        # The sort is stable: mode, threshold, then overridden keys in the order they were found.
        key=lambda key: (key != MODE, key not in clip, key == "seed", key not in typed),
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
    """Return whether the runs have several values of a key that decides what a run computes.

    Of a run that has not begun the values are known that were typed.
    """
    if key.startswith(_ASIDE):
        return False
    if len({_json(run.config.get(key)) for run in runs if run.config}) > 1:
        return True
    some_wait = any(not run.config for run in runs)
    return some_wait and len({run.typed[key] for run in runs if key in run.typed}) > 1


def choice(run: Run, key: str) -> str:
    """Return the value of a key as it was typed, or the chosen option of a group."""
    if key == THRESHOLD and run.info.clips is None:
        return "none"
    typed = run.typed.get(key)
    if key in run.config:
        value = run.config[key]
        if type(value) is not float and type(value) is not int:
            return shown(value)
        if typed is not None and len(typed) <= _SHORT and natural(typed)[0] == value:
            return typed
        text = repr(value)
        return text if len(text) <= _SHORT else rounded(value)
    names = (run.config.get(f"{key}.{inner}") for inner in ("name", "mode", "_target_"))
    name = next((str(name).rpartition(".")[2] for name in names if name is not None), ABSENT)
    return name if typed is None else typed


def settings_of(runs: Sequence[Run], columns: Sequence[str]) -> tuple[Setting, ...]:
    """Return the settings by mode and rising threshold, ``none`` last."""
    buckets: dict[str, list[Run]] = {}
    # A run that has not begun belongs to the setting of runs with the same overrides.
    by_overrides = {_words(run): _identity(run) for run in runs if run.config}
    for run in sorted(runs, key=lambda run: not run.config):
        words = _words(run)
        identity = _identity(run) if run.config else by_overrides.get(words, words)
        buckets.setdefault(identity, []).append(run)
    ordered = sorted(buckets.values(), key=lambda members: _order(members[0], columns))
    swept = swept_keys([members[0] for members in ordered], columns)
    labels = [label(members[0], swept) for members in ordered]
    counts = Counter(labels)
    settings = []
    for index, (name, members) in enumerate(zip(labels, ordered, strict=True)):
        unique = name if counts[name] == 1 else f"{name} (run {members[0].number})"
        settings.append(Setting(index, unique, tuple(members)))
    return tuple(settings)


def swept_keys(runs: Sequence[Run], columns: Sequence[str]) -> list[str]:
    """Return the keys in which settings differ, without a mode that only says whether one clips."""
    modes = {run.mode for run in runs if run.info.clips is not None}
    swept = [key for key in columns if key != "seed"]
    if THRESHOLD in swept and MODE in swept and len(modes) <= 1 and len(runs) > 1:
        swept.remove(MODE)
    return swept


def label(run: Run, swept: Sequence[str]) -> str:
    """Return the name of a setting: the values of the keys that were swept."""
    if not run.config and not run.mode and not set(swept) & set(run.typed):
        return _brief(_words(run)) or "?"
    single = len([key for key in swept if key != "seed"]) == 1
    parts = _name_of_clipping(run, swept)
    for key in swept:
        value = choice(run, key)
        if key not in (MODE, THRESHOLD, "seed") and value != ABSENT:
            parts.append(_brief(value) if single else f"{short(key)} {_brief(value)}")
    return SEPARATOR.join(parts) or run.mode or "?"


def _name_of_clipping(run: Run, swept: Sequence[str]) -> list[str]:
    """Return mode and threshold of a run, as far as they were swept."""
    threshold = choice(run, THRESHOLD)
    if MODE not in swept:
        return [threshold] if THRESHOLD in swept else []
    if THRESHOLD in swept and run.threshold is not None:
        return [f"{run.mode} {threshold}"]
    return [run.mode]


def short(key: str) -> str:
    """Return the last part of a key: ``lr``."""
    return key.rpartition(".")[2]


def named(settings: Iterable[Setting], text: str) -> Setting | None:
    """Return the setting that ``text`` names: by its label, by mode and threshold, or by a run."""
    for setting in settings:
        mode = setting.mode
        names = {setting.label, setting.label.replace(SEPARATOR, ", ")}
        names |= {run.number for run in setting.runs}
        if setting.threshold is None:
            names.add(mode)
        else:
            names |= {f"{mode} {setting.threshold:g}", f"{mode} {setting.label}"}
        if text in names:
            return setting
    return None


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _json(value: object) -> str:
    plain = json.loads(json.dumps(value, default=str))  # names of several types have no order
    return json.dumps(plain, sort_keys=True)


def _words(run: Run) -> str:
    return " ".join(word for word in run.overrides if not word.startswith("seed="))


def _identity(run: Run) -> str:
    kept = {}
    for key, value in run.config.items():
        if key != "seed" and not key.startswith(_ASIDE):
            kept[key] = value
    return _json(kept)


def _order(run: Run, columns: Sequence[str]) -> tuple[object, ...]:
    values = tuple(natural(choice(run, key)) for key in columns if key != "seed")
    threshold = math.inf if run.threshold is None else run.threshold
    return (not run.config, run.info.clips is None, run.mode, threshold, values)
