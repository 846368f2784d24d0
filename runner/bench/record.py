"""Measure the tables one after another, print them, and write them to a folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from runner.bench.peers import versions
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
    """Measure tables, show each row at once, and write both files to ``folder`` after each
    table.
    """
    lines: list[str] = []

    def line(text: str = "") -> None:
        lines.append(text)
        show(text)

    began, others, made_with = now(), versions() if setting.peers else {}, provenance()
    found: dict[str, Any] = {"command": command, "date": began, "quick": setting.quick}
    found |= {"machine": _machine(setting.device), "peers": others, **made_with, "tables": {}}
    line(f"{began[:10]}  {found['machine']}")
    line(", ".join(made_with.values()))
    if setting.peers:
        listed = [f"{name} {version}" for name, version in others.items()]
        line(f"peers: {', '.join(listed) or 'none installed'}")
    for name in tables:
        measured = import_module(f"runner.bench.{name}")
        line(f"\n{name}: " + measured.TITLE.replace("\n", "\n  "))
        line(HEADER)
        rows = []
        for row in measured.rows(setting):
            if setting.quick and row.unit != "error":
                row = replace(row, limit=None)  # limits are those of the full sizes
            line(row.line())
            rows.append(row.record())
            if number := stop.reset():  # a training has noted the signal
                raise Stopped(number)
        found["tables"][name] = {"title": measured.TITLE, "rows": rows}
        write_object(folder / FILE, found)
        write_text(folder / TEXT, "\n".join(lines) + "\n")
    return found


def _machine(device: str) -> str:
    """Return the processor, its number of cores, and the accelerator that is measured, if any."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    _, _, named = text.partition("model name")
    name = named.partition("\n")[0].strip("\t :") or platform.processor() or platform.machine()
    found = f"{name}, {os.cpu_count()} cores"
    if device != "cpu":
        import torch

        found += f", {torch.cuda.get_device_name(device)}"
    return found
