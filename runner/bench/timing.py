"""Time several ways to do the same work in interleaved rounds, and compare them by ratios.

A machine that others use too changes its speed by tens of percent within seconds, so absolute times
of one side after the other say little. Here each round times every side once, in a rotating order,
and a ratio is taken within a round. Reported is the median of the ratios, with their quartiles.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from runner.bench import TABLES
from runner.config.problem import Stopped
from runner.run_folder.status import now, provenance
from runner.run_folder.strict_json import write_object, write_text
from runner.telemetry.sinks.console import print_line
from runner.train import stop

# What was printed, and the same with all numbers; both are written after each table.
TEXT, FILE = "bench.txt", "bench.json"
PEERS = ("timm", "lightning", "accelerate")  # packages that are measured with ``--peers``
# Does the work once, and returns the seconds that it took without its preparations.
Side = Callable[[], float]
Times = dict[str, list[float]]  # seconds of each side in each round
WIDTH = 62  # characters of the column that says what was measured
HEADER = f"{'':<{WIDTH}}  median   quartiles        limit         medians in ms"


@dataclass(frozen=True)
class Setting:
    """What a benchmark is asked for."""

    folder: Path
    quick: bool = False
    peers: bool = False
    device: str = "cpu"
    rounds: int | None = None

    def pairs(self, usual: int = 15) -> int:
        """Return the number of rounds of a row that has ``usual`` ones."""
        return self.rounds or (3 if self.quick else usual)


class Spread(NamedTuple):
    """Median, first and third quartile, and size of a sample."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        listed = sorted(values)
        if len(listed) == 1:
            return cls(listed[0], listed[0], listed[0], 1)
        low, median, high = statistics.quantiles(listed, n=4, method="inclusive")
        return cls(median, low, high, len(listed))


@dataclass(frozen=True)
class Row:
    what: str
    value: Spread
    limit: float | None = None
    unit: str = ""
    ms: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        unit = self.unit or "ratio"
        own = {"what": self.what, "unit": unit, "limit": self.limit, "ms": dict(self.ms)}
        return own | self.value._asdict()

    def line(self) -> str:
        value, limit = self.value, ""
        if self.limit is not None:
            missed = value.median > self.limit
            limit = f"{_shown(self.limit)}{' missed' if missed else ''}"
        between = f"{_shown(value.low)} - {_shown(value.high)}"
        sides = "  ".join(f"{name} {_shown(median)}" for name, median in self.ms.items())
        median = _shown(value.median)
        line = f"{self.what:<{WIDTH}} {median:>7} {self.unit:<4}{between:<15}  {limit:<12}  {sides}"
        return line.rstrip()


def _shown(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.{2 if abs(value) < 100 else 0}f}"


def clocked(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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


def compared(
    what: str,
    times: Times,
    ours: str,
    base: str,
    limit: float | None = None,
    *,
    bare: str | None = None,
    steps: int = 1,
) -> Row:
    """Return the row with the ratio of the times of the sides ``ours`` and ``base``.

    With ``bare`` it is the ratio of what both add to that side.
    """
    less_of = times[bare] if bare else [0.0] * len(times[ours])
    rounds = list(zip(times[ours], times[base], less_of, strict=True))
    kept = [(our - less) / (their - less) for our, their, less in rounds if their > less]
    if not kept:  # the bare side was the slower one in every round
        our, their, less = (statistics.median(column) for column in zip(*rounds, strict=True))
        kept = [(our - less) / abs(their - less or 1e-9)]
    sides = [name for name in (bare, base, ours) if name is not None]
    ms = {name: 1e3 * statistics.median(times[name]) / steps for name in sides}
    return Row(what, Spread.of(kept), limit, ms=ms)


def record(tables: Sequence[str], setting: Setting, folder: Path, command: str) -> dict[str, Any]:
    """Measure tables, and show each row at once."""
    lines: list[str] = []
    torch.set_num_threads(1)

    def line(text: str) -> None:
        lines.append(text)
        print_line(text)

    began, peers, made_with = now(), {}, provenance()
    if setting.peers:
        peers = {name: version(name) for name in PEERS if find_spec(name)}
    found: dict[str, Any] = {"command": command, "date": began, "quick": setting.quick}
    found |= {"machine": _machine(setting.device), "peers": peers, **made_with, "tables": {}}
    line(f"{began[:10]}  {found['machine']}\n{', '.join(made_with.values())}")
    if setting.peers:
        line("peers: " + ", ".join(f"{name} {version}" for name, version in peers.items()))
    for name in tables:
        table: Any = resolve_name(TABLES[name])
        title = cleandoc(table.__doc__ or "").replace(".\n\n", "\n")
        line(f"\n{name}: " + title.replace("\n", "\n  ") + f"\n{HEADER}")
        rows = []
        for row in table(setting):
            if setting.quick:
                row = replace(row, limit=None)  # limits are those of the full sizes
            line(row.line())
            rows.append(row.record())
            if number := stop.reset():  # a training has noted the signal
                raise Stopped(number)
        found["tables"][name] = {"title": title, "rows": rows}
        write_object(folder / FILE, found)
        write_text(folder / TEXT, "\n".join(lines) + "\n")
    return found


def _machine(device: str) -> str:
    """Return the processor, its number of cores, and the accelerator that is measured, if any."""
    info = Path("/proc/cpuinfo")
    named = info.read_text(encoding="utf-8").partition("model name")[2] if info.is_file() else ""
    name = named.partition("\n")[0].strip("\t :") or platform.processor() or platform.machine()
    found = f"{name}, {os.cpu_count()} cores"
    return found if device == "cpu" else f"{found}, {torch.cuda.get_device_name(device)}"
