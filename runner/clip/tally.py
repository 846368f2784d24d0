"""A histogram of what a mode compares with λ, over all elements or units of a model.

The maximum of a step does not describe the other values: the gradient of one embedding row that
starts near zero may be 1000 times its weight, while most units stay below 0.01.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.transfer import Number

# Decimal exponents of the bounds of the bins, and its bins of one decade, 6 % wide.
LOWEST, HIGHEST, PER_DECADE = -16, 12, 40
BINS = (HIGHEST - LOWEST) * PER_DECADE
CHUNK = 2**24  # elements that a float32 bin can count one by one


class Tally:
    """Counts elements or units in bins, on their device, without waiting for the host.

    Zeros and values beyond the bounds count in the total alone, and NaN nowhere.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._counts: Tensor | None = None  # of each bin, and of everything
        self._step: Tensor | None = None

    def add(self, values: Tensor, weight: float) -> None:
        """Count ``values`` of the current step."""
        if self._skip > 0 or values.numel() == 0:
            return
        wide = transfer.widest(values.device)
        if self._step is None:
            self._step = torch.zeros(BINS + 1, dtype=wide, device=values.device)
        for chunk in torch.split(values.detach().reshape(-1), CHUNK):
            logs = chunk.float().log10() if chunk.dtype.itemsize < 4 else chunk.log10()
            self._step[:-1] += torch.histc(logs, BINS, LOWEST, HIGHEST).to(wide) * weight
        self._step[-1] += (values == values).sum().to(wide) * weight

    def end_step(self, norm: Number) -> None:
        """Keep the counts of the current step, unless its gradient was not finite."""
        self._skip -= 1
        step, self._step = self._step, None
        if step is not None:
            counted = step * torch.as_tensor(norm).isfinite().to(step)
            self._counts = counted if self._counts is None else self._counts + counted

    def gather(self, layout: Layout) -> tuple[list[float], float]:
        """Return the counts of each bin and of everything, over all ranks; one collective."""
        counts = [0.0] * (BINS + 1) if self._counts is None else self._counts.tolist()
        *everywhere, total = (math.fsum(map(float, column)) for column in layout.gather(counts))
        return everywhere, total
