"""The spike score of a series of values: the share of them that are far from the mean before them.

As in OLMo 2 (arXiv 2501.00656, section 3): the share of values that are at least so many standard
deviations away from a rolling mean. There the window is 1,000 steps and the limit 7 deviations; the
defaults here, 128 and 6, are those of OLMo-core's monitor, for runs of any length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np


class SpikeScore:
    """Counts the values of a series that are spikes."""

    def __init__(self, sigma: float, window: int) -> None:
        self._sigma, self._window = sigma, window
        self._last: deque[float] = deque(maxlen=window)
        self.spikes = self.values = 0

    def add(self, value: float) -> None:
        """Take the next value."""
        if not math.isfinite(value):
            return
        if 2 * len(self._last) >= self._window:
            before = np.fromiter(self._last, np.float64, len(self._last))
            mean = before.mean()
            deviation = math.sqrt(np.square(before - mean).sum() / (len(before) - 1))
            self.spikes += bool(abs(value - mean) > self._sigma * deviation)
        self.values += 1
        self._last.append(value)

    @property
    def score(self) -> float:
        """Share of the values so far that are spikes, 0 without values."""
        return self.spikes / max(self.values, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the window."""
        return {"last": [*self._last], "spikes": self.spikes, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, whose window may have been another one."""
        self._last = deque(state["last"], maxlen=self._window)
        self.spikes, self.values = state["spikes"], state["values"]
