"""The gradient noise scale: the batch size at which noise and gradient are equally large.

McCandlish, Kaplan, Amodei et al. 2018 (arXiv 1812.06162): B = tr(Σ) ÷ |G|², with Σ the covariance
of the gradient of one sample and G the true gradient (section 2.2). Neither is known, but the
squared norms of gradients of two batch sizes give estimates of both without bias (appendix A.1).
Estimates of a single step are very noisy, and so is their ratio; so tr(Σ) and |G|² are averaged
over steps apart, and the ratio of the means comes with its standard error.

Here the small batches are parts of the step's own batch, in two ways:

- ``noise/microbatches``: the microbatches of a window on one rank, against their mean;
- ``noise/ranks``: the gradient of each data-parallel rank, against that of all ranks.

Parts may have different numbers of items (tokens that count, say). For C parts of n_c of the N
items, whose gradients are g_c, and their mean g = Σ n_c/N·g_c:
``E[Σ n_c/N·|g_c|²] = |G|² + C·tr(Σ)/N`` and ``E[|g|²] = |G|² + tr(Σ)/N``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from runner.clip import Number
from runner.run_folder import keys
from runner.run_folder.rows import Row

NAMES = (keys.NOISE_MICROBATCHES, keys.NOISE_RANKS)
"""Prefixes of the metrics of both estimates."""

WINDOW = 100
"""Number of measured steps that the estimate of a row is over."""


class NoiseShare(NamedTuple):
    """What the estimates of one step need; the means over the data-parallel ranks count."""

    microbatches: Number
    rank: Number
    whole: Number
    parts: float
    ranks: float
    samples: float


class _Estimate(NamedTuple):
    """tr(Σ) of one sample and |G|², both times the square of the same number."""

    trace: float
    squared_norm: float


def estimates(means: Sequence[float]) -> list[_Estimate | None]:
    """Return the two estimates of one step, in the order of :data:`NAMES`."""
    small, rank, whole, parts, groups, samples = means
    inner, outer = round(parts), round(groups)
    if outer < 2:
        rank = whole
    found: list[_Estimate | None] = []
    for a, several, b, fewer in ((small, inner, rank, outer), (rank, outer, whole, 1)):
        noise = (a - b) / (several - fewer) if several > fewer else math.nan
        each = _Estimate(noise * samples, b - fewer * noise)
        found.append(each if all(map(math.isfinite, each)) else None)
    return found


@dataclass
class _Mean:
    """Means of estimates over all steps, and over the last ones."""

    last: deque[_Estimate] = field(default_factory=lambda: deque(maxlen=WINDOW))
    sums: list[float] = field(default_factory=lambda: [0.0] * 6)

    def add(self, estimate: _Estimate) -> None:
        s, q = estimate
        self.last.append(estimate)
        self.sums = [
            a + b for a, b in zip(self.sums, (1.0, s, q, s * s, q * q, s * q), strict=True)
        ]

    def recent(self) -> tuple[float, float] | None:
        """Return the scale over the last steps, and its standard error."""
        every = np.array(self.last, dtype=np.float64).reshape(-1, 2)
        (s, q), n = every.sum(0).tolist(), len(every)
        (ss, sq), (_, qq) = (every.T @ every).tolist()
        return _ratio(n, s, q, ss, qq, sq)


def _ratio(
    n: float, s: float, q: float, ss: float, qq: float, sq: float
) -> tuple[float, float] | None:
    """Return the ratio of the means of s and q, and its standard error by the delta method."""
    if n < 2 or not q > 0:
        return None
    ratio = s / q
    variance = max(ss - 2.0 * ratio * sq + ratio * ratio * qq, 0.0) / (n - 1)
    return ratio, math.sqrt(variance / n) / (q / n)


class NoiseScale:
    """Averages the estimates of steps."""

    def __init__(self) -> None:
        self._means = [_Mean() for _ in NAMES]

    def add(self, means: Sequence[float]) -> None:
        """Take a step, see :func:`estimates`."""
        for mean, estimate in zip(self._means, estimates(means), strict=True):
            if estimate is not None:
                mean.add(estimate)

    def row(self) -> Row:
        """Return the scales over the last measured steps, in samples, with their errors."""
        row = Row()
        for name, mean in zip(NAMES, self._means, strict=True):
            if (found := mean.recent()) is not None:
                row |= {keys.noise_scale(name): found[0], f"{name}/error": found[1]}
        return row

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the scales over all measured steps, with their errors and numbers of steps."""
        return {
            name: {"scale": found[0], "error": found[1], "steps": int(mean.sums[0])}
            for name, mean in zip(NAMES, self._means, strict=True)
            if (found := _ratio(*mean.sums)) is not None
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later rows and the summary depend on."""
        return {
            name: {"last": [list(each) for each in mean.last], "sums": list(mean.sums)}
            for name, mean in zip(NAMES, self._means, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        for name, mean in zip(NAMES, self._means, strict=True):
            mean.last = deque((_Estimate(*each) for each in state[name]["last"]), maxlen=WINDOW)
            mean.sums = list(state[name]["sums"])
