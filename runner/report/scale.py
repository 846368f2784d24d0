"""An axis: where values lie on it, and which values get a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runner.report.notation import rounded
from runner.report.series import Floats


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    Attributes:
        low, high: values at its ends, ``low < high``; both above 0 if ``log``.
        log: whether the axis is logarithmic.
        title: text beside the axis: the quantity and its unit.
        percent: whether ticks are percentages.
    """

    low: float
    high: float
    log: bool = False
    title: str = ""
    percent: bool = False

    def place(self, values: Floats | float) -> Floats:
        """Return where values lie: 0 at ``low``, 1 at ``high``; NaN if a log axis has no place."""
        given = np.asarray(values, dtype=np.float64)
        if not self.log:
            return (given - self.low) / (self.high - self.low)
        with np.errstate(invalid="ignore", divide="ignore"):
            logs = np.where(given > 0, np.log10(given), np.nan)
        start, end = math.log10(self.low), math.log10(self.high)
        return np.asarray((logs - start) / (end - start))

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Return about so many round values within the axis, with their text."""
        at = _log_ticks(self, about) if self.log else _linear_ticks(self, about)
        return [(tick, self._text(tick)) for tick in at]

    def _text(self, tick: float) -> str:
        return f"{rounded(100 * tick)}\u00a0%" if self.percent else rounded(tick)


def covering(values: Iterable[Floats], *, log: bool, title: str) -> Axis:
    """Return an axis that covers all finite values, or the positive ones if ``log``, with a margin.

    Args:
        values: arrays of any shape, which may be empty.
        log: see `Axis`.
        title: see `Axis`.
    """
    low, high = math.inf, -math.inf
    for array in values:
        shown = array[np.isfinite(array) & (array > 0)] if log else array[np.isfinite(array)]
        if len(shown):
            low, high = min(low, float(shown.min())), max(high, float(shown.max()))
    if low > high:
        low, high = (0.1, 10.0) if log else (0.0, 1.0)
    if log:
        span = max(high / low, 1.5)
        return Axis(low / span**0.05, high * span**0.05, True, title)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - margin, high + margin, False, title)


def _linear_ticks(axis: Axis, about: int) -> list[float]:
    raw = (axis.high - axis.low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(axis: Axis, about: int) -> list[float]:
    start, end = math.log10(axis.low), math.log10(axis.high)
    if end - start < 0.7:
        # Powers of ten are too few in less than a decade, where a log axis is nearly linear.
        return [tick for tick in _linear_ticks(axis, about) if tick > 0]
    decades = range(math.floor(start), math.ceil(end) + 1)
    if end - start > about:
        every = math.ceil((end - start) / about)
        found = [10.0**d for d in decades if d % every == 0]
    else:
        leads: tuple[int, ...] = (1,)
        if end - start < 0.9 * about:
            leads = (1, 2, 5) if end - start < 0.6 * about else (1, 3)
        found = [lead * 10.0**d for d in decades for lead in leads]
    return [tick for tick in found if axis.low * 0.999 <= tick <= axis.high * 1.001]
