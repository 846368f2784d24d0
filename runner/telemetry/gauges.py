"""Measurements of which each rank has a share: norms of parameters, and of their updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runner.clip import Layout, ParamShard
from runner.clip.norms import Powers, combined_norms, powers_of
from runner.run_folder import keys
from runner.run_folder.strict_json import Row


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
