"""Show a run on the terminal: a live bar if somebody watches, plain lines otherwise."""

from __future__ import annotations

import logging
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

from runner.config.notation import clock, percent, plural
from runner.config.secrets import hide
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.sinks.sink import ending

REDRAW_SECONDS = 0.1
"""Shortest time between two drawings of the bar: drawing may take longer than a step."""

NARROWEST_BAR = 5
"""Fewest columns of the bar itself; it is left out if the other parts leave less."""

LEAST_USEFUL = ("samples/s", "eval loss", "bar", "norm", "eval", "clipped", "loss")
"""Parts that are left out on a narrow terminal, the first one first. Step and eta always stay."""


def is_watched(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that can redraw a line."""
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def columns_of(stream: TextIO) -> int:
    """Return the width of the terminal behind ``stream``; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def wrapped(text: str, stream: TextIO) -> str:
    """Return ``text`` wrapped between words if ``stream`` is a terminal, else unchanged."""
    if not is_watched(stream):
        return text
    lines = text.splitlines()
    width = columns_of(stream) - 1
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines
    )


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Show log messages, wrapped between words, and never in the middle of a bar."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the message; on a terminal it replaces a bar that is drawn there."""
        text = hide(super().format(record).rstrip())
        if record.levelno == logging.WARNING:
            text = f"warning: {text}"
        erased = "\r\x1b[K" if is_watched(self.stream) else ""
        return erased + wrapped(text, self.stream)


class TerminalSink:
    """Show rows: a bar on a terminal, otherwise a line now and then."""

    def __init__(
        self,
        total_steps: int | None,
        interval: int,
        title: str,
        stream: TextIO | None = None,
        alone: bool = True,
    ) -> None:
        self._total = total_steps
        self._interval = interval
        self._title = title
        self._alone = alone
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        # Rows leave the device together, so the times at which they arrive mean nothing.
        self._seconds = _Mean()
        self._clipped = _Mean()
        self._last: Row | None = None
        self._shown = 0
        self._drawn = -math.inf
        self._eval: Row = {}
        self._bar = self._open_bar(self._stream) if alone and is_watched(self._stream) else None
        self._closed = False

    def write(self, row: Row) -> None:
        """Show one row, or skip it, see :class:`TerminalSink`."""
        step = int(row[keys.TRAIN_STEP])
        passed = step - (int(self._last[keys.TRAIN_STEP]) if self._last else 0)
        self._seconds.add(row.get(keys.TIME_STEP, math.nan), passed)
        clipped = row.get(keys.CLIP_RATIO, row.get(keys.CLIP_CLIPPED, math.nan))
        self._clipped.add(clipped, passed)
        self._last = dict(row)
        evaluated = {key: value for key, value in row.items() if key.startswith(keys.EVAL)}
        self._eval = evaluated or self._eval
        if self._bar is not None:
            now = time.monotonic()
            if evaluated or now - self._drawn >= REDRAW_SECONDS:
                self._drawn = now
                self._draw(self._bar, row, step)
        elif step - self._shown >= self._interval or evaluated:
            self._print_row(row)

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the bar, and print how the run ended, its main metrics and its guidance."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None and self._last is not None:
            self._draw(self._bar, self._last, int(self._last[keys.TRAIN_STEP]))
        if self._bar is not None:
            try:
                self._bar.close()
            except (OSError, ValueError):
                self._stream = None
        elif self._last is not None and self._shown != self._last[keys.TRAIN_STEP]:
            self._print_row(self._last)
        for line in self._farewell(summary, exit_code):
            self._print(line)

    def _open_bar(self, stream: TextIO) -> _Bar:
        return _Bar(
            total=self._total,
            file=stream,
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
            bar_format=f"0/{self._total} |{{bar}}|" if self._total else "step 0",
            colour=None if os.environ.get("NO_COLOR") else "green",
        )

    def _draw(self, bar: _Bar, row: Row, step: int) -> None:
        parts = self._parts({**self._eval, **row}, row.get(keys.CLIP_RATIO_TOTAL, math.nan))
        if self._total:
            parts["step"] = f"{step}/{self._total}"
            parts = {"step": parts.pop("step"), "bar": "|" + " " * NARROWEST_BAR + "|", **parts}
        try:
            parts = _fitting(parts, columns_of(bar.fp) - 1)
            if "bar" in parts:
                parts["bar"] = "|{bar}|"
            bar.bar_format = "  ".join(parts.values())
            bar.update(step - bar.n)
        except (OSError, ValueError):
            self._bar, self._stream = None, None

    def _print_row(self, row: Row) -> None:
        self._print("  ".join(self._parts(row, self._clipped.value).values()))
        self._clipped = _Mean()
        self._shown = int(row[keys.TRAIN_STEP])

    def _parts(self, row: Row, clipped: float) -> dict[str, str]:
        """Return the values to show of a row, in order."""
        step = int(row[keys.TRAIN_STEP])
        parts = {"step": f"step {step}" + (f"/{self._total}" if self._total else "")}
        if keys.TRAIN_LOSS in row:
            parts["loss"] = f"loss {_number(row[keys.TRAIN_LOSS])}"
        if keys.GRAD_NORM in row:
            parts["norm"] = f"norm {_number(row[keys.GRAD_NORM])}"
        if not math.isnan(clipped):
            parts["clipped"] = f"clipped {percent(clipped)}"
        if keys.EVAL_LOSS in row or keys.EVAL_ACCURACY in row:
            parts["eval"] = f"eval {_evaluation(row)}"
        if keys.THROUGHPUT in row:
            parts["samples/s"] = f"{_count(row[keys.THROUGHPUT])} samples/s"
        seconds = self._seconds.value
        if self._total and not math.isnan(seconds):
            parts["eta"] = f"eta {clock(max(self._total - step, 0) * seconds)}"
        return parts

    def _farewell(self, summary: dict[str, Any] | None, exit_code: int) -> Iterable[str]:
        ended = ending(exit_code)
        steps = (summary or {}).get("steps", self._last and int(self._last[keys.TRAIN_STEP]))
        if steps is not None:
            early = self._total is not None and steps < self._total
            taken = f"{steps} of {self._total} steps" if early else plural(steps, "step")
            ended += f" after {taken}"
        if summary is not None and keys.WALL_SECONDS in summary:
            ended += f" in {summary[keys.WALL_SECONDS]:.1f} s"
        yield f"{self._title}: {ended}"
        if summary is None:
            return
        final = summary.get("final", {})
        if keys.EVAL_LOSS in final or keys.EVAL_ACCURACY in final:
            yield f"eval {_evaluation(final)}  (loss / accuracy)"
        norm = summary.get(keys.GRAD_NORM, {})
        spread = [f"{at} {_number(norm[at])}" for at in ("p50", "p90", "p99") if at in norm]
        if keys.CLIP_RATIO_TOTAL in summary:
            spread.append(f"clipped {percent(summary[keys.CLIP_RATIO_TOTAL])} of the steps")
        if spread:
            yield "  ".join(["gradient norm", *spread])
        for sentence in summary.get("guidance", ()):
            yield sentence.replace("‖G‖", self._norm_sign()).replace("‖", self._norm_sign()[0])

    def _norm_sign(self) -> str:
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        try:
            "‖G‖".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return "|G|"
        return "‖G‖"

    def _print(self, line: str) -> None:
        if self._stream is None:
            return
        if not self._alone and not line.startswith(self._title):
            line = f"{self._title}: {line}"
        try:
            self._stream.write(wrapped(line, self._stream) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic only in its stubs
    """tqdm without the monitor thread that redraws stale bars: each row redraws this one."""

    monitor_interval = 0


class _Mean:
    """Mean of a metric over steps, where each row stands for the steps since the row before."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._steps = 0

    def add(self, value: float, steps: int) -> None:
        if math.isfinite(value):
            self._sum += value * steps
            self._steps += steps

    @property
    def value(self) -> float:
        """The mean; NaN if nothing was added."""
        return self._sum / self._steps if self._steps else math.nan


def _fitting(parts: dict[str, str], columns: int) -> dict[str, str]:
    """Return the ``parts`` that fit on one line, see `LEAST_USEFUL`."""
    kept = dict(parts)
    for least in LEAST_USEFUL:
        if len("  ".join(kept.values())) <= columns:
            break
        if least == "eval loss" and " / " in kept.get("eval", ""):
            kept["eval"] = f"eval {kept['eval'].split(' / ')[1]}"
        kept.pop(least, None)
    return kept


def _evaluation(row: Row) -> str:
    loss, accuracy = row.get(keys.EVAL_LOSS), row.get(keys.EVAL_ACCURACY)
    parts = [] if loss is None else [_number(loss)]
    return " / ".join(parts if accuracy is None else [*parts, f"{100 * accuracy:.1f} %"])


def _number(value: float) -> str:
    """Format with three significant digits; zeros are kept, so that columns do not jump."""
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else str(float(value))


def _count(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 or not math.isfinite(value) else f"{value:.2g}"
