"""Time several ways to do the same work in interleaved rounds, and compare them by ratios.

A machine that others use too changes its speed by tens of percent within seconds, so absolute times
of one side after the other say little. Here each round times every side once, in a rotating order,
and a ratio is taken within a round. Reported is the median of the ratios, with their quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Side = Callable[[], float]
"""Does the work once, and returns the seconds that it took without its preparations."""

Times = dict[str, list[float]]
"""Seconds of each side in each round."""


class Spread(NamedTuple):
    """Median, first and third quartile, and size of a sample."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        listed = sorted(values)
        if len(listed) == 1:
            return cls(listed[0], listed[0], listed[0], 1)
        low, median, high = statistics.quantiles(listed, n=4, method="inclusive")
        return cls(median, low, high, len(listed))


def interleave(sides: Mapping[str, Side], rounds: int, warm_up: int = 1) -> Times:
    """Run every side once in each round, in an order that rotates from round to round."""
    names = list(sides)
    times: Times = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = sides[name]()
            if turn >= warm_up:
                times[name].append(seconds)
    return times


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """Return the spread of the ratios of paired times."""
    return Spread.of(our / their for our, their in zip(ours, theirs, strict=True))


def added(ours: Iterable[float], theirs: Iterable[float], bare: Iterable[float]) -> Spread:
    """Return the spread of what ``ours`` adds to ``bare``, divided by what ``theirs`` adds."""
    rounds = list(zip(ours, theirs, bare, strict=True))
    kept = [(our - base) / (their - base) for our, their, base in rounds if their > base]
    if not kept:
        our, their, base = (statistics.median(column) for column in zip(*rounds, strict=True))
        kept = [(our - base) / abs(their - base or 1e-9)]
    return Spread.of(kept)


def clocked(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes on the host."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
