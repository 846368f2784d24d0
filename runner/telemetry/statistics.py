"""What many steps come to besides sums: runs of clipped steps, spikes, the gradient noise scale.

A spike is a value that is so many standard deviations away from a rolling mean, as in OLMo 2 (arXiv
2501.00656, section 3). There the window is 1,000 steps and the limit 7 deviations; the defaults
here, 128 and 6, are those of OLMo-core's monitor, for runs of any length.

The gradient noise scale is the batch size at which noise and gradient are equally large: B = tr(Σ)
÷ |G|², with Σ the covariance of the gradient of one sample and G the true gradient (McCandlish,
Kaplan, Amodei et al. 2018, arXiv 1812.06162, section 2.2). The squared norms of gradients of two
batch sizes give estimates of both without bias (appendix A.1). Estimates of a single step are very
noisy, and so is their ratio; so tr(Σ) and |G|² are averaged over steps apart, and the ratio of the
means comes with its standard error. The small batches are parts of the step's own batch:
``noise/microbatches``, the microbatches of a window on one rank, and ``noise/ranks``, the gradients
of the data-parallel ranks. For C parts of n_c of the N items, whose gradients are g_c, and their
mean g = Σ n_c/N·g_c: ``E[Σ n_c/N·|g_c|²] = |G|² + C·tr(Σ)/N`` and ``E[|g|²] = |G|² + tr(Σ)/N``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from runner.clip import Number
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.gauges import Measurements

WINDOW = 100
"""Number of measured steps that the noise scale of a row is over."""


class NoiseShare(NamedTuple):
    """What the estimates of one step need; the means over the data-parallel ranks count."""

    microbatches: Number
    rank: Number
    whole: Number
    parts: float
    ranks: float
    samples: float


class Statistics:
    """Follows every step of a run on the host."""

    def __init__(self, options: Measurements | None = None) -> None:
        options = options or Measurements()
        self.longest = self._streak = 0
        scored = (keys.LOSS_SPIKES, keys.NORM_SPIKES) if options.spike_score else ()
        sigma, window = options.spike_sigma, options.spike_window
        self._scores = {key: SpikeScore(sigma, window) for key in scored}
        named = (keys.NOISE_MICROBATCHES, keys.NOISE_RANKS) if options.noise_scale else ()
        self._noise = {name: _NoiseScale() for name in named}

    def count(
        self,
        clipped: float,
        norm: float,
        loss: float | None,
        noise: Sequence[float] | None = None,
    ) -> None:
        """Take the next step."""
        self._streak = self._streak + 1 if clipped else 0
        self.longest = max(self.longest, self._streak)
        if self._scores:
            self._scores[keys.LOSS_SPIKES].add(math.nan if loss is None else loss)
            self._scores[keys.NORM_SPIKES].add(norm)
        if self._noise and noise is not None:
            small, rank, whole, parts, groups, samples = map(float, noise)
            whole = norm**2 if math.isnan(whole) else whole
            inner, outer = round(parts), round(groups)
            rank = whole if outer < 2 else rank
            several = ((small, inner, rank, outer), (rank, outer, whole, 1))
            for scale, comparison in zip(self._noise.values(), several, strict=True):
                scale.add(*comparison, samples)

    def row(self) -> Row:
        """Return the metrics of a row."""
        row = {key: score.score for key, score in self._scores.items()}
        for name, scale in self._noise.items():
            if (found := scale.recent()) is not None:
                row |= {keys.noise_scale(name): found[0], f"{name}/error": found[1]}
        return row

    def summary(self) -> dict[str, Any]:
        """Return what all steps came to."""
        summary: dict[str, Any] = {keys.CLIP_STREAK: self.longest}
        summary |= {key: score.score for key, score in self._scores.items()}
        for name, scale in self._noise.items():
            if (found := _ratio(*scale.sums)) is not None:
                steps = int(scale.sums[0])
                summary[name] = {"scale": found[0], "error": found[1], "steps": steps}
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later rows and the summary depend on."""
        return {
            "streak": [self._streak, self.longest],
            "scores": {key: score.state_dict() for key, score in self._scores.items()},
            "noise": {key: scale.state_dict() for key, scale in self._noise.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; what it does not hold, because it was not measured, begins now."""
        self._streak, self.longest = state["streak"]
        for own, found in ((self._scores, state["scores"]), (self._noise, state["noise"] or {})):
            for key, each in own.items():
                if key in found:
                    each.load_state_dict(found[key])


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


class _NoiseScale:
    """Means of one estimate over all steps, and over the last ones."""

    def __init__(self) -> None:
        # tr(Σ) of one sample and |G|² of a step, both times the square of the same number.
        self.last: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.sums = [0.0] * 6

    def add(self, a: float, several: int, b: float, fewer: int, samples: float) -> None:
        """Take a step: the mean square of the gradients of several parts, and of fewer ones."""
        noise = (a - b) / (several - fewer) if several > fewer else math.nan
        s, q = noise * samples, b - fewer * noise
        if math.isfinite(s) and math.isfinite(q):
            self.last.append((s, q))
            added = (1.0, s, q, s * s, q * q, s * q)
            self.sums = [total + each for total, each in zip(self.sums, added, strict=True)]

    def recent(self) -> tuple[float, float] | None:
        """Return the scale over the last steps, and its standard error."""
        every = np.array(self.last, dtype=np.float64).reshape(-1, 2)
        (s, q), n = every.sum(0).tolist(), len(every)
        (ss, sq), (_, qq) = (every.T @ every).tolist()
        return _ratio(n, s, q, ss, qq, sq)

    def state_dict(self) -> dict[str, Any]:
        return {"last": [list(each) for each in self.last], "sums": list(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last = deque(((s, q) for s, q in state["last"]), maxlen=WINDOW)
        self.sums = list(state["sums"])


def _ratio(
    n: float, s: float, q: float, ss: float, qq: float, sq: float
) -> tuple[float, float] | None:
    """Return the ratio of the means of s and q, and its standard error by the delta method."""
    if n < 2 or not q > 0:
        return None
    ratio = s / q
    variance = max(ss - 2.0 * ratio * sq + ratio * ratio * qq, 0.0) / (n - 1)
    return ratio, math.sqrt(variance / n) / (q / n)
