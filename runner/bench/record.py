"""Measure the tables one after another, print them, and write them to a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from runner.bench.machine import machine, peers
from runner.bench.table import HEADER, Setting
from runner.config.problem import Stopped
from runner.run_folder.atomic import write_text
from runner.run_folder.provenance import provenance
from runner.run_folder.status import now
from runner.run_folder.strict_json import write_object
from runner.train import stop

TEXT, FILE = "bench.txt", "bench.json"
"""What was printed, and the same with all numbers."""


def record(
    tables: Sequence[str],
    setting: Setting,
    folder: Path,
    command: str,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Measure tables, show each row at once, and write both files after each table.

    Args:
        tables: names of :data:`runner.bench.TABLES`.
        setting: what is asked for.
        folder: folder of the files, which exists.
        command: the command, for the record.
        show: prints one line.

    Returns:
        What the JSON file holds.

    Raises:
        Stopped: a signal asked to stop.
    """
    lines: list[str] = []

    def line(text: str = "") -> None:
        lines.append(text)
        show(text)

    began, machine_here, others = now(), machine(setting.device), peers() if setting.peers else {}
    made_with = provenance()
    measured_here: dict[str, Any] = {}
    found = {
        "command": command,
        "date": began,
        "quick": setting.quick,
        "machine": machine_here,
        "peers": others,
        **made_with,
        "tables": measured_here,
    }
    line(f"{began[:10]}  {', '.join(f'{key} {value}' for key, value in machine_here.items())}")
    line(", ".join(made_with.values()))
    if setting.peers:
        listed = [f"{name} {version or 'not installed'}" for name, version in others.items()]
        line(f"peers: {', '.join(listed)}")
    for name in tables:
        started = time.monotonic()
        measured = import_module(f"runner.bench.{name}")
        title, *further = measured.TITLE.splitlines()
        line()
        line(f"{name}: {title}")
        for text in further:
            line(f"  {text}")
        line(HEADER)
        rows = []
        for row in measured.rows(setting):
            if setting.quick and row.unit != "error":
                row = replace(row, limit=None)  # limits are those of the full sizes
            line(row.line())
            rows.append(row.record())
            if number := stop.reset():  # a training has noted the signal
                raise Stopped(number)
        seconds = round(time.monotonic() - started, 1)
        measured_here[name] = {"title": measured.TITLE, "seconds": seconds, "rows": rows}
        write_object(folder / FILE, found)
        write_text(folder / TEXT, "\n".join(lines) + "\n")
    return found
