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

from runner.gradients import host, transfer
from runner.gradients.layout import Layout
from runner.gradients.shard import ParamShard
from runner.gradients.transfer import Number


class Powers(NamedTuple):
    """Share of each gradient of one rank in ‖G‖^p: Σ|g|^p ÷ num_replicas (max|g| for p = inf)."""

    shards: Sequence[ParamShard]  # those that have a gradient
    each: Tensor  # [shards]
    norm_type: float

    def not_finite(self) -> list[str]:
        """Return the names of the shards whose gradient is not finite; waits for an accelerator."""
        finite = self.each.isfinite().tolist()
        return [shard.name for shard, known in zip(self.shards, finite, strict=True) if not known]

    def of_parameters(self, layout: Layout) -> Tensor:
        """Return the share of each parameter, [parameters], on the device of ``layout``."""
        positions = layout.positions_of(self.shards)
        each = self.each.to(layout.device, transfer.widest(layout.device))
        shares = each.new_zeros(len(layout.names))
        # A tied parameter may lie on this rank twice.
        if math.isinf(self.norm_type):
            return shares.scatter_reduce_(0, positions, each, "amax")
        return shares.index_add_(0, positions, each)


def total_norm(layout: Layout, norm_type: float = 2.0) -> Number:
    """Return ‖G‖ of all gradients of ``layout``; one small collective if it spans ranks."""
    power, _ = powers_of(layout, *layout.gradients(), norm_type)
    return combine(layout.gather([power])[0], norm_type)


def combine(powers: Sequence[Number], norm_type: float) -> Number:
    """Return the norm, given the share of each rank in ‖G‖^p."""
    device = next((power.device for power in powers if isinstance(power, Tensor)), None)
    if device is not None:
        on_ranks = transfer.on_device(powers, device)
        return on_ranks.amax() if math.isinf(norm_type) else on_ranks.sum() ** (1.0 / norm_type)
    if math.isinf(norm_type):
        # The result of max() with NaN depends on the order.
        return math.nan if any(map(math.isnan, powers)) else max(powers)
    total: float = float(sum(powers)) ** (1.0 / norm_type)
    return total


def combine_norms(norms: Sequence[Number], norm_type: float) -> Number:
    """Return the norm of everything, given the norm of each part."""
    whole = norms if math.isinf(norm_type) else [norm**norm_type for norm in norms]
    return combine(whole, norm_type)


def norms_over_ranks(layout: Layout, shares: Tensor, norm_type: float) -> Tensor:
    """Return norms, [...], given this rank's share in the power of each; one collective."""
    if math.isinf(norm_type):
        return layout.max(shares)
    return layout.sum(shares) ** (1.0 / norm_type)


def powers_of(
    layout: Layout,
    shards: Sequence[ParamShard],
    gradients: Sequence[Tensor],
    norm_type: float,
    each: bool = False,
) -> tuple[Number, Powers | None]:
    """Return this rank's share of ‖G‖^p (its largest |g| for p = inf), and that of each gradient.

    On a CPU the shares of finite gradients are None unless ``each`` asks for them.
    """
    if gradients and not transfer.can_read(gradients[0].device):
        return _powers_on_device(layout, shards, gradients, norm_type)
    if gradients and not each and not math.isinf(norm_type):
        power = 0.0
        for replicas in sorted({shard.num_replicas for shard in shards}):
            pairs = zip(shards, gradients, strict=True)
            alike = [gradient for shard, gradient in pairs if shard.num_replicas == replicas]
            power += host.power_sum(alike, norm_type) / replicas
        if math.isfinite(power):
            return power, None
    shares = []
    for shard, gradient in zip(shards, gradients, strict=True):
        if math.isinf(norm_type):
            shares.append(host.largest(gradient))
        else:
            shares.append(host.power_sum([gradient], norm_type) / shard.num_replicas)
    whole = combine(shares or [0.0], norm_type) if math.isinf(norm_type) else float(sum(shares))
    return whole, Powers(shards, transfer.on_device(shares, torch.device("cpu")), norm_type)


def _powers_on_device(
    layout: Layout, shards: Sequence[ParamShard], gradients: Sequence[Tensor], norm_type: float
) -> tuple[Tensor, Powers]:
    dtype = transfer.widest(gradients[0].device)
    values = torch.stack(torch._foreach_norm(list(gradients), norm_type, dtype=dtype))
    if math.isinf(norm_type):
        return values.amax(), Powers(shards, values, norm_type)
    values = values**norm_type
    if any(shard.num_replicas > 1 for shard in shards):
        values = values / layout.replicas_of(shards)
    return values.sum(), Powers(shards, values, norm_type)
