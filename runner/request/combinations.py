"""The runs of a sweep: every combination of the values that its overrides list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice, product
from math import prod
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from omegaconf import DictConfig

from runner.config.problem import Problem, RequestError
from runner.config.schema import SHORT
from runner.request.overrides import Override
from runner.request.sweep_settings import searches, setting

Axis = list[list[str]]
"""The overrides of each value of a list, or of each row of lists that advance together."""


def combinations(overrides: Iterable[Override], shared: DictConfig) -> Iterator[list[str]]:
    """Return the overrides of each run: every combination of the lists.

    A search chooses its runs later. Its overrides have each value of a list at least once.
    """
    search = searches(shared)
    max_jobs = setting(shared, "sweep.max_jobs")
    limit = max_jobs if type(max_jobs) is int and max_jobs > 0 else 1
    axes, problems = _axes(overrides, limit, search)
    sizes = ", ".join(f"{key} {len(axis):,}" for key, axis in axes.items() if len(axis) > 1)
    zipped = _zipped(shared, search)
    columns = {name: _column(name, axes) for name in zipped}
    problems += _unequal(zipped, columns, axes)
    if problems:
        raise RequestError(problems)
    if zipped:
        _zip(axes, columns.values())
    lengths = [len(axis) for axis in axes.values()]
    count = max(lengths, default=1) if search else prod(lengths)
    if count > limit:
        message = (
            f"this sweep has {count:,} runs or more (values: {sizes}); list fewer values, or "
            "raise the limit"
        )
        raise RequestError([Problem("sweep.max_jobs", limit, message)])
    return _representative(axes, count) if search else _all(axes)


def _all(axes: Mapping[str, Axis]) -> Iterator[list[str]]:
    """Yield the overrides of every combination."""
    for row in product(*axes.values()):
        yield [text for texts in row for text in texts]


def _representative(axes: Mapping[str, Axis], count: int) -> Iterator[list[str]]:
    """Yield the overrides of combinations in which each value of each axis stands at least once."""
    for number in range(count):
        yield [text for axis in axes.values() for text in axis[number % len(axis)]]


def _axes(
    overrides: Iterable[Override], limit: int, search: bool
) -> tuple[dict[str, Axis], list[Problem]]:
    """Return the values of each key, and a problem for each list that cannot be used."""
    axes: dict[str, Axis] = {}
    problems: list[Problem] = []
    for override in overrides:
        key = override.signed_key
        try:
            axes[key] = [[text] for text in _values(override, limit, search)]
        except Exception as error:  # Hydra raises HydraException, ValueError, TypeError and more
            problems.append(Problem(key, override.value_text, str(error)))
    return axes, problems


def _values(override: Override, limit: int, search: bool) -> Iterator[str]:
    """Yield an override for each value of a list, or for both ends of an interval.

    Of a range that is longer than ``limit`` it yields the first ``limit`` + 1 values.
    """
    key = override.signed_key
    value = override.value
    if not override.lists:
        yield override.text
        return
    if override.is_for_hydra or override.group.partition(".")[0] == "sweep":
        raise ValueError("must be one value: all runs of a sweep share it")
    if isinstance(value, IntervalSweep):
        if not search:
            raise ValueError("must be a list of values, or range(start,stop,step)")
        yield f"{key}={value.start}"
        yield f"{key}={value.end}"
        return
    listed: list[Any] = []
    if isinstance(value, RangeSweep):  # it may have billions of values
        listed = list(islice(value.range(), limit + 1))
    if len(listed) <= limit:
        listed = list(override.parsed.sweep_string_iterator())
    if not listed:
        raise ValueError("must have at least one value")
    for item in listed:
        yield f"{key}={item}"


def _zipped(shared: DictConfig, search: bool) -> list[str]:
    """Return the keys of ``sweep.zip``, whose lists advance together."""
    names = None if search else setting(shared, "sweep.zip")
    return [str(name).lstrip("+") for name in names] if isinstance(names, list) else []


def _column(name: str, axes: Mapping[str, Axis]) -> str:
    """Return the key of a zipped list as it stands in ``axes``; empty if there is none."""
    spellings = (name, f"{name}._target_", SHORT.get(name))
    return next((key for key in axes if key.lstrip("+") in spellings), "")


def _unequal(
    zipped: list[str], columns: Mapping[str, str], axes: Mapping[str, Axis]
) -> Iterator[Problem]:
    """Yield what prevents the lists of ``sweep.zip`` from advancing together."""
    counts = {name: len(axes.get(key, [[]])) for name, key in columns.items()}
    unlisted = [name for name, count in counts.items() if count == 1]
    if unlisted:
        lists = ", ".join(key.lstrip("+") for key, axis in axes.items() if len(axis) > 1)
        names = ", ".join(unlisted)
        message = f"{names}: no list of values in this sweep (its lists: {lists or 'none'})"
        yield Problem("sweep.zip", zipped, message)
    elif len(set(counts.values())) > 1:
        lengths = ", ".join(f"{name} has {count}" for name, count in counts.items())
        message = f"these lists must be equally long: {lengths}"
        yield Problem("sweep.zip", zipped, message)


def _zip(axes: dict[str, Axis], columns: Collection[str]) -> None:
    """Replace the axes of the zipped keys by one axis in the place of the first."""
    keys = [key for key in axes if key in columns]
    rows = zip(*(axes[key] for key in keys), strict=True)
    # unset leaves a key out of the job.
    axis = [
        [text for texts in row for text in texts if not text.endswith("=unset")] for row in rows
    ]
    axes[keys[0]] = axis
    for key in keys[1:]:
        del axes[key]
