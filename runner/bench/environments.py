"""Where cells of the table of tools are measured: here, or in an environment made for one tool.

An environment borrows the packages of this one, so that pip installs only what a tool needs beside
them, or instead of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.bench.cells import ABSENT, HANGS, Place, Row, finished

SECONDS = 30.0  # that a collective of a tool may take
_MOST = 300.0  # seconds without a row until ranks that no collective ends are stopped
_START = 900.0  # seconds until the first row: imports of large libraries count
_WORDS = 16  # of what pip says


class InstallError(RuntimeError):
    """A tool can't be installed; the message is what pip says."""


def python_with(package: str, folder: Path) -> Path:
    """Make an environment that has a package; return its Python.

    Raises:
        InstallError: pip can't install it.
    """
    home = folder / package
    _ended([sys.executable, "-m", "venv", str(home)])
    python = home / "bin" / "python"
    site = next(home.glob("lib/python3*/site-packages"))
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    checkout = str(Path(__file__).resolve().parents[2])
    (site / "borrowed.pth").write_text("\n".join([*borrowed, checkout]) + "\n", encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        _ended([*install, package])
    except InstallError:
        # A package that is built here may need torch for it, which isolation hides.
        _ended([*install, "--no-build-isolation", package])
    return python


def _ended(command: list[str]) -> None:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=kept, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
        words = (lines[0] if lines else done.stderr).split()
        raise InstallError(" ".join(words[:_WORDS]))


def measured(places: Sequence[Place], python: Path, folder: Path) -> Iterator[Row]:
    """Yield the row of each cell, measured by four ranks of a Python.

    Ranks that hang, or that die, are ended, and others go on with the next cell.
    """
    left = list(places)
    while left:
        count = 0
        for row in _rows_of_ranks(left, python, folder):
            count += 1
            yield row
        last_words = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
        if count == 0:
            lines = last_words.strip().splitlines() or ["the ranks ended without a word"]
            count = 1
            yield finished({**left[0]._asdict(), "version": ""}, "raises", lines[-1][:80])
        left = left[count:]


def _rows_of_ranks(places: Sequence[Place], python: Path, folder: Path) -> Iterator[Row]:
    """Yield rows until the ranks end; a call that nothing ends is stopped, and its row is last."""
    request = folder / "request.json"
    rows = folder / "rows.jsonl"
    request.write_text(json.dumps({"places": places, "seconds": SECONDS}), encoding="utf-8")
    rows.write_text("", encoding="utf-8")
    command = [str(python), "-W", "ignore", "-m", "runner.bench.cells", str(request), str(rows)]
    seen = 0
    with (folder / "stderr").open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        last = time.monotonic()
        try:
            while True:
                ended = process.poll() is not None
                text = rows.read_text(encoding="utf-8")
                lines = text[: text.rfind("\n") + 1].splitlines()  # one may be half written
                for line in lines[seen:]:
                    last = time.monotonic()
                    yield json.loads(line)
                seen = len(lines)
                if ended:
                    return
                if time.monotonic() - last > (_MOST if seen else _START):
                    row = {**places[seen]._asdict(), "version": ""}
                    if seen:
                        yield finished(row, HANGS, "no rank came to an end")
                    else:
                        yield finished(row, ABSENT, f"no answer within {_START:g} s")
                    return
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


def not_run(places: Sequence[Place], reason: str) -> Iterator[Row]:
    """Yield the rows of cells of a tool that can't be installed."""
    for place in places:
        yield finished({**place._asdict(), "version": ""}, ABSENT, reason)
