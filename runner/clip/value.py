"""Mode ``value``: every element of the gradient is clamped to [-λ, λ].

It works element by element, so that ranks exchange nothing but counts. Unlike scaling, it changes
the direction of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.clip import Change, ChangeMode
from runner.config.modes import Value
from runner.gradients import Layout
from runner.gradients.kernels import kernels_of
from runner.gradients.norms import TRUE, Norms, norm_of_ranks, powers_of
from runner.gradients.plain import Elements


@dataclass(eq=False)
class ValueClip(Value, ChangeMode):
    """Clamp elements."""

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> Norms:
        if self.norm_type != 2.0:
            return super().measure(layout, each)
        kernels = kernels_of(layout.device)
        elements = kernels.compare_elements(layout, self.limit)
        norm = norm_of_ranks(layout, elements.power, 2.0)
        norms = Norms.measured(norm, elements)
        if each or norms.finite is not TRUE:
            norms.shards, gradients = layout.gradients()
            _, norms.shares = powers_of(layout, norms.shards, gradients, 2.0, each=True)
        return norms

    def change(self, layout: Layout, norms: Norms) -> Change:
        kernels = kernels_of(layout.device)
        elements: Elements = norms.work or kernels.compare_elements(layout, self.limit)
        total = 0.0
        for shard, gradient in zip(*layout.gradients(), strict=True):
            total += gradient.numel() / shard.num_replicas
            if self.tally is not None:
                self.tally.add(gradient.abs(), 1 / shard.num_replicas)
        kernels.clamp(elements.exceeding, self.limit)
        return Change(
            changed=elements.above,
            total=layout.number(total),
            max_stat=elements.largest,
            power=elements.clamped if self.norm_type == 2.0 else None,
        )
