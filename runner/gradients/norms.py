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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.gradients import transfer
from runner.gradients.kernels import kernels_of
from runner.gradients.layout import Layout
from runner.gradients.shard import ParamShard

TRUE = torch.tensor(True)
FALSE = torch.tensor(False)


@dataclass(slots=True, eq=False)
class Norms:
    """What was measured of final gradients.

    Attributes:
        total: ‖G‖, the same on every rank.
        finite: whether ``total`` is finite, a 0-dimensional boolean tensor: ``TRUE`` or ``FALSE``
            where the host has read it. Cleared for a step that a skip rule leaves out.
        norm_type: p of the norms.
        shards: the shards of this rank with a gradient, where ``shares`` were measured.
        shares: share of each of these gradients in ‖G‖^p, [shards]: Σ|g|^p ÷ num_replicas (max|g|
            for p = inf). None where they were not measured.
        work: what a mode measured besides, in the same read, see :meth:`ClipMode.measure`.
    """

    total: Tensor
    finite: Tensor
    norm_type: float = 2.0
    shards: Sequence[ParamShard] = ()
    shares: Tensor | None = None
    work: Any = None

    @classmethod
    def of(cls, layout: Layout, norm_type: float = 2.0, each: bool = False) -> Norms:
        """Measure the gradients of ``layout``: one small collective if it spans ranks.

        With ``each`` there are ``shares``; as on an accelerator, and where ‖G‖ is not finite.
        """
        shards, gradients = layout.gradients()
        power, shares = powers_of(layout, shards, gradients, norm_type, each)
        total = norm_of_ranks(layout, power, norm_type)
        return cls(total, is_finite(total), norm_type, shards, shares)

    @classmethod
    def measured(cls, total: Tensor, work: Any = None) -> Norms:
        """Return what a mode has measured itself."""
        return cls(total, is_finite(total), work=work)

    def not_finite(self) -> list[str]:
        """Return the names of the shards whose gradient is not finite; waits for an accelerator."""
        if self.shares is None:
            return []
        finite = self.shares.isfinite().tolist()
        return [
            shard.name
            for shard, is_finite in zip(self.shards, finite, strict=True)
            if not is_finite
        ]

    def of_parameters(self, layout: Layout) -> Tensor:
        """Return the share of each parameter, [parameters], on the device of ``layout``."""
        assert self.shares is not None
        return by_parameter(layout, self.shards, self.shares, self.norm_type)


def by_parameter(
    layout: Layout, shards: Sequence[ParamShard], shares: Tensor, norm_type: float
) -> Tensor:
    """Return the share of each parameter, [parameters], given the shares of this rank's shards."""
    shares = shares.to(layout.device, transfer.widest(layout.device))
    if shards is layout.shards and layout.shards_are_parameters:
        return shares
    positions = layout.positions_of(shards)
    of_parameters = shares.new_zeros(len(layout.names))
    # A tied parameter may lie on this rank twice.
    if math.isinf(norm_type):
        return of_parameters.scatter_reduce_(0, positions, shares, "amax")
    return of_parameters.index_add_(0, positions, shares)


def is_finite(norm: Tensor) -> Tensor:
    """Return whether a norm is finite; one that a host may read gives ``TRUE`` or ``FALSE``."""
    if transfer.can_read(norm.device):
        return TRUE if norm.item() < math.inf else FALSE
    return norm < math.inf  # no norm is negative, and NaN is not less


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
) -> tuple[Tensor, Tensor | None]:
    """Return the share in ‖G‖^p (largest |g| for p = inf) of this rank, and of each shard.

    On a CPU the shares of finite gradients are None unless ``each`` asks for them.
    """
    if not gradients:
        nothing = layout.number(0.0)
        return nothing, nothing.new_empty(0) if each else None
    kernels = kernels_of(gradients[0].device)
    return kernels.powers(layout, shards, gradients, norm_type, each)
