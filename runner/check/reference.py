"""The reference that clipping is compared with: float64 arithmetic on plain tensors.

It shares no code with the clipping modes, and nothing here knows of ranks, except that a norm is
made of sums of powers, which add up over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

TORCH_EPS = 1e-6
"""``torch.nn.utils.clip_grad_norm_`` adds it to the norm that it divides by; others do not."""

_CHUNK = 2**19  # bytes that are worked on at a time, so that they stay in a cache
_CHUNK_ON_DEVICE = 2**27  # where memory counts, not a cache
_EXACT = 8  # bytes of an element in float64


def elements_at_a_time(tensor: Tensor, width: int) -> int:
    """Return how many elements of a tensor are worked on at a time, in ``width`` bytes each."""
    on_cpu = tensor.device.type == "cpu"
    size = _CHUNK * torch.get_num_threads() if on_cpu else _CHUNK_ON_DEVICE
    return size // width


def chunks(*tensors: Tensor, width: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of tensors of one shape side by side, some at a time.

    The work needs ``width`` bytes for each element, by default those of its type.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    elements = flat[0].numel()
    at_a_time = elements_at_a_time(tensors[0], width or tensors[0].element_size())
    pieces = round(elements / at_a_time)
    if pieces <= 1:
        yield tuple(flat)
        return
    size = math.ceil(elements / pieces)
    yield from zip(*(torch.split(tensor, size) for tensor in flat), strict=True)


class Buffer:
    """Memory for the chunks of one pass: a new tensor for each would cost more than the work."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.dtype, torch.device, str], Tensor] = {}

    def like(self, part: Tensor, dtype: torch.dtype, use: str = "") -> Tensor:
        """Return an uninitialised vector as long as ``part``; each use has memory of its own."""
        elements = part.numel()
        key = (dtype, part.device, use)
        memory = self._tensors.get(key)
        if memory is not None and memory.numel() == elements:
            return memory
        if memory is None or memory.numel() < elements:
            memory = torch.empty(elements, dtype=dtype, device=part.device)
            self._tensors[key] = memory
        return memory[:elements]


def power_sum(tensor: Tensor, p: float, buffer: Buffer | None = None) -> Tensor:
    """Return Σ|x|^p of a tensor in float64; max|x| for p = inf, the number of non-zeros for 0.

    The result is a 0-dim tensor on the device.
    """
    space = Buffer() if buffer is None else buffer
    sums = [_power(part, p, space) for (part,) in chunks(tensor, width=_EXACT) if part.numel()]
    return _added(sums, p, tensor)


def copy_and_sum(tensor: Tensor, copy: Tensor, p: float, buffer: Buffer) -> Tensor:
    """Copy a tensor to ``copy``, and return :func:`power_sum` of it."""
    if not copy.is_contiguous() or copy.device != tensor.device:
        copy.copy_(tensor)
        return power_sum(copy, p, buffer)
    sums: list[Tensor] = []
    for source, target in chunks(tensor, copy, width=_EXACT):
        target.copy_(source)
        if target.numel():
            sums.append(_power(target, p, buffer))
    return _added(sums, p, copy)


def _power(part: Tensor, p: float, buffer: Buffer) -> Tensor:
    exact = buffer.like(part, torch.float64).copy_(part)
    if p == 2:
        return torch.dot(exact, exact)
    if math.isinf(p):
        return exact.abs_().amax()
    if p == 0:
        return (exact != 0).sum().double()
    return exact.abs_().pow_(p).sum()


def powers_of_rows(rows: Tensor, p: float, buffer: Buffer) -> Tensor:
    """Return :func:`power_sum` of each row of a matrix, a vector in float64."""
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    exact = buffer.like(rows, torch.float64).view(rows.shape).copy_(rows)
    norms: Tensor = torch.linalg.vector_norm(exact, p, dim=1)
    return norms if p == 0 or math.isinf(p) else norms.pow(p)


def _added(sums: list[Tensor], p: float, tensor: Tensor) -> Tensor:
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    if len(sums) == 1:
        return sums[0]
    stacked = torch.stack(sums)
    return stacked.amax() if math.isinf(p) else stacked.sum()


def combined(sums: Iterable[float], p: float) -> float:
    """Return the sum of powers of a whole, given the sums of its parts."""
    if math.isinf(p):
        values = list(sums)
        if any(math.isnan(value) for value in values):
            return math.nan
        return max(values, default=0.0)
    return math.fsum(sums)


def root(total: float, p: float) -> float:
    """Return the p-norm, given the sum of powers."""
    if math.isinf(p) or p == 0 or not total > 0:
        return total
    return float(total ** (1 / p))


def total_norm(tensors: Iterable[Tensor], p: float = 2.0) -> float:
    """Return the p-norm of all elements of ``tensors`` in float64."""
    return root(combined((float(power_sum(tensor, p)) for tensor in tensors), p), p)


def coefficients(norm: float, max_norm: float) -> tuple[float, float]:
    """Return the smallest and the largest right coefficient of clipping by the norm.

    The coefficient is min(1, λ/‖G‖) (Pascanu et al. 2013), with and without torch's 1e-6 in the
    divisor.
    """
    if not norm > 0:
        return 1.0, 1.0
    return min(1.0, max_norm / (norm + TORCH_EPS)), min(1.0, max_norm / norm)


def near(first: float, second: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to a share of the larger one."""
    if first == second:
        return True
    if not (math.isfinite(first) and math.isfinite(second)):
        return False
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def clamped(gradient: Tensor, limit: float) -> Tensor:
    """Return the gradient with every element in [-limit, limit], in float64."""
    return gradient.double().clamp(-limit, limit)


def by_units(
    gradient: Tensor, weight: Tensor, dims: Sequence[int], limit: float, eps: float
) -> Tensor:
    """Return the gradient after adaptive clipping, in float64 (Brock et al. 2021, section 4).

    ``dims`` are the dimensions that a unit's norm is taken over.
    """
    exact = gradient.double()
    if not exact.numel():
        return exact
    if not dims:
        norms = exact.abs()
        sizes = weight.double().abs()
    else:
        norms = exact.square().sum(tuple(dims), keepdim=True).sqrt()
        sizes = weight.double().square().sum(tuple(dims), keepdim=True).sqrt()
    largest = limit * sizes.clamp(min=eps)
    return torch.where(norms > largest, exact * (largest / norms.clamp(min=1e-300)), exact)
