"""How large an optimizer step is, compared with the weights that it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.clip import Layout, ParamShard
from runner.clip.norms import powers_of


@dataclass(frozen=True)
class Updates:
    """Measures updates as differences of weights, so whatever optimizer made them."""

    layout: Layout

    @torch.no_grad()
    def keep(self) -> tuple[list[ParamShard], list[Tensor]]:
        """Copy the trained weights before a step."""
        shards = [s for s in self.layout.shards if s.param.requires_grad and s.weight.numel()]
        return shards, [shard.weight.clone() for shard in shards]

    @torch.no_grad()
    def share(self, kept: tuple[Sequence[ParamShard], Sequence[Tensor]]) -> Tensor:
        """Return this rank's share of squared norms, [2, parameters], after a step."""
        shards, weights = kept
        before = self._powers(shards, weights)
        torch._foreach_sub_(list(weights), [shard.weight for shard in shards])
        return torch.stack([self._powers(shards, weights), before])

    def _powers(self, shards: Sequence[ParamShard], tensors: Sequence[Tensor]) -> Tensor:
        powers = powers_of(shards, tensors, 2.0, each=True)[1]
        assert powers is not None
        return powers.of_parameters(self.layout)
