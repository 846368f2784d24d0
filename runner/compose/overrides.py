"""Expand overrides that list values into jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, product
from math import prod
from typing import NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from runner.compose.composer import plain_word
from runner.config.problem import NOTHING, Problem
from runner.config.schema import SHORT

UNSET = "unset"
"""Value in a list of ``sweep.zip`` that leaves its key out of the job."""

SWEEP_WITHOUT_FLAG = (
    "a list of values is a sweep: add -m; a list as one value goes in brackets, [a,b], and text "
    "with a comma in quotes"
)


def key_of(word: str) -> str:
    """Return the key of an override that is not parsed yet, without the signs before it."""
    return word.lstrip("+~").partition("=")[0]


def spelled_out(given: Iterable[str]) -> list[str]:
    """Return overrides with ``resume.from=...`` for each ``resume=...``; see ``SHORT``."""
    spelled = []
    for word in given:
        key, equals, value = word.partition("=")
        plain = key.lstrip("+")
        short = plain in SHORT and equals and not value.startswith("{")
        signs = key[: len(key) - len(plain)]
        spelled.append(f"{signs}{SHORT[plain]}={value}" if short else word)
    return spelled


class JobOverrides(NamedTuple):
    """The overrides of one job of a sweep."""

    words: list[str]
    apart: list[str]


def jobs(
    overrides: Sequence[Override],
    loader: ConfigLoader,
    refuse: Callable[[str], Problem | None],
    *,
    together: Sequence[str] = (),
    enumerated: bool = True,
    most: int,
) -> tuple[list[JobOverrides], list[Problem]]:
    """Return the jobs of a sweep: every combination of the listed values."""
    values: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [plain_word(override)]
            continue
        try:
            found = _listed(override, most)
        except (HydraException, ValueError, TypeError, ArithmeticError) as error:
            problems.append(Problem(key, override.get_value_string(), f"cannot be read: {error}"))
            continue
        if len(found) > most:
            return [], [*problems, _too_many(f"{key} alone has more values", most)]
        if allowed := _wanted_instead(override, found, enumerated, loader):
            problems.append(Problem(key, override.get_value_string(), f"must be {allowed}"))
            continue
        words = [f"{key}={value}" for value in found]
        refused: dict[str, Problem] = {}
        if loader.get_group_options(override.key_or_group):
            options = [word for word in words if key not in together or word != _unset(key)]
            refused = {word: problem for word in options if (problem := refuse(word))}
        problems += refused.values()
        kept = [word for word in words if word not in refused]
        values[key] = kept or words[:1]  # so that the other overrides are checked too
    if together and (problem := _not_together(values, together, enumerated)):
        return [], [*problems, problem]
    count = _count(values, together, enumerated)
    if count > most:
        sizes = ", ".join(
            f"{key} {len(listed):,}" for key, listed in values.items() if len(listed) > 1
        )
        return [], [*problems, _too_many(f"it has {count:,} runs (values: {sizes})", most)]
    chosen = _combinations(values, together) if enumerated else _one_by_one(values)
    made = [
        JobOverrides([*one.values()], [one[key] for key in one if len(values[key]) > 1])
        for one in chosen
    ]
    return made, problems


def only_for_sweeps(overrides: Iterable[Override]) -> list[Problem]:
    """Return a problem for each override that only a sweep accepts, since none is asked for."""
    homes = ("sweep", "hydra.sweep", "hydra.sweeper", "hydra/sweeper", "hydra.launcher")
    return [
        Problem(
            override.get_key_element(),
            NOTHING if override.is_delete() else override.value(),
            "goes with a sweep, and this is one run: add -m",
        )
        for override in overrides
        # A list is refused as such: one run takes none.
        if not override.is_sweep_override()
        and (
            override.key_or_group.startswith((*(f"{home}." for home in homes), "hydra/launcher"))
            or override.key_or_group in homes
        )
    ]


def given_twice(overrides: Iterable[Override]) -> list[str]:
    """Return a sentence for each key or group that is given several values: only one holds."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        values.setdefault(override.key_or_group, []).append(override.input_line or "")
    return [
        f"{key} is given {len(given)} times: {given[-1]} holds, since it comes last"
        for key, given in values.items()
        if len(set(given)) > 1
    ]


def _listed(override: Override, most: int) -> list[str]:
    """Return the values of a list, or both ends of an interval."""
    sweep = override.value()
    if isinstance(sweep, RangeSweep) and len(first := [*islice(sweep.range(), most + 1)]) > most:
        return [str(value) for value in first]  # a range may have billions of values
    if isinstance(sweep, IntervalSweep):
        return [str(sweep.start), str(sweep.end)]
    return list(override.sweep_string_iterator())


def _combinations(
    values: Mapping[str, Sequence[str]], together: Sequence[str]
) -> list[dict[str, str]]:
    """Return every combination; the lists of ``together`` count as one."""
    zipped = [key for key in values if key in together]
    groups = [zipped if key in zipped else [key] for key in values if key not in zipped[1:]]
    rows = [list(zip(*(values[key] for key in keys), strict=True)) for keys in groups]
    keys = [*chain.from_iterable(groups)]
    every = (zip(keys, chain.from_iterable(chosen), strict=True) for chosen in product(*rows))
    return [
        {key: word for key, word in one if key not in zipped or word != _unset(key)}
        for one in every
    ]


def _unset(key: str) -> str:
    return f"{key}={UNSET}"


def _count(values: Mapping[str, Sequence[str]], together: Sequence[str], enumerated: bool) -> int:
    """Return the number of jobs, without making them."""
    if not enumerated:
        return 1 + sum(len(words) - 1 for words in values.values())
    apart = [len(words) for key, words in values.items() if key not in together]
    return prod(apart) * max((len(values[key]) for key in together if key in values), default=1)


def _too_many(why: str, most: int) -> Problem:
    return Problem(
        "sweep.max_jobs",
        most,
        f"this sweep is too large: {why}; list fewer values, or raise the limit",
    )


def _one_by_one(values: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return a job of all first values, and one job for each other value."""
    first = {key: words[0] for key, words in values.items()}
    return [first] + [{**first, key: word} for key, words in values.items() for word in words[1:]]


def _not_together(
    values: dict[str, list[str]], together: Sequence[str], enumerated: bool
) -> Problem | None:
    """Return why the lists of some keys cannot advance together."""
    shown = list(together)
    if not enumerated:
        return Problem("sweep.zip", shown, "goes with Hydra's own sweeper, hydra/sweeper=basic")
    if missing := [key for key in together if len(values.get(key, ())) < 2]:
        lists = ", ".join(key for key, choices in values.items() if len(choices) > 1) or "none"
        message = f"no list is given for {', '.join(missing)}  (lists: {lists})"
        return Problem("sweep.zip", shown, message)
    lengths = {key: len(values[key]) for key in together}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        return Problem("sweep.zip", shown, f"these lists must be equally long: {said}")
    return None


def _wanted_instead(
    override: Override, found: Sequence[str], enumerated: bool, loader: ConfigLoader
) -> str | None:
    """Return what is allowed instead of a list, to follow "must be"; None if the list is right."""
    if override.is_hydra_override():
        return "one value: Hydra's own keys cannot be swept over"
    if override.key_or_group.partition(".")[0] == "sweep":
        return "one value: all runs of a sweep share it"
    if override.is_interval_sweep() and enumerated:
        return "a list of values, or range(start,stop,step)"
    if found:
        return None
    if options := loader.get_group_options(override.key_or_group):
        return f"a pattern that matches one of {', '.join(options)}"
    return "a list of at least one value"
