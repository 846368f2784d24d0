"""The total norm of a model's gradients, accurate at any size and right over any layout.

``‖G‖_p = (Σ over the world of Σ|g|^p ÷ ranks holding g)^(1/p)``; the largest |g| for p = inf.

Accuracy: a float32 sum of squares loses digits as it grows (``torch.linalg.vector_norm`` on a CPU
is off by 8e-3 at 1e8 elements, ``torch.dot`` by 1e-4). Here gradients are summed in rows of 2,048
elements in float32 and the rows in float64: 2e-8 at 1e8 elements for the price of one read. Where
powers leave float32's range, a block is scaled and summed once more while it is in a cache.
Accelerators accumulate in float64, which their memory bandwidth hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, not_, truediv
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number

_REPLICAS = attrgetter("num_replicas")

ROW = 2_048
"""Elements whose powers are summed in float32."""

BLOCK = 2**20
"""Elements that are measured together. Of 4 MiB most are still in a cache for a second look."""

EXACT = 131_072
"""Largest number of elements that are summed in float64, where that costs less than it saves."""

SMALL = 32_768
"""Largest number of elements of a gradient that is copied into one buffer with other such ones."""

FEW = 10
"""Number of small gradients up to which each is read by itself."""

FULL = (torch.float32, torch.float64)

VANISHES = 1e-20
OVERFLOWS = 1e30
"""Outside of these bounds a sum of powers may have lost elements that float32 does not hold."""


class Powers(NamedTuple):
    """Share of each gradient of one rank in ‖G‖^p: Σ|g|^p ÷ num_replicas (max|g| for p = inf).

    Attributes:
        shards: the shards that have a gradient.
        each: one value for each shard: floats on a CPU, one vector on an accelerator.
        norm_type: p.
    """

    shards: Sequence[ParamShard]
    each: Sequence[float] | Tensor
    norm_type: float

    def not_finite(self) -> list[str]:
        """Return the names of the shards whose gradient is not finite; waits for an accelerator."""
        each: Sequence[float] = self.each.tolist() if isinstance(self.each, Tensor) else self.each
        found = zip(self.shards, each, strict=True)
        return [shard.name for shard, power in found if not math.isfinite(power)]

    def of_parameters(self, layout: Layout) -> Tensor:
        """Return the share of each parameter, [parameters], on the device of ``layout``.

        There is no collective, and the host does not wait for an accelerator.
        """
        device = layout.device
        index = layout.positions
        each = self.each if isinstance(self.each, Tensor) else transfer.on_device(self.each, device)
        at = transfer.on_device([index[shard.name] for shard in self.shards], device).long()
        shares = each.new_zeros(len(index))
        # A tied parameter may lie on this rank twice.
        if math.isinf(self.norm_type):
            return shares.scatter_reduce_(0, at, each, "amax")
        return shares.index_add_(0, at, each)


class Measured(NamedTuple):
    """What one read of the gradients tells.

    Attributes:
        norm: ‖G‖: a float on a CPU, a 0-dimensional float64 tensor on an accelerator. NaN or inf
            where any gradient holds one.
        powers: share of each gradient of this rank. None on a CPU whose gradients are all finite,
            unless it was asked for.
    """

    norm: Number
    powers: Powers | None


def measure(layout: Layout, norm_type: float = 2.0, each: bool = False) -> Measured:
    """Measure all gradients of ``layout``; one small collective if it spans ranks."""
    power, powers = local_powers(layout, norm_type, each)
    norm = combine([power] if layout.group is None else layout.gather([power])[0], norm_type)
    return Measured(norm, powers)


def total_norm(layout: Layout, norm_type: float = 2.0) -> Number:
    """Return ‖G‖ of all gradients of ``layout``, see :func:`measure`."""
    return measure(layout, norm_type).norm


def combine(powers: Sequence[Number], norm_type: float) -> Number:
    """Return the norm, given :func:`local_power` of each rank."""
    device = next((power.device for power in powers if isinstance(power, Tensor)), None)
    if device is not None:
        every = transfer.on_device(powers, device)
        if math.isinf(norm_type):
            return every.amax()
        norm: Tensor = every.sum() ** (1.0 / norm_type)
        return norm
    if math.isinf(norm_type):
        # The result of max() with NaN depends on the order.
        return math.nan if any(map(math.isnan, powers)) else max(powers)
    total: float = float(sum(powers)) ** (1.0 / norm_type)
    return total


def local_powers(
    layout: Layout, norm_type: float, each: bool = False
) -> tuple[Number, Powers | None]:
    """Return this rank's share of ‖G‖^p (its largest |g| for p = inf), and that of each
    gradient.
    """
    return powers_of(*layout.gradients(), norm_type, each)


def powers_of(
    shards: Sequence[ParamShard], gradients: Sequence[Tensor], norm_type: float, each: bool
) -> tuple[Number, Powers | None]:
    """Return the share of some gradients in ‖G‖^p, and that of each, see :func:`local_powers`."""
    if gradients and not transfer.can_read(gradients[0].device):
        powers = Powers(shards, _on_accelerator(shards, gradients, norm_type), norm_type)
        assert isinstance(powers.each, Tensor)
        return (powers.each.amax() if math.isinf(norm_type) else powers.each.sum()), powers
    if math.isinf(norm_type):
        maxima = list(map(largest, gradients))
        return combine(maxima or [0.0], norm_type), Powers(shards, maxima, norm_type)
    if not gradients:
        return 0.0, Powers((), (), norm_type)
    if not each:
        power = _local_sum(shards, gradients, norm_type)
        if math.isfinite(power):
            return power, None
    powers_of = [power_sum([gradient], norm_type) for gradient in gradients]
    shares = list(map(truediv, powers_of, map(_REPLICAS, shards)))
    return float(sum(shares)), Powers(shards, shares, norm_type)


def local_power(layout: Layout, norm_type: float) -> Number:
    """Return this rank's share of ‖G‖^p (Σ|g|^p ÷ num_replicas), or its largest |g| for p = inf."""
    return local_powers(layout, norm_type)[0]


def norms(layout: Layout, norm_type: float = 2.0) -> dict[str, float]:
    """Return the norm of each parameter's gradient, on the host; one collective for all of them."""
    _, powers = local_powers(layout, norm_type, each=True)
    assert powers is not None
    shares = powers.of_parameters(layout).unsqueeze(0)
    [each] = parameter_norms(layout, shares, norm_type).tolist()
    return dict(zip(layout.names, each, strict=True))


def parameter_norms(layout: Layout, shares: Tensor, norm_type: float = 2.0) -> Tensor:
    """Combine the ranks' shares of parameter norms; one collective where a layout spans ranks."""
    every = layout.rows_of_ranks(shares.flatten()).view(-1, *shares.shape)
    return combined_norms(every, norm_type)


def combined_norms(every: Tensor, norm_type: float) -> Tensor:
    """Return the norms, [...], whose shares on all ranks are given, [ranks, ...]."""
    return every.amax(0) if math.isinf(norm_type) else every.sum(0) ** (1.0 / norm_type)


def _on_accelerator(
    shards: Sequence[ParamShard], gradients: Sequence[Tensor], norm_type: float
) -> Tensor:
    """Return the share of each gradient, [gradients]; the host does not wait."""
    dtype = transfer.widest(gradients[0].device)
    each = torch._foreach_norm(list(gradients), norm_type, dtype=dtype)
    if math.isinf(norm_type):
        return torch.stack(each)
    powers = torch._foreach_pow(each, norm_type)
    num_replicas = list(map(_REPLICAS, shards))
    if max(num_replicas) > 1:
        powers = torch._foreach_div(powers, num_replicas)
    return torch.stack(powers)


def _local_sum(
    shards: Sequence[ParamShard], gradients: Sequence[Tensor], norm_type: float
) -> float:
    """Return Σ|g|^p ÷ num_replicas over all gradients."""
    num_replicas = list(map(_REPLICAS, shards))
    different = dict.fromkeys(num_replicas)
    if len(different) == 1:
        held: int = num_replicas[0]
        return power_sum(gradients, norm_type) / held
    power = 0.0
    for held in different:
        alike = list(compress(gradients, map(held.__eq__, num_replicas)))
        power += power_sum(alike, norm_type) / held
    return power


def power_sum(gradients: Sequence[Tensor], norm_type: float = 2.0) -> float:
    """Return Σ|g|^p of all elements of gradients on a CPU; NaN or inf where any element is."""
    small = list(map(SMALL.__ge__, map(Tensor.numel, gradients)))
    if all(small):
        few = norm_type == 2.0 and len(gradients) <= FEW
        return _dots(gradients) if few else _gathered_power(gradients, norm_type)
    power, elements = 0.0, 0
    waiting: list[Tensor] = []
    for gradient in compress(gradients, map(not_, small)):
        for block in _blocks(gradient):
            waiting.append(block)
            elements += block.numel()
            if elements >= BLOCK:
                power += _power(waiting, norm_type)
                waiting, elements = [], 0
    if waiting:
        power += _power(waiting, norm_type)
    if any(small):
        power += _gathered_power(list(compress(gradients, small)), norm_type)
    return power


def _dots(gradients: Sequence[Tensor]) -> float:
    """Return Σg² of small gradients without a copy, which costs a tiny model more than it saves."""
    power = 0.0
    for gradient in gradients:
        flat = flatten(gradient)
        wide = flat if flat.dtype in FULL else flat.float()
        power += torch.dot(wide, wide).item()
    if VANISHES < power < OVERFLOWS:
        return power
    return sum([_float64_power(gradient, 2.0) for gradient in gradients])


def _gathered_power(gradients: Sequence[Tensor], norm_type: float) -> float:
    flat = gathered(gradients)
    return _float64_power(flat, norm_type) if flat.numel() <= EXACT else _power([flat], norm_type)


def _blocks(gradient: Tensor) -> Sequence[Tensor]:
    """Return contiguous blocks of all elements, which are still in a cache for a second look."""
    if not gradient.is_contiguous():
        gradient = flatten(gradient)
    if gradient.numel() < 2 * BLOCK:
        return (gradient,)
    blocks: Sequence[Tensor] = torch.split(gradient.view(-1), BLOCK)
    return blocks


def _power(blocks: Sequence[Tensor], norm_type: float) -> float:
    """Return Σ|g|^p of contiguous blocks: each row in float32, their sum in float64."""
    rows, power = [], 0.0
    for block in blocks:
        n, left = divmod(block.numel(), ROW)
        matrix = block.as_strided((n, ROW), (ROW, 1))
        dtype = torch.float32 if block.dtype.itemsize < 4 else None
        rows.append(torch.linalg.vector_norm(matrix, norm_type, 1, dtype=dtype))
        if left:
            tail = block.as_strided((left,), (1,), block.storage_offset() + n * ROW)
            power += _float64_power(tail, norm_type)
    norms = torch.cat(rows).double()
    power += (torch.dot(norms, norms) if norm_type == 2.0 else (norms**norm_type).sum()).item()
    if VANISHES < power < OVERFLOWS:
        return power
    sizes = list(map(largest, blocks))
    if not any(sizes):
        return 0.0
    return sum([_float64_power(block, norm_type) for block in blocks])


def _float64_power(block: Tensor, norm_type: float) -> float:
    wide = block.reshape(-1).double()
    if norm_type == 2.0:
        return float(torch.dot(wide, wide))
    return float(torch.linalg.vector_norm(wide, norm_type) ** norm_type)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor on a CPU; NaN if any element is."""
    if not tensor.numel():
        return 0.0
    # A tenth of the time of vector_norm; both ends are NaN where any element is.
    low, high = torch.aminmax(tensor)
    return max(abs(low.item()), abs(high.item()))


def gathered(gradients: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements, [elements], in their widest type."""
    if {*map(Tensor.dim, gradients)} == {1}:
        return torch.cat(list(gradients))  # half of the time: no views have to be made
    flat: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
    return flat


def flatten(tensor: Tensor) -> Tensor:
    """Return all elements in memory order: a view of any dense tensor (channels-last too).

    A tensor that is not dense is copied. The order of elements is only fit for sums.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    return tensor.permute(order).reshape(-1).contiguous()
