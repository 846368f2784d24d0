"""Norms of parameters, of gradients and of updates, and the zeros of a gradient, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runner.gradients import Layout, ParamShard
from runner.gradients.norms import Norms, by_parameter, norms_over_ranks, powers_of
from runner.run_folder import keys
from runner.run_folder.strict_json import Row


class Gauges:
    """Measures norms of parameters and updates, and zeros, of which each rank has a share.

    The measurements of a step lie in one vector, which stays on the device until metrics travel to
    the host: then the vectors of many steps are combined over ranks.
    """

    def __init__(
        self,
        layout: Layout,
        norm_type: float,
        per_layer: bool,
        updates: bool,
        zeros: bool = False,
    ) -> None:
        self.layout = layout
        self._norm_type = norm_type
        self.per_layer = per_layer
        self._updates = updates
        self._zeros = zeros

    @torch.no_grad()
    def begin(self, norms: Norms | None) -> Callable[[], Tensor]:
        """Measure before a step; the returned function measures after it, and gives [values]."""
        of_gradients: list[Tensor] = []
        if self.per_layer:
            assert norms is not None
            of_gradients.append(norms.of_parameters(self.layout))
        if self._zeros:
            of_gradients.append(self._zeros_and_elements())
        trained = [s for s in self.layout.shards if s.param.requires_grad and s.weight.numel()]
        weights = [shard.weight.clone() for shard in trained] if self._updates else []

        @torch.no_grad()
        def end() -> Tensor:
            if not self._updates:
                return torch.cat(of_gradients)
            before = self._squares(trained, weights)
            # Updates are differences of weights, so whatever optimizer made them.
            torch._foreach_sub_(weights, [shard.weight for shard in trained])
            return torch.cat([*of_gradients, self._squares(trained, weights), before])

        return end

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps, [steps, values]; a collective for each step.

        One for all of them could round a step differently where other steps travel with it, as in
        a run that continues.
        """
        return torch.stack([self._step_over_ranks(share) for share in shares])

    def _step_over_ranks(self, share: Tensor) -> Tensor:
        if not self.per_layer:
            return self.layout.sum(share)
        layers = len(self.layout.names)
        if math.isinf(self._norm_type):
            norms = norms_over_ranks(self.layout, share[:layers], self._norm_type)
            return torch.cat([norms, self.layout.sum(share[layers:])])
        total = self.layout.sum(share)
        norms = total[:layers] ** (1.0 / self._norm_type)
        return torch.cat([norms, total[layers:]])

    def row(self, values: Sequence[float]) -> Row:
        """Return the metrics of a step, given its values in the order of :meth:`begin`."""
        names = self.layout.names
        remaining = list(values)
        row: Row = {}
        if self.per_layer:
            norms = remaining[: len(names)]
            del remaining[: len(names)]
            row |= {keys.LAYER_NORM + name: n for name, n in zip(names, norms, strict=True)}
        if self._zeros:
            zeros, elements = remaining[:2]
            del remaining[:2]
            if elements > 0:
                row[keys.GRAD_ZEROS] = zeros / elements
        if self._updates:
            updates = remaining[: len(names)]
            weights = remaining[len(names) :]
            if self.per_layer:
                for name, update, weight in zip(names, updates, weights, strict=True):
                    if weight > 0:
                        row[keys.LAYER_UPDATE + name] = math.sqrt(update / weight)
            whole = math.fsum(weights)
            square = math.fsum(updates)
            row[keys.UPDATE_NORM] = math.sqrt(square)
            if whole > 0:
                row[keys.UPDATE_RATIO] = math.sqrt(square / whole)
        return row

    def _zeros_and_elements(self) -> Tensor:
        """Return this rank's share of the zeros of the gradient, and of all its elements, [2]."""
        zeros = self.layout.number(0.0)
        elements = 0.0
        for shard, gradient in zip(*self.layout.gradients(), strict=True):
            zeros = zeros + (gradient == 0).sum().to(zeros.dtype) / shard.num_replicas
            elements += gradient.numel() / shard.num_replicas
        return torch.stack([zeros, self.layout.number(elements)])

    def _squares(self, shards: Sequence[ParamShard], tensors: Sequence[Tensor]) -> Tensor:
        _, squares = powers_of(self.layout, shards, tensors, 2.0, each=True)
        assert squares is not None
        return by_parameter(self.layout, shards, squares, 2.0)
