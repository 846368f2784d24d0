"""Print lines, log messages and the course of a run, before Hydra and torch are imported."""

import logging
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from runner.config.environment import started_rank
from runner.config.masking import hidden
from runner.config.notation import clock, percent, plural, rounded
from runner.run_folder import keys
from runner.run_folder.strict_json import Row
from runner.telemetry.sinks import ending


def announce(line: str) -> None:
    """Print what is being done, on the first rank and only if standard error is a terminal."""
    started = started_rank()
    if is_watched(sys.stderr) and (started is None or started.rank == 0):
        print(line, "...", file=sys.stderr, flush=True)


def print_line(text: str = "", stream: TextIO | None = None) -> None:
    """Print ``text`` at once. A reader that left does not change how the command ends."""
    stream = sys.stdout if stream is None else stream
    _write(f"{fitted(hidden(text), stream)}\n", stream)


def print_json(line: str) -> None:
    """Print one line of JSON as it is: its texts hold no secrets, and it is never wrapped."""
    _write(f"{line}\n", sys.stdout)


def _write(text: str, stream: TextIO) -> None:
    try:
        stream.write(text)  # in one piece: other processes print too
        stream.flush()
    except BrokenPipeError:
        leave_unread(stream)


def columns_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for another stream, and where they are not known."""
    if not is_watched(stream):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def fitted(text: str, stream: TextIO) -> str:
    """Return ``text`` whose lines end at a word before the edge of a terminal."""
    columns = columns_of(stream)
    if columns is None:
        return text
    return "\n".join(_wrapped(line, columns) for line in text.split("\n"))


def _wrapped(line: str, columns: int) -> str:
    """Wrap a line; a command stays in one piece, so that it can be copied."""
    if len(line) <= columns or line.lstrip().startswith("python -m runner"):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    sentence, command, options = line.partition("python -m runner")
    lines = textwrap.wrap(
        sentence,
        width=columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if command:
        lines.append(f"{indent}{command}{options}")
    return "\n".join(lines)


def open_streams() -> None:
    """Discard what is printed on a standard stream that is closed (``>&-``)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def leave_unread(stream: TextIO) -> None:
    """Discard what is printed on ``stream`` from now on: its reader, such as ``head``, has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_watched(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    try:
        return os.environ.get("TERM") != "dumb" and stream.isatty()
    except (AttributeError, ValueError):  # closed
        return False


class MaskedFormatter(logging.Formatter):
    """Formats log messages, with their tracebacks, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return hidden(super().format(record))


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Show log messages, never in the middle of a bar."""

    def format(self, record: logging.LogRecord) -> str:
        text = hidden(super().format(record)).rstrip()
        text = text.encode("utf-8", "backslashreplace").decode()  # bytes that are no text
        if record.levelno == logging.WARNING:
            text = f"warning: {text}"
        if record.exc_info is None:
            text = fitted(text, self.stream)
        return f"\r\x1b[K{text}" if is_watched(self.stream) else text


class LogFile(logging.FileHandler):
    """Append log messages to a file, as far as they fit: a full disk is reported elsewhere."""

    def __init__(self, filename: str | Path) -> None:
        # The name of a file may hold bytes that are no text.
        super().__init__(filename, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore that the disk is full; show other errors, such as a message without its values."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, which may still have a message that does not fit."""
        with suppress(OSError):
            super().close()


_COUNTS = "{n_fmt}/{total_fmt}  eta {remaining}  {desc}"
_BAR = "  |{bar}|"
_LEAST_BAR = 8  # columns; numbers are worth more than a bar that is shorter


class TerminalSink:
    """Shows rows: a bar on a terminal, otherwise a line each ``interval`` steps.

    If other runs print there too (not ``alone``), there is no bar, and lines have the title. The
    end says if no other sink has recorded the rows.
    """

    def __init__(
        self,
        total_steps: int | None,
        interval: int,
        title: str,
        stream: TextIO | None = None,
        alone: bool = True,
        is_recorded: bool = True,
    ) -> None:
        self._total = total_steps
        self._interval = interval
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._alone = alone
        self._is_recorded = is_recorded
        self._closed = False
        self._step = 0
        self._shown = 0
        self._row: Row = {}  # the last one, with the last evaluation
        # Rows leave the device together, so the times at which they arrive mean nothing.
        self._seconds = 0.0
        self._clipped = 0.0
        self._begun = time.time()
        self._has_bar = alone and is_watched(self._stream)
        self._bar: Any = None  # opened with the first row: what is printed before stands above it

    def write(self, row: Row) -> None:
        passed = int(row[keys.TRAIN_STEP]) - self._step
        self._step += passed
        self._seconds += row.get(keys.TIME_STEP, 0.0) * passed
        self._clipped += row.get(keys.CLIP_RATIO, 0.0) * passed
        evaluated = any(key.startswith(keys.EVAL) for key in row)
        if self._has_bar:
            self._row |= row
            self._draw(now=evaluated)
            return
        self._row = dict(row)
        if self._step - self._shown >= self._interval or evaluated:
            self._print_row()

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._draw(now=True)
            with suppress(OSError, ValueError):
                self._bar.close()
        elif self._shown != self._step:
            self._print_row()
        for line in self._ending(summary or {}, exit_code):
            self._print(line)

    def _open_bar(self) -> Any:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # each row redraws the bar, and no thread does
        bar = tqdm(
            total=self._total,
            file=self._stream,
            colour=None if os.environ.get("NO_COLOR") else "green",
            dynamic_ncols=True,
            miniters=1,
            delay=1e-9,  # the empty bar is not drawn
            bar_format=_COUNTS + _BAR if self._total else "step {n_fmt}  {desc}",
        )
        bar.start_t = self._begun
        return bar

    def _draw(self, now: bool) -> None:
        """Draw the bar with as many parts of the row as fit the terminal."""
        parts = _parts(self._row, self._row.get(keys.CLIP_RATIO_TOTAL, math.nan))
        columns = columns_of(self._stream)
        with suppress(OSError, ValueError):  # the terminal is gone
            if self._bar is None:
                self._bar = self._open_bar()
            if columns is not None and self._total:
                free = columns - len(f"{self._step}/{self._total}  eta 00:00  ")
                parts = _fitting(parts, free)
                free -= len("  ".join(parts))
                self._bar.bar_format = _COUNTS + (_BAR if free >= _LEAST_BAR else "")
            self._bar.set_description_str("  ".join(parts), refresh=False)
            self._bar.update(self._step - self._bar.n)
            if now:
                self._bar.refresh()

    def _print_row(self) -> None:
        total = f"/{self._total}" if self._total else ""
        parts = [f"step {self._step}{total}"]
        if self._total and self._seconds:
            remaining_steps = max(self._total - self._step, 0)
            parts.append(f"eta {clock(self._seconds / self._step * remaining_steps)}")
        steps = self._step - self._shown
        ratio = self._clipped / steps if keys.CLIP_RATIO in self._row else math.nan
        self._print("  ".join([*parts, *_parts(self._row, ratio)]))
        self._clipped = 0.0
        self._shown = self._step

    def _ending(self, summary: dict[str, Any], exit_code: int) -> Iterator[str]:
        """Yield the lines at the end of a training."""
        yield f"{self._title}: {ending(exit_code)}{self._after(summary)}"
        yield from _evaluation(summary.get("final", {}))
        yield from _clipping(summary)
        yield from summary.get("guidance", ())
        if exit_code == 0 and not self._is_recorded:
            yield 'nothing was recorded: Trainer(log=Log("runs/mine/metrics.jsonl")) keeps the rows'

    def _after(self, summary: dict[str, Any]) -> str:
        """Return after how many steps a training has ended, and in how many seconds."""
        text = ""
        steps = summary.get("steps", self._step or None)
        if steps is not None:
            # A summary counts the steps of a branch from its beginning.
            if self._total is not None and max(steps, self._step) < self._total:
                text = f" after {steps} of {plural(self._total, 'step')}"
            else:
                text = f" after {plural(steps, 'step')}"
        if keys.WALL_SECONDS in summary:
            text += f" in {summary[keys.WALL_SECONDS]:.1f} s"
        return text

    def _print(self, line: str) -> None:
        if not self._alone and not line.startswith(self._title):
            line = f"{self._title}: {line}"
        with suppress(OSError, ValueError):
            print_line(line, self._stream)


def _fitting(parts: list[str], columns: int) -> list[str]:
    """Return the first parts of a line that fit ``columns``."""
    while parts and len("  ".join(parts)) > columns:
        parts = parts[:-1]
    return parts


def _parts(row: Row, clipped: float) -> list[str]:
    named = {"loss": keys.TRAIN_LOSS, "norm": keys.GRAD_NORM}
    parts = [f"{name} {_number(row[key])}" for name, key in named.items() if key in row]
    parts += [] if math.isnan(clipped) else [f"clipped {percent(clipped)}"]
    parts += _evaluation(row)
    if keys.THROUGHPUT in row:
        parts.append(f"{rounded(row[keys.THROUGHPUT])} samples/s")
    return parts


def _clipping(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the norms of a training, and how often this threshold and others clip."""
    norm = summary.get(keys.GRAD_NORM, {})
    parts = []
    for share in ("p50", "p90", "p99"):
        if share in norm:
            parts.append(f"{share} {_number(norm[share])}")
    if keys.CLIP_RATIO_TOTAL in summary:
        parts.append(f"clipped {percent(summary[keys.CLIP_RATIO_TOTAL])} of the steps")
    if parts:
        yield "  ".join(["gradient norm", *parts])
    what_if = {key: share for key, share in summary.items() if key.startswith(keys.WHAT_IF)}
    if what_if:
        clipped = [f"{_threshold(key)} {percent(share)}" for key, share in what_if.items()]
        yield "  ".join(["other thresholds would have clipped", *clipped])


def _evaluation(row: Row) -> list[str]:
    parts = [_number(row[keys.EVAL_LOSS])] if keys.EVAL_LOSS in row else []
    if keys.EVAL_ACCURACY in row:
        parts.append(f"{100 * row[keys.EVAL_ACCURACY]:.1f} %")
    return [f"eval {' / '.join(parts)}"] if parts else []


def _threshold(key: str) -> str:
    return f"{float(key.removeprefix(keys.WHAT_IF)):g}"


def _number(value: float) -> str:
    """Format with three significant digits; zeros are kept, so that columns do not jump."""
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else str(float(value))
