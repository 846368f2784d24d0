"""Measure the tables one after another, print them, and write them to a folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from runner.bench.peers import versions
from runner.bench.timing import HEADER, Setting
from runner.config.problem import Stopped
from runner.run_folder.status import now, provenance
from runner.run_folder.strict_json import write_object, write_text
from runner.telemetry.sinks.console import print_line
from runner.train import stop

TEXT, FILE = "bench.txt", "bench.json"
"""What was printed, and the same with all numbers; both are written after each table."""


def record(tables: Sequence[str], setting: Setting, folder: Path, command: str) -> dict[str, Any]:
    """Measure tables, and show each row at once."""
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        print_line(text)

    began, peers, made_with = now(), versions() if setting.peers else {}, provenance()
    found: dict[str, Any] = {"command": command, "date": began, "quick": setting.quick}
    found |= {"machine": _machine(setting.device), "peers": peers, **made_with, "tables": {}}
    line(f"{began[:10]}  {found['machine']}\n{', '.join(made_with.values())}")
    if setting.peers:
        line("peers: " + ", ".join(f"{name} {version}" for name, version in peers.items()))
    for name in tables:
        table = import_module(f"runner.bench.{name}")
        line(f"\n{name}: " + table.TITLE.replace("\n", "\n  ") + f"\n{HEADER}")
        rows = []
        for row in table.rows(setting):
            if setting.quick and row.unit != "error":
                row = replace(row, limit=None)  # limits are those of the full sizes
            line(row.line())
            rows.append(row.record())
            if number := stop.reset():  # a training has noted the signal
                raise Stopped(number)
        found["tables"][name] = {"title": table.TITLE, "rows": rows}
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
