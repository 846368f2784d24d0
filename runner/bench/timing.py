"""Time several ways to do the same work in interleaved rounds, and compare them by ratios.

Each round times every side once, in a rotating order, and a ratio is taken within a round. README
says why.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from runner.bench import DOCUMENTS, TABLES
from runner.run_folder.status import now, provenance
from runner.run_folder.strict_json import write_object, write_text
from runner.telemetry.sinks.console import print_line
from runner.train import stop

# What was printed, and the same with all numbers; both are written after each table.
TEXT = "bench.txt"
FILE = "bench.json"
PEERS = ("timm", "lightning", "accelerate")  # packages that are measured with ``--peers``
# Does the work once, and returns the seconds that it took without its preparations.
Side = Callable[[], float]
Times = dict[str, list[float]]  # seconds of each side in each round
Row = dict[str, Any]  # what was measured, and its median, quartiles, limit and times
WIDTH = 62  # characters of the column that says what was measured
HEADER = f"{'':<{WIDTH}}  median   quartiles        limit         medians in ms"


@dataclass(frozen=True)
class Setting:
    """What a benchmark is asked for; ``config_of`` returns the configuration of overrides."""

    folder: Path
    config_of: Callable[[list[str]], Any]
    quick: bool = False
    peers: bool = False
    device: str = "cpu"
    rounds: int | None = None
    others: tuple[str, ...] = ()  # tools that get an environment of their own

    def pairs(self, usual: int = 15) -> int:
        """Return the number of rounds of a row that has ``usual`` ones."""
        return self.rounds or (3 if self.quick else usual)


def row(
    what: str,
    values: Sequence[float],
    limit: float | None = None,
    unit: str = "ratio",
    ms: Mapping[str, float] | None = None,
) -> Row:
    """Return the median of the values of all rounds, with first and third quartile."""
    at_least_two = values if len(values) > 1 else [*values] * 2
    low, median, high = statistics.quantiles(at_least_two, n=4, method="inclusive")
    return {
        "what": what,
        "unit": unit,
        "limit": limit,
        "ms": dict(ms or {}),
        "median": median,
        "low": low,
        "high": high,
        "number": len(values),
    }


def line_of(row: Row) -> str:
    """Return a row as a line of text: median, spread, limit and the times of both sides."""
    median, low, high = (_shown(row[name]) for name in ("median", "low", "high"))
    limit = "" if row["limit"] is None else _shown(row["limit"])
    if limit and row["median"] > row["limit"]:
        limit += " missed"
    unit = "" if row["unit"] == "ratio" else row["unit"]
    sides = "  ".join(f"{name} {_shown(milliseconds)}" for name, milliseconds in row["ms"].items())
    spread = f"{median:>7} {unit:<4}{f'{low} - {high}':<15}"
    return f"{row['what']:<{WIDTH}} {spread}  {limit:<12}  {sides}".rstrip()


def _shown(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.{2 if abs(value) < 100 else 0}f}"


def clocked(work: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds that work takes, until an accelerator has done all of it."""

    def wait() -> None:
        if device != "cpu":
            torch.accelerator.synchronize(device)

    wait()
    started = time.perf_counter()
    work()
    wait()
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
    return row(what, kept, limit, ms=ms)


def record(tables: Sequence[str], setting: Setting, folder: Path, command: str) -> dict[str, Any]:
    """Measure tables, and show each row at once."""
    lines: list[str] = []
    torch.set_num_threads(1)

    def line(text: str) -> None:
        lines.append(text)
        print_line(text)

    began = now()
    made_with = provenance()
    peers = {name: version(name) for name in PEERS if setting.peers and find_spec(name)}
    measured: dict[str, Any] = {
        "command": command,
        "date": began,
        "quick": setting.quick,
        "machine": _machine(setting.device),
        "peers": peers,
        **made_with,
        "tables": {},
    }
    line(f"{began[:10]}  {measured['machine']}\n{', '.join(made_with.values())}")
    if setting.peers:
        line("peers: " + ", ".join(f"{name} {number}" for name, number in peers.items()))
    for name in tables:
        table: Any = resolve_name(TABLES[name])
        title = cleandoc(table.__doc__ or "").replace(".\n\n", "\n")
        line(f"\n{name}: " + title.replace("\n", "\n  "))
        if name not in DOCUMENTS:
            line(HEADER)
        rows = []
        for of_full_size in table(setting):
            # Limits hold for the full sizes only.
            row = {**of_full_size, "limit": None} if setting.quick else of_full_size
            rows.append(row)
            line(row["text"] if name in DOCUMENTS else line_of(row))
            number = stop.reset()  # of a signal that a training has noted
            if number:
                raise stop.Stopped(number)
        measured["tables"][name] = {"title": title, "rows": rows}
        write_object(folder / FILE, measured)
        write_text(folder / TEXT, "\n".join(lines) + "\n")
        for ending, maker in DOCUMENTS.get(name, {}).items():
            document: Any = resolve_name(maker)
            write_text(folder / f"{name}.{ending}", document(rows, began))
    return measured


def _machine(device: str) -> str:
    """Return the processor, its number of cores, and the accelerator that is measured, if any."""
    info = Path("/proc/cpuinfo")
    named = info.read_text(encoding="utf-8").partition("model name")[2] if info.is_file() else ""
    name = named.partition("\n")[0].strip("\t :") or platform.processor() or platform.machine()
    host = f"{name}, {os.cpu_count()} cores"
    return host if device == "cpu" else f"{host}, {torch.cuda.get_device_name(device)}"
