"""The total norm of a model's gradients, accurate at any size and right over any layout.

``‖G‖_p = (Σ over the world of Σ|g|^p ÷ ranks holding g)^(1/p)``; the largest |g| for p = inf.

A float32 sum of squares loses digits as it grows (``torch.linalg.vector_norm`` on a CPU is off by
8e-3 at 1e8 elements, ``torch.dot`` by 1e-4). Here gradients are summed in rows of 2,048 elements in
float32 and the rows in float64: 2e-8 at 1e8 elements for the price of one read. Few elements are
summed in float64. Where powers leave float32's range, all is summed once more in float64.
Accelerators accumulate in float64, which their bandwidth hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runner.gradients import transfer
from runner.gradients.kernels import kernels_of
from runner.gradients.layout import Layout
from runner.gradients.shard import ParamShard


class Powers(NamedTuple):
    """Share of each gradient of one rank in ‖G‖^p: Σ|g|^p ÷ num_replicas (max|g| for p = inf)."""

    shards: Sequence[ParamShard]  # those that have a gradient
    each: Tensor  # [shards]
    norm_type: float

    def not_finite(self) -> list[str]:
        """Return the names of the shards whose gradient is not finite; waits for an accelerator."""
        finite = self.each.isfinite().tolist()
        return [
            shard.name
            for shard, is_finite in zip(self.shards, finite, strict=True)
            if not is_finite
        ]

    def of_parameters(self, layout: Layout) -> Tensor:
        """Return the share of each parameter, [parameters], on the device of ``layout``."""
        positions = layout.positions_of(self.shards)
        each = self.each.to(layout.device, transfer.widest(layout.device))
        shares = each.new_zeros(len(layout.names))
        # A tied parameter may lie on this rank twice.
        if math.isinf(self.norm_type):
            return shares.scatter_reduce_(0, positions, each, "amax")
        return shares.index_add_(0, positions, each)


def total_norm(layout: Layout, norm_type: float = 2.0) -> Tensor:
    """Return ‖G‖ of all gradients of ``layout``; one small collective if it spans ranks."""
    power, _ = powers_of(layout, *layout.gradients(), norm_type)
    return norm_of_ranks(layout, power, norm_type)


def norm_of_ranks(layout: Layout, power: Tensor, norm_type: float) -> Tensor:
    """Return ‖G‖, given this rank's share of its power; one small collective."""
    if math.isinf(norm_type):
        [largest] = layout.totals(maxima=[power])
        return largest
    [total] = layout.totals(sums=[power])
    return root(total, norm_type)


def combine_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of everything, given the norm of each part."""
    parts = torch.stack(list(norms))
    if math.isinf(norm_type):
        return parts.amax()
    return root((parts**norm_type).sum(), norm_type)


def root(power: Tensor, norm_type: float) -> Tensor:
    """Return norms, given their powers."""
    if norm_type == 2.0:
        return power.sqrt()
    return power if math.isinf(norm_type) else power ** (1.0 / norm_type)


def norms_over_ranks(layout: Layout, shares: Tensor, norm_type: float) -> Tensor:
    """Return norms, [...], given this rank's share in the power of each; one collective."""
    if math.isinf(norm_type):
        return layout.max(shares)
    return root(layout.sum(shares), norm_type)


def powers_of(
    layout: Layout,
    shards: Sequence[ParamShard],
    gradients: Sequence[Tensor],
    norm_type: float,
    each: bool = False,
) -> tuple[Tensor, Powers | None]:
    """Return this rank's share of ‖G‖^p (its largest |g| for p = inf), and that of each gradient.

    On a CPU the shares of finite gradients are None unless ``each`` asks for them.
    """
    if not gradients:
        nothing = layout.number(0.0)
        return nothing, Powers(shards, nothing.new_empty(0), norm_type) if each else None
    kernels = kernels_of(gradients[0].device)
    whole, shares = kernels.powers(layout, shards, gradients, norm_type, each)
    return whole, None if shares is None else Powers(shards, shares, norm_type)
