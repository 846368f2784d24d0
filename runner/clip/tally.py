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

LOWEST, HIGHEST = -16, 12
"""Decimal exponents of the bounds; values outside, such as zeros, count in the total alone."""

PER_DECADE = 40
"""Bins of one decade: each is 6 % wide."""

BINS = (HIGHEST - LOWEST) * PER_DECADE

CHUNK = 2**24
"""Elements that a float32 bin can count one by one."""


class Tally:
    """Counts elements or units in bins, on their device, without waiting for the host."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._counts: Tensor | None = None
        self._total: Number = 0.0
        self._step: Tensor | None = None
        self._step_total: Number = 0.0

    def add(self, values: Tensor, weight: float) -> None:
        """Count ``values`` of the current step."""
        if self._skip > 0 or values.numel() == 0:
            return
        wide = transfer.widest(values.device)
        if self._step is None:
            self._step = torch.zeros(BINS, dtype=wide, device=values.device)
        for chunk in torch.split(values.detach().reshape(-1), CHUNK):
            logs = chunk.float().log10() if chunk.dtype.itemsize < 4 else chunk.log10()
            self._step += torch.histc(logs, BINS, LOWEST, HIGHEST).to(wide) * weight
        self._step_total = self._step_total + (values == values).sum().to(wide) * weight

    def end_step(self, norm: Number) -> None:
        """Keep the counts of the current step, unless its gradient was not finite."""
        self._skip -= 1
        step, total = self._step, self._step_total
        self._step, self._step_total = None, 0.0
        if step is None:
            return
        if self._counts is None:
            self._counts = torch.zeros_like(step)
        finite = torch.as_tensor(norm).isfinite().to(step)
        self._counts += step * finite
        self._total = self._total + total * finite

    def gather(self, layout: Layout) -> tuple[list[float], float]:
        """Return the counts of each bin and of everything, over the ranks of ``layout``.

        One collective where ranks share the model; every one of them has to call it.
        """
        counts = [0.0] * BINS if self._counts is None else self._counts.tolist()
        columns = layout.gather([*counts, float(self._total)])
        *everywhere, total = (math.fsum(float(part) for part in column) for column in columns)
        return everywhere, total
