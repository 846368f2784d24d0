"""The total norm of a model's gradients, accurate at any size and right over any layout.

``‖G‖_p = (Σ over the world of Σ|g|^p ÷ ranks holding g)^(1/p)``; the largest |g| for p = inf.

Accuracy: a float32 sum of squares loses digits as it grows (``torch.linalg.vector_norm`` on a CPU
is off by 8e-3 at 1e8 elements). Here a long gradient is summed in rows of 2,048 elements in
float32 and the rows in float64: 2e-8 at 1e8 elements for the price of one read. Where the squares
leave float32's range the tensor is read once more in float64. Accelerators accumulate in float64,
which their memory bandwidth hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter, truediv
from typing import NamedTuple, cast

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number

_REPLICAS = attrgetter("num_replicas")

ROW = 2_048
SHORT = 65_536
EXACT = (torch.float32, torch.float64)
SQUARES_VANISH = 1e-30
SQUARES_OVERFLOW = 1e30
"""A float32 sum of squares outside of these bounds is taken again in float64."""


class Powers(NamedTuple):
    """Σ|g|^p of each gradient on one rank (max|g| for p = inf), kept for a step that is not finite.

    Attributes:
        shards: the shards that have a gradient.
        each: one value for each shard: floats on a CPU, one vector on an accelerator.
    """

    shards: Sequence[ParamShard]
    each: Sequence[Number] | Tensor

    def not_finite(self) -> list[str]:
        """Return the names of the shards whose gradient is not finite; waits for an accelerator."""
        each: Sequence[Number] = self.each.tolist() if isinstance(self.each, Tensor) else self.each
        found = zip(self.shards, each, strict=True)
        return [shard.name for shard, power in found if not math.isfinite(power)]


def total_norm(layout: Layout, norm_type: float = 2.0, kept: list[Powers] | None = None) -> Number:
    """Return ‖G‖ of all gradients of ``layout``; one small collective if it spans ranks.

    Args:
        layout: where the gradients live. A rank without gradients takes part with 0.
        norm_type: p of the norm, at least 1, or inf.
        kept: list to which the share of each gradient is appended, which is computed anyway.

    Returns:
        A float on a CPU, a 0-dimensional float64 tensor on an accelerator. NaN or inf where any
        gradient holds one.
    """
    local = local_power(layout, norm_type, kept)
    return combine([local] if layout.group is None else layout.gather([local])[0], norm_type)


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


def local_power(layout: Layout, norm_type: float, kept: list[Powers] | None = None) -> Number:
    """Return this rank's share of ‖G‖^p (Σ|g|^p ÷ num_replicas), or its largest |g| for p = inf.

    Args:
        layout: where the gradients live.
        norm_type: p of the norm.
        kept: see :func:`total_norm`.
    """
    shards, gradients = layout.gradients()
    powers = power_sums(gradients, norm_type)
    num_replicas = list(map(_REPLICAS, shards))
    if powers and isinstance(powers[0], Tensor):
        tensors = cast(list[Tensor], powers)
        added = not math.isinf(norm_type)
        divided = added and max(num_replicas) > 1
        shares = torch.stack(torch._foreach_div(tensors, num_replicas) if divided else tensors)
        if kept is not None:
            kept.append(Powers(shards, shares))
        return shares.sum() if added else shares.amax()
    if kept is not None:
        kept.append(Powers(shards, powers))
    if math.isinf(norm_type):
        return combine(powers or [0.0], norm_type)
    return float(sum(map(truediv, powers, num_replicas)))


def norms(layout: Layout, norm_type: float = 2.0) -> dict[str, float]:
    """Return the norm of each parameter's gradient, on the host; one collective for all of them."""
    shares = parameter_powers(layout, norm_type).unsqueeze(0)
    [each] = parameter_norms(layout, shares, norm_type).tolist()
    return dict(zip(layout.names, each, strict=True))


def parameter_powers(layout: Layout, norm_type: float = 2.0) -> Tensor:
    """Compute this rank's share of Σ|g|^p (max|g| for inf) of each parameter's gradient.

    There is no collective, and the host does not wait for an accelerator.

    Returns:
        One value for each of ``layout.names``, in the widest type of the device: 0 where this rank
        has no gradient of the parameter.
    """
    shards, gradients = layout.gradients()
    index = {name: i for i, name in enumerate(layout.names)}
    powers = transfer.on_device(power_sums(gradients, norm_type), layout.device)
    at = transfer.on_device([index[shard.name] for shard in shards], layout.device).long()
    shares = powers.new_zeros(len(index))
    # A tied parameter may lie on this rank twice.
    if math.isinf(norm_type):
        return shares.scatter_reduce_(0, at, powers, "amax")
    replicas = transfer.on_device([shard.num_replicas for shard in shards], layout.device)
    return shares.index_add_(0, at, powers / replicas)


def parameter_norms(layout: Layout, shares: Tensor, norm_type: float = 2.0) -> Tensor:
    """Combine the ranks' shares of parameter norms; one collective where a layout spans ranks.

    Args:
        layout: layout that the shares were measured on.
        shares: results of :func:`parameter_powers` of several steps, [steps, parameters].
        norm_type: p of the norm.

    Returns:
        The norm of each parameter's gradient in each step, [steps, parameters], on the device.
    """
    every = layout.rows_of_ranks(shares.flatten()).view(-1, *shares.shape)
    return every.amax(0) if math.isinf(norm_type) else every.sum(0) ** (1.0 / norm_type)


def power_sums(gradients: Sequence[Tensor], norm_type: float) -> list[Number]:
    """Return Σ|g|^p (max|g| for inf) of each gradient."""
    if not gradients or transfer.can_read(gradients[0].device):
        return [_power_sum(g, norm_type) for g in gradients]
    dtype = transfer.widest(gradients[0].device)
    each = torch._foreach_norm(list(gradients), norm_type, dtype=dtype)
    return list(each if math.isinf(norm_type) else torch._foreach_pow(each, norm_type))


def _power_sum(gradient: Tensor, norm_type: float) -> float:
    n = gradient.numel()
    if math.isinf(norm_type):
        # A tenth of the time of vector_norm; both ends are NaN where any element is.
        low, high = torch.aminmax(gradient)
        return max(abs(low.item()), abs(high.item()))
    flat = gradient.view(-1) if gradient.is_contiguous() else flatten(gradient)
    if norm_type == 2.0 and n <= SHORT and flat.dtype in EXACT:
        power: float = torch.dot(flat, flat).item()
    else:
        rows = n // ROW * ROW
        parts = [flat[:rows].view(-1, ROW)] if rows else []
        power = _combined([*parts, flat[rows:].unsqueeze(0)], norm_type, torch.float32)
    if SQUARES_VANISH < power < SQUARES_OVERFLOW:
        return power
    return _combined([flat.unsqueeze(0)], norm_type, torch.float64)


def _combined(parts: Iterable[Tensor], norm_type: float, dtype: torch.dtype) -> float:
    power: float = 0.0
    for part in parts:
        wide = torch.promote_types(part.dtype, dtype)
        rows = torch.linalg.vector_norm(part, norm_type, dim=1, dtype=wide).double()
        power += rows.pow(norm_type).sum().item()
        if math.isnan(power):
            return power
    return power


def flatten(tensor: Tensor) -> Tensor:
    """Return all elements in memory order: a view of any dense tensor (channels-last too).

    A tensor that is not dense is copied. The order of elements is only fit for sums.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    return tensor.permute(order).reshape(-1)
