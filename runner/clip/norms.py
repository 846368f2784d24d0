"""The total norm of a model's gradients, accurate at any size and right over any layout.

``‖G‖_p = (Σ over the world of Σ|g|^p ÷ ranks holding g)^(1/p)``; the largest |g| for p = inf.

A float32 sum of squares loses digits as it grows (``torch.linalg.vector_norm`` on a CPU is off by
8e-3 at 1e8 elements, ``torch.dot`` by 1e-4). Here gradients are summed in rows of 2,048 elements in
float32 and the rows in float64: 2e-8 at 1e8 elements for the price of one read. A few small ones
are summed by one float32 dot product each, off by 1e-7. Where powers leave float32's range, all is
summed once more in float64. Accelerators accumulate in float64, which their bandwidth hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_, truediv
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number

_REPLICAS = attrgetter("num_replicas")

ROW = 2_048  # elements whose powers are summed in float32
BLOCK = 2**20  # elements that a CPU looks at several times: they stay in a cache
# Largest number of elements of a gradient that is copied into one buffer with other such ones.
SMALL = 32_768
FEW = 16  # gradients up to which small ones are not copied: their dot products cost less
EXACT = 131_072  # elements up to which more gradients than that are summed in float64
# Outside of these bounds a sum of powers may have lost elements that float32 does not hold.
VANISHES, OVERFLOWS = 1e-20, 1e30


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
        return combined_norms(transfer.on_device(powers, device), norm_type)
    if math.isinf(norm_type):
        # The result of max() with NaN depends on the order.
        return math.nan if any(map(math.isnan, powers)) else max(powers)
    total: float = float(sum(powers)) ** (1.0 / norm_type)
    return total


def combine_norms(norms: Sequence[Number], norm_type: float) -> Number:
    """Return the norm of everything, given the norm of each part."""
    whole = norms if math.isinf(norm_type) else [norm**norm_type for norm in norms]
    return combine(whole, norm_type)


def combined_norms(every: Tensor, norm_type: float) -> Tensor:
    """Return the norms, [...], whose shares on all ranks are given, [ranks, ...]."""
    return every.amax(0) if math.isinf(norm_type) else every.sum(0) ** (1.0 / norm_type)


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
    replicas: list[int] = list(map(_REPLICAS, shards))
    if gradients and not transfer.can_read(gradients[0].device):
        dtype = transfer.widest(gradients[0].device)
        values = torch.stack(torch._foreach_norm(list(gradients), norm_type, dtype=dtype))
        if math.isinf(norm_type):
            return values.amax(), Powers(shards, values, norm_type)
        values = values**norm_type
        if max(replicas) > 1:
            values = values / layout.replicas_of(shards)
        return values.sum(), Powers(shards, values, norm_type)
    if math.isinf(norm_type):
        shares = list(map(largest, gradients))
        whole = combine(shares or [0.0], norm_type)
    else:
        if gradients and not each:
            whole, numbers = 0.0, {*replicas}
            for held in sorted(numbers):
                alike = gradients
                if len(numbers) > 1:
                    alike = list(compress(gradients, map(held.__eq__, replicas)))
                whole += power_sum(alike, norm_type) / held
            if math.isfinite(whole):
                return whole, None
        powers = [power_sum([gradient], norm_type) for gradient in gradients]
        shares = list(map(truediv, powers, replicas))
        whole = float(sum(shares))
    return whole, Powers(shards, transfer.on_device(shares, torch.device("cpu")), norm_type)


def power_sum(gradients: Sequence[Tensor], norm_type: float = 2.0) -> float:
    """Return Σ|g|^p of all elements of gradients on a CPU; NaN or inf where any element is."""
    sizes = list(map(Tensor.numel, gradients))
    if norm_type == 2.0 and 0 < len(sizes) <= FEW and max(sizes) <= SMALL:
        views = list(map(flatten, gradients))
        if all(view.dtype.itemsize >= 4 for view in views):
            power = sum(map(Tensor.item, map(torch.dot, views, views)))
            if VANISHES < power < OVERFLOWS:
                return power
    if norm_type == 2.0 and 0 < sum(sizes) <= EXACT:
        wide = gathered(gradients).double()
        return torch.dot(wide, wide).item()
    small = list(map(SMALL.__ge__, sizes))
    blocks = list(map(flatten, compress(gradients, map(not_, small))))
    if any(small):
        blocks.append(gathered(list(compress(gradients, small))))
    norms = [torch.empty(0)]
    for block in blocks:
        n, left = divmod(block.numel(), ROW)
        dtype = torch.float32 if block.dtype.itemsize < 4 else None
        rows = block.as_strided((n, ROW), (ROW, 1))
        norms.append(torch.linalg.vector_norm(rows, norm_type, 1, dtype=dtype))
        if left:
            tail = block[n * ROW :].view(1, -1)
            norms.append(torch.linalg.vector_norm(tail, norm_type, 1, dtype=torch.float64))
    each = torch.cat(norms).double()
    power = float((each**norm_type).sum())
    if VANISHES < power < OVERFLOWS or not any(map(largest, blocks)):
        return power
    parts = (part.double() for block in blocks for part in torch.split(block, BLOCK))
    return sum(float((part.abs() ** norm_type).sum()) for part in parts)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor on a CPU; NaN if any element is."""
    if not tensor.numel():
        return 0.0
    # A tenth of the time of vector_norm; both ends are NaN where any element is.
    low, high = torch.aminmax(tensor)
    return max(abs(low.item()), abs(high.item()))


def gathered(gradients: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements, [elements], in their widest type."""
    flat = {*map(Tensor.dim, gradients)} == {1}  # saves a fifth where there are many
    return torch.cat(list(gradients if flat else map(Tensor.flatten, gradients)))


def flatten(tensor: Tensor) -> Tensor:
    """Return all elements in the order of memory, fit for sums: a view of any dense tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    return tensor.permute(order).reshape(-1).contiguous()
