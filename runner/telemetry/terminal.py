"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

from runner.telemetry.sink import Row

REDRAW_SECONDS = 0.1
"""Shortest time between two drawings of the bar: a step may take less than drawing does."""

NARROWEST_BAR = 8
"""Columns that the bar itself keeps; figures that leave it less are dropped, last ones first."""


def is_watched(stream: TextIO) -> bool:
    """Whether a person looks at ``stream`` live, on a terminal that can redraw a line."""
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


class TerminalSink:
    """Shows rows: a bar that is redrawn where someone watches, otherwise a line now and then.

    A line is written for every row whose step is a multiple of ``interval``, for every row with an
    evaluation, and for the last row. A stream that breaks (``| head``) ends the show, never the
    run.

    Args:
        total_steps: optimizer steps of the run; None if that is not known.
        interval: steps between plain lines.
        title: of the run, for its last words.
        stream: standard error unless told otherwise.
    """

    def __init__(
        self, total_steps: int | None, interval: int, title: str, stream: TextIO | None = None
    ) -> None:
        self._total = total_steps
        self._interval = interval
        self._title = title
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._pace = _Pace()
        self._clipped = _Share()
        self._last: Row | None = None
        self._shown = 0
        self._drawn = -math.inf
        self._eval: Row = {}
        self._bar = self._open_bar(self._stream) if is_watched(self._stream) else None
        self._closed = False

    def write(self, row: Row) -> None:
        """Show one row, if it is its turn."""
        step = int(row["train/step"])
        passed = step - (int(self._last["train/step"]) if self._last else 0)
        self._pace.add(row, passed)
        self._clipped.add(row, passed)
        self._last = dict(row)
        evaluated = {key: value for key, value in row.items() if key.startswith("eval/")}
        self._eval = evaluated or self._eval
        if self._bar is not None:
            now = time.monotonic()
            if evaluated or now - self._drawn >= REDRAW_SECONDS:
                self._drawn = now
                self._draw(self._bar, row, step)
        elif step % self._interval == 0 or evaluated:
            self._print_row(row)

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Leave the terminal as it was found; say in three lines how it went, then any guidance."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None and self._last is not None:
            self._draw(self._bar, self._last, int(self._last["train/step"]))
        if self._bar is not None:
            try:
                self._bar.close()
            except (OSError, ValueError):
                self._stream = None
        elif self._last is not None and self._shown != self._last["train/step"]:
            self._print_row(self._last)
        for line in self._farewell(summary, exit_code):
            self._print(line)

    def _open_bar(self, stream: TextIO) -> _Bar:
        counted = "{n_fmt}/{total_fmt} |{bar}|" if self._total else "step {n_fmt}"
        return _Bar(
            total=self._total,
            file=stream,
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
            bar_format=counted + "  {figures}",
            colour=None if os.environ.get("NO_COLOR") else "green",
        )

    def _draw(self, bar: _Bar, row: Row, step: int) -> None:
        ratio = row.get("clip/ratio_total", math.nan)
        figures = self._figures({**self._eval, **row}, ratio)
        # The counts, what stands between the parts, and the bar itself.
        taken = 2 * len(str(self._total or step)) + 6 + NARROWEST_BAR
        try:
            columns = os.get_terminal_size(bar.fp.fileno()).columns or 80
            bar.figures = _fitting(figures, columns - taken)
            bar.update(step - bar.n)
        except (OSError, ValueError):
            self._bar, self._stream = None, None

    def _print_row(self, row: Row) -> None:
        step = int(row["train/step"])
        figures = self._figures(row, self._clipped.take())
        self._print(
            "  ".join([f"step {step}" + (f"/{self._total}" if self._total else ""), *figures])
        )
        self._shown = step

    def _figures(self, row: Row, clipped: float) -> list[str]:
        """What the row has of the figures worth a look, the most wanted first."""
        figures = []
        if "train/loss" in row:
            figures.append(f"loss {_number(row['train/loss'])}")
        if "grad/norm" in row:
            figures.append(f"norm {_number(row['grad/norm'])}")
        if not math.isnan(clipped):
            figures.append(f"clipped {_percent(clipped)}")
        if "eval/loss" in row or "eval/accuracy" in row:
            figures.append(f"eval {_evaluation(row)}")
        if "throughput/samples_per_s" in row:
            figures.append(f"{_count(row['throughput/samples_per_s'])} samples/s")
        if self._total and self._pace.known:
            left = max(self._total - int(row["train/step"]), 0)
            figures.append(f"eta {_clock(left * self._pace.seconds_a_step)}")
        return figures

    def _farewell(self, summary: dict[str, Any] | None, exit_code: int) -> Iterable[str]:
        state = {0: "finished", 130: "interrupted", 143: "terminated"}.get(exit_code, "failed")
        words = [f"{self._title}: {state}"]
        steps = (summary or {}).get("steps", self._last and int(self._last["train/step"]))
        if steps is not None:
            words.append(f"{steps} steps")
        if summary is None:
            yield "  ".join(words)
            return
        if "wall_s" in summary:
            words.append(f"{summary['wall_s']:.1f} s")
        yield "  ".join(words)
        final = summary.get("final", {})
        if "eval/loss" in final or "eval/accuracy" in final:
            yield f"eval {_evaluation(final)}  (loss / accuracy)"
        norm = summary.get("grad/norm", {})
        spread = [f"{at} {_number(norm[at])}" for at in ("p50", "p90", "p99") if at in norm]
        if "clip/ratio_total" in summary:
            spread.append(f"clipped {_percent(summary['clip/ratio_total'])} of the steps")
        if spread:
            yield "  ".join([self._norm_sign(), *spread])
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
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic only in its stubs
    """tqdm with figures of our own in its format.

    It goes without tqdm's monitor thread, which redraws stale bars: every row redraws this one.
    """

    monitor_interval = 0
    figures = ""

    @property
    def format_dict(self) -> dict[str, Any]:
        return {**super().format_dict, "figures": self.figures}


class _Pace:
    """Mean seconds of a step over all rows.

    Rows come in bursts (they leave the device together), so their times of arrival say nothing.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._steps = 0

    def add(self, row: Row, steps: int) -> None:
        seconds = row.get("time/step_s", math.nan)
        if math.isfinite(seconds):
            self._seconds += seconds * steps
            self._steps += steps

    @property
    def known(self) -> bool:
        return self._steps > 0

    @property
    def seconds_a_step(self) -> float:
        return self._seconds / self._steps


class _Share:
    """Share of the steps since the last line that were clipped; a row may speak for one of them."""

    def __init__(self) -> None:
        self._clipped = 0.0
        self._steps = 0

    def add(self, row: Row, steps: int) -> None:
        ratio = row.get("clip/ratio", row.get("clip/clipped", math.nan))
        if math.isfinite(ratio):
            self._clipped += ratio * steps
            self._steps += steps

    def take(self) -> float:
        share = self._clipped / self._steps if self._steps else math.nan
        self._clipped, self._steps = 0.0, 0
        return share


def _fitting(figures: list[str], columns: int) -> str:
    kept = ""
    for figure in figures:
        longer = f"{kept}  {figure}" if kept else figure
        if len(longer) > columns:
            break
        kept = longer
    return kept


def _evaluation(row: Row) -> str:
    loss, accuracy = row.get("eval/loss"), row.get("eval/accuracy")
    parts = [] if loss is None else [_number(loss)]
    return " / ".join(parts if accuracy is None else [*parts, f"{100 * accuracy:.1f} %"])


def _number(value: float) -> str:
    """Three significant digits, zeros kept so that columns do not jump."""
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else str(float(value))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 or not math.isfinite(value) else f"{value:.2g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
