"""Measurements of a step beside its metrics: norms of layers, updates, the gradient noise scale."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.clip import Layout, Number, ParamShard
from runner.clip.norms import Powers, combined_norms, powers_of
from runner.run_folder import keys
from runner.run_folder.rows import Row

WINDOW = 100
"""Number of measured steps that the noise scale is over."""


class Gauges:
    """Measures what each rank has a share of.

    All of it lies in one vector of a step, which stays on the device. The vectors of many steps are
    combined over ranks in one collective, when metrics travel to the host.
    """

    def __init__(self, layout: Layout, norm_type: float, per_layer: bool, updates: bool) -> None:
        self._layout, self._norm_type = layout, norm_type
        self.per_layer, self._updates = per_layer, updates
        self._begun: list[Tensor] = []
        self._shards: list[ParamShard] = []
        self._weights: list[Tensor] = []

    @property
    def spans_ranks(self) -> bool:
        """Whether :meth:`over_ranks` needs the other ranks."""
        return self._layout.group is not None

    @torch.no_grad()
    def begin(self, powers: Powers | None) -> None:
        """Measure between clipping and the step, given what clipping has measured."""
        self._begun = []
        if self.per_layer:
            assert powers is not None
            assert powers.norm_type == self._norm_type
            self._begun.append(powers.of_parameters(self._layout))
        if self._updates:
            trained = [s for s in self._layout.shards if s.param.requires_grad]
            self._shards = [shard for shard in trained if shard.weight.numel()]
            self._weights = [shard.weight.clone() for shard in self._shards]

    @torch.no_grad()
    def end(self) -> Tensor:
        """Return this rank's share of all measurements, [values], on the device, after the step."""
        found, self._begun = self._begun, []
        if self._updates:
            before = self._squares(self._weights)
            # Updates are differences of weights, so whatever optimizer made them.
            torch._foreach_sub_(self._weights, [shard.weight for shard in self._shards])
            found += [self._squares(self._weights), before]
            self._shards, self._weights = [], []
        return torch.cat(found)

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps, [steps, values]; one collective."""
        stacked = torch.stack(shares)
        every = self._layout.rows_of_ranks(stacked.flatten()).view(-1, *stacked.shape)
        total = every.sum(0)
        if self.per_layer:
            layers = slice(len(self._layout.names))
            total[:, layers] = combined_norms(every[..., layers], self._norm_type)
        return total

    def row(self, values: Sequence[float]) -> Row:
        names, row = self._layout.names, Row()
        parts = [values[at : at + len(names)] for at in range(0, len(values), len(names))]
        if self.per_layer:
            row = {keys.LAYER_NORM + name: n for name, n in zip(names, parts.pop(0), strict=True)}
        if self._updates:
            updates, weights = parts
            each = zip(names, updates, weights, strict=True) if self.per_layer else ()
            row |= {keys.LAYER_UPDATE + name: math.sqrt(u / w) for name, u, w in each if w > 0}
            if (size := math.fsum(weights)) > 0:
                row[keys.UPDATE_RATIO] = math.sqrt(math.fsum(updates) / size)
        return row

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the squared norm of each parameter, [parameters]."""
        powers = powers_of(self._shards, tensors, 2.0, each=True)[1]
        assert powers is not None
        return powers.of_parameters(self._layout)


class NoiseShare(NamedTuple):
    """What the noise scale needs of one step; the means over the data-parallel ranks count."""

    microbatches: Number  # Σ n_c/N·|g_c|²
    whole: Number  # |g|², NaN where it is the square of the norm that clipping measures
    parts: float
    samples: float


class NoiseScale:
    """The batch size at which noise and gradient are equally large: B = tr(Σ) ÷ |G|².

    Σ is the covariance of the gradient of one sample and G the true gradient (McCandlish, Kaplan,
    Amodei et al. 2018, arXiv 1812.06162, section 2.2). The squared norms of gradients of two batch
    sizes give estimates of both without bias (appendix A.1). Those of a single step are very noisy,
    and so is their ratio: both are averaged over steps apart, and the ratio of the means comes with
    its standard error. The small batches are the microbatches of all data-parallel ranks: C of
    them with n_c of the N items, with gradients g_c and their mean g = Σ n_c/N·g_c.
    ``E[Σ n_c/N·|g_c|²] = |G|² + C·tr(Σ)/N`` and ``E[|g|²] = |G|² + tr(Σ)/N``.
    """

    def __init__(self) -> None:
        # tr(Σ) of one sample and |G|² of a step, both times the square of the same number.
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, share: Sequence[float], norm: float) -> None:
        small, whole, parts, samples = map(float, share)
        whole, count = norm**2 if math.isnan(whole) else whole, round(parts)
        noise = (small - whole) / (count - 1) if count > 1 else math.nan
        s, q = noise * samples, whole - noise
        if math.isfinite(s) and math.isfinite(q):
            self._last.append((s, q))

    def row(self) -> Row:
        """Return the scale over the last steps, and its standard error by the delta method."""
        if len(self._last) < 2:
            return {}
        s, q = np.array(self._last).T
        if not (mean := float(q.mean())) > 0:
            return {}
        ratio = float(s.mean()) / mean
        error = float(np.std(s - ratio * q, ddof=1)) / math.sqrt(len(s)) / mean
        return {keys.NOISE_SCALE: ratio, keys.NOISE_ERROR: error}

    def state_dict(self) -> dict[str, Any]:
        return {"last": [list(each) for each in self._last]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = deque(((s, q) for s, q in state["last"]), maxlen=WINDOW)
