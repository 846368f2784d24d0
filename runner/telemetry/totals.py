"""Sums over steps, and what the summary of a run says of all of them."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from runner.run_folder import keys
from runner.run_folder.divergence import quantile
from runner.run_folder.strict_json import Row


@dataclass
class Sums:
    """Sums over the steps since the last row, or of the whole run."""

    steps: int = 0
    nonfinite: int = 0
    skipped: int = 0  # as spikes
    clipped: float = 0.0
    fraction: float = 0.0
    norm: float = 0.0
    norm_max: float = 0.0
    seconds: float = 0.0  # of the window alone

    def add(self, numbers: Row) -> None:
        norm = numbers[keys.GRAD_NORM]
        self.steps += 1
        self.nonfinite += not math.isfinite(norm)
        self.skipped += bool(numbers.get(keys.CLIP_SPIKE))
        self.clipped += numbers[keys.CLIP_CLIPPED]
        self.fraction += numbers[keys.CLIP_FRACTION]
        self.norm += norm
        self.norm_max = norm if math.isnan(norm) else max(self.norm_max, norm)  # NaN stays


def spread(values: array[float]) -> dict[str, float]:
    """Return percentiles, maximum and mean of the finite values."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return {}
    spread = {f"p{share}": quantile(finite, share / 100) for share in (50, 90, 95, 99)}
    return spread | {"max": finite[-1], "mean": math.fsum(finite) / len(finite)}
