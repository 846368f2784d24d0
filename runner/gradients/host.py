"""What a CPU computes by other steps than an accelerator, because that takes it less time.

:mod:`runner.gradients.plain` has a twin of each function; tests compare both. Measured on one
thread, clipping without a kernel of this file takes, for ResNet-34, a 12-layer GPT or 2,000 tensors
of 64 elements:

* :func:`powers` without the copy of small gradients: up to 1.3 times as long,
* :func:`compare_elements` with ``abs`` and ``>`` in place of squares: up to 2.2 times,
* :func:`scale_units` without writing clipped units alone: up to 1.3 times.

:func:`unit_norms` is here for its digits: a float32 sum of many squares on a CPU loses some.
:func:`multiply` writes nothing where nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from runner.gradients import plain
from runner.gradients.layout import Layout
from runner.gradients.plain import SMALL, Elements, gathered
from runner.gradients.shard import ParamShard

ROW = 2_048  # elements whose powers are summed in float32
BLOCK = 2**20  # elements that are looked at several times: they stay in a cache
TOGETHER = 2**16  # elements that several operations compute at a time: they stay in a cache
EXACT = 131_072  # elements up to which all gradients together are summed in float64
LONG = 8_192  # longest unit that is summed in float32 at once, which loses digits
SPARSE = 4  # clipped units are written alone if they are at most one in 4
# Outside of these bounds a sum of powers may have lost elements that float32 does not hold.
VANISHES, OVERFLOWS = 1e-20, 1e30


TINY = 1e-30  # a coefficient below this one is applied in float64


def powers(
    layout: Layout,
    shards: Sequence[ParamShard],
    gradients: Sequence[Tensor],
    norm_type: float,
    each: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return Σ|g|^p of all gradients; and of each, if that costs nothing or ``each`` asks for it.

    The first value is the same to the bit with and without ``each``.
    """
    if math.isinf(norm_type):
        values = torch.tensor([largest(gradient) for gradient in gradients], dtype=torch.float64)
        return values.amax(), values
    replicas = layout.common_replicas(shards)
    sizes = [gradient.numel() for gradient in gradients]
    if norm_type == 2.0 and replicas is not None and sum(sizes) <= EXACT:
        wide = gathered(gradients).double()
        power = torch.dot(wide, wide)
        shares = None
        if each or not power.isfinite():
            shares = _sums_of_powers(wide, sizes, norm_type) / replicas
        return power / replicas, shares
    values = powers_of_each(gradients, norm_type)
    if replicas != 1:
        values = values / layout.replicas_of(shards)
    return values.sum(), values


def powers_of_each(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return Σ|g|^p of each gradient in float64, [gradients]; NaN or inf where any element is."""
    sizes = [gradient.numel() for gradient in gradients]
    if sum(sizes) <= EXACT:
        return _sums_of_powers(gathered(gradients), sizes, norm_type)
    powers = torch.empty(len(gradients), dtype=torch.float64)
    for numbers in _small_together(sizes):
        copy = gathered([gradients[number] for number in numbers])
        powers[numbers] = _sums_of_powers(copy, [sizes[n] for n in numbers], norm_type)
    large = [number for number, size in enumerate(sizes) if size > SMALL]
    if large:
        powers[large] = _powers_by_rows([gradients[number] for number in large], norm_type)
    return powers


def _small_together(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of small gradients, as many at once as stay in a cache in float64."""
    together: list[int] = []
    elements = 0
    for number, size in enumerate(sizes):
        if size > SMALL:
            continue
        if elements + size > EXACT:
            yield together
            together = []
            elements = 0
        together.append(number)
        elements += size
    if together:
        yield together


def _powers_by_rows(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return Σ|g|^p of each of some large gradients, from the norms of their rows."""
    norms: list[Tensor] = []
    lengths = []
    for gradient in gradients:
        of_gradient = _norms_of_rows(flatten(gradient), norm_type)
        norms += of_gradient
        lengths.append(sum([len(norms_of_part) for norms_of_part in of_gradient]))
    powers = _sums_of_powers(torch.cat(norms), lengths, norm_type)
    for number, power in enumerate(powers.tolist()):
        if not VANISHES < power < OVERFLOWS and largest(gradients[number]):
            powers[number] = _exact_power(flatten(gradients[number]), norm_type)
    return powers


def _sums_of_powers(elements: Tensor, lengths: Sequence[int], norm_type: float) -> Tensor:
    """Return Σ|g|^p in float64 of segments of these lengths, [segments]."""
    wide = elements.double()
    powers = wide * wide if norm_type == 2.0 else wide.abs() ** norm_type
    return torch.segment_reduce(powers, "sum", lengths=torch.tensor(lengths), unsafe=True)


def _exact_power(flat: Tensor, norm_type: float) -> Tensor:
    """Return Σ|g|^p of all elements, each in float64."""
    power = torch.zeros((), dtype=torch.float64)
    for part in torch.split(flat, BLOCK):
        power += (part.double().abs() ** norm_type).sum()
    return power


def power_sum(gradient: Tensor, norm_type: float = 2.0) -> Tensor:
    """Return Σ|g|^p of all elements of a gradient in float64; NaN or inf where any element is."""
    return powers_of_each([gradient], norm_type)[0]


def _norms_of_rows(block: Tensor, norm_type: float) -> list[Tensor]:
    """Return the norms of the rows of a flat tensor, in float32, and of its tail, in float64."""
    rows, remaining = divmod(block.numel(), ROW)
    dtype = torch.float32 if block.dtype.itemsize < 4 else None
    whole_rows = block.as_strided((rows, ROW), (ROW, 1))
    norms = [torch.linalg.vector_norm(whole_rows, norm_type, 1, dtype=dtype)]
    if remaining:
        tail = block[rows * ROW :].view(1, -1)
        norms.append(torch.linalg.vector_norm(tail, norm_type, 1, dtype=torch.float64))
    return norms


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor on a CPU; NaN if any element is."""
    if not tensor.numel():
        return 0.0
    # A tenth of the time of vector_norm; both ends are NaN where any element is.
    low, high = torch.aminmax(tensor)
    return max(abs(low.item()), abs(high.item()))


def flatten(tensor: Tensor) -> Tensor:
    """Return all elements in the order of memory, fit for sums: a view of any dense tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).reshape(-1).contiguous()


@dataclass(slots=True)
class _Comparison:
    """All elements of this rank's gradients, compared with λ by one read."""

    power: float = 0.0  # each share is divided by the ranks that hold it
    clamped: float = 0.0  # the power after clamping
    above: float = 0.0
    largest: float = 0.0
    exceeding: list[Tensor] = field(default_factory=list)

    def add(self, block: Block, replicas: int, gradients: list[Tensor]) -> None:
        """Count a block of some gradients, which ``replicas`` ranks hold."""
        if block.above and not (self.exceeding and self.exceeding[-1] is gradients[-1]):
            self.exceeding += gradients
        self.power += block.power / replicas
        self.clamped += block.clamped / replicas
        self.above += block.above / replicas
        # The result of max() with NaN depends on the order; the power tells of it.
        self.largest = max(self.largest, block.largest)


class Block(NamedTuple):
    """Some elements, compared with λ."""

    power: float  # Σg²
    clamped: float  # Σg² after clamping
    above: int  # elements above λ
    largest: float  # largest |g|


def _compare(flat: Tensor, wide: Tensor, buffer: Tensor, limit: float) -> Block:
    """Read elements once, by their squares, which are written to ``buffer``."""
    squares = torch.mul(wide, wide, out=buffer)
    bound = torch.tensor(limit, dtype=flat.dtype).to(squares)
    square_of_bound = (bound * bound).item()
    power = squares.sum().item()
    in_range = VANISHES < power < OVERFLOWS and square_of_bound > VANISHES
    if not in_range:
        largest = flat.abs().amax()
        above = int((flat.abs() > bound).sum())
        power = power_sum(flat).item()
        clamped = power_sum(flat.clamp(-bound, bound)).item() if above else power
        return Block(power, clamped, above, largest.item())
    largest = squares.amax().sqrt()
    if largest <= bound:
        return Block(power, power, 0, largest.item())
    # Two different numbers have different squares, so squares can be counted exactly. Squares
    # above the bound's square become the next number after it.
    after = torch.nextafter(bound * bound, bound.new_tensor(math.inf)).item()
    clamped = squares.clamp_(max=after).sum().item()
    above = round(squares.gt_(square_of_bound).sum().item())
    clamped -= above * (after - square_of_bound)
    return Block(power, clamped, above, largest.item())


def compare_elements(layout: Layout, limit: float) -> Elements:
    """Compare all elements of this rank's gradients with λ."""
    elements = _Comparison()
    buffers: dict[torch.dtype, Tensor] = {}
    for flat, replicas, gradients in _blocks(layout):
        wide = flat if flat.itemsize > 3 else flat.float()
        if len(wide) > len(buffers.get(wide.dtype, ())):  # new memory costs as much as a read
            buffers[wide.dtype] = wide.new_empty(max(BLOCK, len(wide)))
        block = _compare(flat, wide, buffers[wide.dtype][: len(wide)], limit)
        elements.add(block, replicas, gradients)
    return Elements(
        power=layout.number(elements.power),
        clamped=layout.number(elements.clamped),
        above=layout.number(elements.above),
        largest=layout.number(elements.largest),
        exceeding=elements.exceeding,
    )


def _blocks(layout: Layout) -> Iterator[tuple[Tensor, int, list[Tensor]]]:
    """Yield blocks of elements with their number of replicas and the gradients they belong to.

    A block is a view of a large gradient, or a copy of small ones of one type.
    """
    small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for shard, gradient in zip(*layout.gradients(), strict=True):
        if gradient.numel() > SMALL:
            for part in torch.split(flatten(gradient), BLOCK):
                yield part, shard.num_replicas, [gradient]
        else:
            small.setdefault((shard.num_replicas, gradient.dtype), []).append(gradient)
    for (replicas, _), gradients in small.items():
        longest = max(gradient.numel() for gradient in gradients)
        number = max(1, BLOCK // max(1, longest))
        for first in range(0, len(gradients), number):
            copied = gradients[first : first + number]
            yield gathered(copied), replicas, copied


def clamp(gradients: Sequence[Tensor], limit: float) -> None:
    """Clamp all elements to [-limit, limit] in place."""
    for gradient in gradients:
        if gradient.numel() > SMALL:  # one pass in place of two
            gradient.clamp_(-limit, limit)
    plain.clamp([gradient for gradient in gradients if gradient.numel() <= SMALL], limit)


def multiply(gradients: list[Tensor], coef: Tensor) -> None:
    """Multiply gradients by ``coef`` in place; nothing is written for a coefficient of 1."""
    value = coef.item()
    if value == 1.0 or not gradients:
        return
    if value > TINY:
        plain.multiply(gradients, coef)
    else:
        torch._foreach_mul_(gradients, coef)  # in float64


def multiply_each(gradients: Sequence[Tensor], coefs: Tensor) -> None:
    """Multiply each gradient by its coefficient in place; a coefficient of 1 writes nothing."""
    together: list[Tensor] = []
    their_coefs: list[float] = []
    pairs = zip(gradients, coefs.tolist(), coefs.unbind(), strict=True)
    for gradient, coef, wide in pairs:
        if coef == 1.0:
            continue
        # A coefficient each would be rounded to the type of a narrow tensor.
        if gradient.dtype.itemsize < 4 or not coef > TINY:
            multiply([gradient], wide)
        else:
            together.append(gradient)
            their_coefs.append(coef)
    if together:
        torch._foreach_mul_(together, their_coefs)


def unit_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a tensor whose first ``kept`` dimensions index them."""
    reduced = list(range(kept, tensor.ndim))
    rows = tensor
    if not rows.is_contiguous():  # A sum has no order of its own, so it takes the order of memory.
        strides = tensor.stride()
        rows = tensor.permute(*range(kept), *sorted(reduced, key=lambda dim: -strides[dim]))
    if not rows.is_contiguous():
        return _norm(tensor, reduced, torch.float64).reshape(-1)
    rows = rows.view(prod(rows.shape[:kept]), -1)
    if dtype != torch.float32 or rows.shape[1] <= LONG:
        return _norm(rows, 1, dtype)
    whole = rows.shape[1] // ROW * ROW
    parts = _norm(rows[:, :whole].view(len(rows), -1, ROW), 2, dtype)
    tail = _norm(rows[:, whole:], 1, dtype).unsqueeze(1)
    return _norm(torch.cat([parts, tail], 1), 1, torch.float64)


def _norm(tensor: Tensor, dims: int | list[int], dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, dims, dtype=dtype)
    return norms


def unit_dtype(norm: Tensor, least: float) -> torch.dtype:
    """Return the type in which squares of units are summed: float32 where it holds all of them.

    Every rank has the same norm, so all of them measure units in the same type.
    """
    value = norm.item()
    fits = value == 0.0 or VANISHES < value * value < OVERFLOWS
    return torch.float32 if fits and least**2 > VANISHES else torch.float64


def scale_units(gradient: Tensor, kept: int, factors: Tensor) -> None:
    """Multiply units by their factors; only clipped ones are written where they are few."""
    clipped = (factors != 1.0).nonzero().view(-1)
    if not len(clipped):
        return
    ones = (1,) * (gradient.ndim - kept)
    if kept == 1 and SPARSE * len(clipped) <= len(factors):
        gradient[clipped] *= factors[clipped].view(-1, *ones)
    else:
        gradient.mul_(factors.view((*gradient.shape[:kept], *ones)))


class UnitKernel(plain.UnitKernel):
    """Measures and multiplies units as its twin, by the functions of this file."""

    _norms_of = staticmethod(unit_norms)
    _scale_units_of = staticmethod(scale_units)


def may_hold(conditions: Tensor) -> list[bool]:
    """Return which of some conditions hold."""
    holding: list[bool] = conditions.tolist()
    return holding
