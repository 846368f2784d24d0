"""What a rank measures of its own gradients, before and after the clipping."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.check.packs import Pack, packs_of
from runner.check.parts import Part
from runner.check.reference import (
    Buffer,
    by_units,
    chunks,
    clamped,
    combined,
    power_sum,
    powers_of_rows,
)
from runner.check.samples import Samples, to_host
from runner.gradients.shard import is_dtensor, local
from runner.gradients.units import units_of


class Change(NamedTuple):
    """What the clipping did to a part of a rank.

    Attributes:
        coefficient: c of the best fit G ← c·G; NaN without a gradient, or for one of zeros.
        residual: max|G' − c·G| ÷ max|G'|, 0 where one coefficient was applied.
        error: max|G' − expected| ÷ max|expected| of a mode that works on elements or units.
        gone: the gradient is None after the clipping.
        finite: whether the gradient is finite after the clipping.
        least: the largest change that rounding explains, for ``residual`` and ``error``.
        largest: max|G'|.
        also: what the elements show of how else they were changed; else empty.
    """

    rank: int
    name: str
    key: str
    position: tuple[int, ...]
    coefficient: float = math.nan
    residual: float = 0.0
    error: float = 0.0
    gone: bool = False
    finite: bool = True
    least: float = 0.0
    largest: float = 0.0
    also: str = ""


class Uniform(NamedTuple):
    """What a rank tells others of a clipping that did one thing to all of its gradients.

    Attributes:
        coefficient: the factor of all gradients; NaN for clipping by value, or without gradients.
        least: the largest relative change that rounding explains.
    """

    coefficient: float
    least: float

    def as_changes(self, rank: int) -> list[Change]:
        """Return one change for all parts of a rank."""
        if math.isnan(self.coefficient):
            return []
        change = Change(rank, "", "", (), coefficient=self.coefficient, least=self.least)
        return [change]


# Mean square of an element below which squares of rounding errors may be zero.
_LEAST_SQUARE = {
    torch.float64: 1e-250,
    torch.float32: 1e-16,
    torch.float16: math.inf,
    torch.bfloat16: math.inf,
}
_SAMPLE = 1024  # elements of a gradient that tell its coefficient
_ATTEMPTS = 8  # gradients that are asked for one: the samples of sparse ones may be zeros


@torch.no_grad()
def keep(parts: list[Part], p: float, on_host: bool) -> list[Pack]:
    """Keep a copy of each local gradient, and its sum of powers."""
    buffer = Buffer()
    packs = packs_of(parts)
    for pack in packs:
        pack.keep(p, on_host, buffer)
    parts_in_packs = [part for pack in packs for part in pack.parts]
    numbers = to_host([pack.powers for pack in packs])
    for part, power in zip(parts_in_packs, numbers, strict=True):
        part.power = power
    return packs


@dataclass
class Measure:
    """Compares the gradients of a rank after a clipping with their copies.

    Attributes:
        rank: the rank of this process.
        mode: the mode that was asked for.
        max_norm: its threshold.
        p: the exponent of the norm.
        eps: ε of adaptive clipping.
        excluded: what adaptive clipping does to parameters: ``never``, ``maybe``; else clipped.
        guess: the last coefficient that was exact: most models have one for all parameters.
    """

    rank: int
    mode: str
    max_norm: float
    p: float
    eps: float
    excluded: Mapping[str, str]
    guess: float = 1.0
    _buffer: Buffer = field(default_factory=Buffer)

    @torch.no_grad()
    def uniform(self, parts: Sequence[Part], packs: Sequence[Pack]) -> Uniform | None:
        """Return the one thing that was done to all gradients, None if there is no such thing.

        It looks at all elements, in few operations. Where it returns None :meth:`changes` tells
        what was done to each part.
        """
        if not _are_comparable(parts, packs):
            return None
        dtypes = {pack.before.dtype for pack in packs}
        least = rounding(*dtypes) if dtypes else 0.0
        if self.mode == "value":
            clamps = all(self._was_clamped(pack) for pack in packs)
            return Uniform(math.nan, least) if clamps else None
        coefficient = _coefficient_of_largest(parts)
        if math.isnan(coefficient) and packs:
            return None
        for pack in packs:
            if not self._was_scaled(pack, coefficient):
                return None
        self.guess = coefficient
        return Uniform(coefficient, least)

    def _was_scaled(self, pack: Pack, coefficient: float) -> bool:
        """Return whether all gradients of a pack were multiplied by this coefficient."""
        if math.isinf(_LEAST_SQUARE.get(pack.before.dtype, math.inf)):
            return self._is_near_scaled(pack, coefficient)
        squares: list[Tensor] = []
        off: list[Tensor] = []
        for start, stop, before, after in pack.pairs(self._buffer):
            if before.dim() == 1:
                off.append(_square_off(before, after, coefficient, self._buffer).reshape(1))
            else:
                difference = after.sub_(before, alpha=coefficient)
                off.append(torch.linalg.vector_norm(difference, dim=1).double().square())
            if self.p == 2:
                squares.append(pack.powers[start:stop])
            else:
                rows = before.reshape(stop - start, -1)
                squares.append(powers_of_rows(rows, 2, self._buffer))
        square = torch.cat(squares)
        allowed = allowed_square(pack.before.dtype, coefficient, square)
        size = pack.gradients[0].numel()
        enough = (square > _LEAST_SQUARE[pack.before.dtype] * size) | (square == 0)
        return bool((enough & (torch.cat(off).to(square.device) <= allowed)).all())

    def _is_near_scaled(self, pack: Pack, coefficient: float) -> bool:
        """The same for types of 16 bits, by the largest element that is off."""
        fits: list[Tensor] = []
        for start, stop, before, after in pack.pairs(self._buffer):
            if not before.numel():
                continue
            rows = after.reshape(stop - start, -1)
            difference = torch.sub(rows, before.reshape(rows.shape), alpha=coefficient)
            largest = rows.abs().amax(1).float()
            allowed = rounding(pack.before.dtype) * largest
            fits.append((difference.abs_().amax(1).float() <= allowed).all())
        return all(fit.item() for fit in fits)

    def _was_clamped(self, pack: Pack) -> bool:
        """Return whether all elements of a pack were clamped, bit for bit."""
        for _, _, before, after in pack.pairs(self._buffer):
            for first, second in chunks(before, after):
                out = self._buffer.like(first, first.dtype)
                clamped_ = torch.clamp(first, -self.max_norm, self.max_norm, out=out)
                if not torch.equal(clamped_, second):
                    return False
        return True

    @torch.no_grad()
    def changes(self, parts: list[Part]) -> list[Change]:
        """Return what was done to each part; a collective for units of sharded parameters."""
        pairs = [_pair(part) for part in parts]
        changes: list[Change] = []
        near_coefficients = _near_coefficients(pairs)
        for part, pair, near in zip(parts, pairs, near_coefficients, strict=True):
            unknown = Change(self.rank, part.name, part.key, part.position)
            if pair is None:
                changes.append(_without_pair(part, unknown))
            else:
                changes.append(self._change(part, *pair, near, unknown))
        return changes

    def _change(
        self, part: Part, before: Tensor, after: Tensor, near: float, unknown: Change
    ) -> Change:
        """Return what was done to a part; ``near`` is about the coefficient."""
        if self.mode == "norm":
            least = rounding(after.dtype, before.dtype)
            coefficient = self._coefficient(before, after, near, part.power)
            if coefficient is not None:
                return unknown._replace(coefficient=coefficient, least=least)
        change = _by_elements(before, after, near, unknown)
        if self.mode == "value":
            expected = clamped(before, self.max_norm)
            return change._replace(error=_error(after, expected, self.max_norm))
        if self.mode == "adaptive":
            return change._replace(error=self._error_by_units(part, before, after))
        if change.residual == 0:
            self.guess = change.coefficient
        return change

    def _coefficient(
        self, before: Tensor, after: Tensor, near: float, power: float
    ) -> float | None:
        """Return the coefficient that every element was multiplied by, None if there is none."""
        if before.dtype != after.dtype or not before.numel():
            return None
        enough = power > _LEAST_SQUARE.get(before.dtype, math.inf) * before.numel()
        if self.p == 2 and enough and was_scaled(before, after, near, power, self._buffer):
            self.guess = near
            return near
        is_near = abs(near - self.guess) <= rounding(before.dtype) * abs(self.guess)
        if is_near and equals_scaled(before, after, self.guess, self._buffer):
            return self.guess
        for exact in _exact_coefficients(before, after, near):
            if equals_scaled(before, after, exact, self._buffer):
                self.guess = exact
                return exact
        return None

    def _error_by_units(self, part: Part, before: Tensor, after: Tensor) -> float:
        """Return the error of adaptive clipping; a collective for a sharded parameter."""
        parameter = part.parameter
        weight = local(parameter.detach())
        if part.position and is_dtensor(parameter):
            before = _whole(before, parameter)
            after = _whole(after, parameter)
            weight = _whole(weight, parameter)
        how = self.excluded.get(part.name, "clipped")
        untouched = _error(after, before.double(), 1.0)
        if how == "never":
            return untouched
        units = units_of(parameter, part.module)
        shape = before.shape
        if units.groups:
            before = before.view(units.groups, -1, *shape[1:])
            weight = weight.reshape(before.shape)
        expected = by_units(before, weight, units.dims, self.max_norm, self.eps).view(shape)
        clipped = _error(after, expected, 1.0)
        return min(clipped, untouched) if how == "maybe" else clipped


def _pair(part: Part) -> tuple[Tensor, Tensor] | None:
    """Return the gradient before and after of a trained parameter, if they can be compared."""
    before = part.before
    after = part.after
    if before is None or after is None or before.shape != after.shape:
        return None
    return (before.to(after.device), after) if part.parameter.requires_grad else None


def _without_pair(part: Part, unknown: Change) -> Change:
    """Return the change of a part that has no gradient before, or after, or is frozen."""
    if not part.parameter.requires_grad:
        return unknown
    if part.before is None:
        appeared = part.after is not None and bool(part.after.abs().sum() > 0)
        return unknown._replace(residual=math.inf if appeared else 0.0)
    if part.after is None:
        return unknown._replace(gone=True)
    return unknown._replace(residual=math.inf)


def _by_elements(before: Tensor, after: Tensor, near: float, unknown: Change) -> Change:
    """Return the change of the coefficient that fits best, and what it leaves."""
    coefficient = near if math.isfinite(near) else _fit(before, after)
    residual, largest = residual_of(before, after, coefficient)
    return unknown._replace(
        coefficient=coefficient,
        residual=residual,
        finite=math.isfinite(largest),
        least=rounding(after.dtype, before.dtype),
        largest=largest,
        also=_also(before, after, largest) if residual else "",
    )


def _also(before: Tensor, after: Tensor, largest: float) -> str:
    """Return how else than by a coefficient a gradient was changed, if its elements show it."""
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        if after.dtype.itemsize > 2 and torch.equal(after.to(dtype).to(after.dtype), after):
            return f"rounded to {name}"
    at_limit = before[after.abs() == largest].abs()
    is_clamped = at_limit.numel() > 1 and bool(at_limit.amin() < at_limit.amax())
    return "clipped by value" if is_clamped else ""


def _near_coefficients(pairs: list[tuple[Tensor, Tensor] | None]) -> list[float]:
    """Return the coefficient that fits the sample of each pair best, NaN where it cannot tell."""
    before = Samples([None if pair is None else pair[0] for pair in pairs])
    after = Samples([None if pair is None else pair[1] for pair in pairs])
    # Scaled, because the square of a small number is zero.
    scale = before.largest()
    divisor = scale[before.owners]
    first = before.values / divisor
    second = after.values / divisor
    fit = before.sums(first * second) / before.sums(first * first)
    coefficients: list[float] = fit.tolist()
    return coefficients


def rounding(*dtypes: torch.dtype) -> float:
    """Return the largest relative change of an element that rounding explains."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return max(4 * eps, 1e-12)


def _fit(before: Tensor, after: Tensor) -> float:
    """Return the coefficient that fits all elements best, NaN for a gradient of zeros."""
    a = before.reshape(-1).double()
    scale = float(a.abs().amax()) if a.numel() else 0.0
    if scale == 0:
        return math.nan
    a = a / scale
    return float(torch.dot(a, after.reshape(-1).double() / scale) / torch.dot(a, a))


def _exact_coefficients(before: Tensor, after: Tensor, near: float) -> Iterator[float]:
    """Yield coefficients in the type of the arithmetic that give some elements bit for bit."""
    if not math.isfinite(near):
        return
    a = before.reshape(-1)[:64]
    b = after.reshape(-1)[:64]
    dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
    middle = torch.tensor(near, dtype=dtype)
    low = torch.nextafter(middle, torch.tensor(-math.inf, dtype=dtype))
    high = torch.nextafter(middle, torch.tensor(math.inf, dtype=dtype))
    for guess in (middle, low, high):
        if torch.equal(a * float(guess), b):
            yield float(guess)


def was_scaled(
    before: Tensor, after: Tensor, coefficient: float, square: float, buffer: Buffer
) -> bool:
    """Return whether every element was multiplied by this coefficient, up to rounding.

    The sum of squares finds one element that is off by a thousandth of the root mean square in a
    tensor of 10^6 elements, and one that is off by 2 % in one of 10^10.
    """
    if not math.isfinite(coefficient):
        return False
    off = float(_square_off(before, after, coefficient, buffer))
    return off <= float(allowed_square(before.dtype, coefficient, square))


def _square_off(before: Tensor, after: Tensor, coefficient: float, buffer: Buffer) -> Tensor:
    """Return Σ(g' − c·g)² of two tensors of one shape, in float64."""
    rows: list[Tensor] = []
    for first, second in chunks(before, after):
        out = buffer.like(first, first.dtype)
        difference = torch.sub(second, first, alpha=coefficient, out=out)
        rows.append(torch.dot(difference, difference))
    return torch.stack(rows).double().sum()


def allowed_square(dtype: torch.dtype, coefficient: float, square: Any) -> Any:
    """Return Σ(g' − c·g)² that rounding explains, given Σg²: a number, or a tensor of them."""
    # Each element is rounded once, by at most half of eps.
    return (2 * torch.finfo(dtype).eps * coefficient) ** 2 * square


def _are_comparable(parts: Sequence[Part], packs: Sequence[Pack]) -> bool:
    """Return whether the gradients that were there before, and no others, are there after."""
    if sum(part.after is not None for part in parts) != sum(len(pack.parts) for pack in packs):
        return False
    for pack in packs:
        first = pack.gradients[0]
        if pack.before.device != first.device:
            return False
        for part, gradient in zip(pack.parts, pack.gradients, strict=True):
            if not part.parameter.requires_grad:
                return False
            if part.after is not gradient and not _are_alike(part.after, first):
                return False
    return True


def _are_alike(first: Tensor | None, second: Tensor) -> bool:
    """Return whether there is a tensor of the shape, type and device of another one."""
    if first is None or first.shape != second.shape:
        return False
    return first.dtype == second.dtype and first.device == second.device


def _coefficient_of_largest(parts: Sequence[Part]) -> float:
    """Return the coefficient that fits a sample of the largest gradient best, NaN if none does."""
    candidates = [part for part in parts if part.before is not None]
    for part in heapq.nlargest(_ATTEMPTS, candidates, key=lambda part: part.power):
        assert part.before is not None
        assert part.after is not None
        step = max(1, part.before.numel() // _SAMPLE)
        before = part.before.reshape(-1)[::step]
        after = part.after.reshape(-1)[::step]
        coefficient = _fit(before, after)
        if not math.isnan(coefficient):
            return coefficient
    return math.nan


def equals_scaled(before: Tensor, after: Tensor, coefficient: float, buffer: Buffer) -> bool:
    """Return whether every element was multiplied by this coefficient, bit for bit."""
    for first, second in chunks(before, after):
        scaled = torch.mul(first, coefficient, out=buffer.like(first, first.dtype))
        if not torch.equal(scaled, second):
            return False
    return True


def residual_of(before: Tensor, after: Tensor, coefficient: float) -> tuple[float, float]:
    """Return max|after − c·before| ÷ max|after|, and max|after|."""
    if not before.numel():
        return 0.0, 0.0
    if not math.isfinite(coefficient):
        largest = float(after.abs().amax())
        return (math.inf if largest > 0 else 0.0), largest
    off = 0.0
    highest = 0.0
    rows: list[Tensor] = []
    for first, second in chunks(before, after):
        difference = torch.sub(second, first, alpha=coefficient)
        rows += [*torch.aminmax(difference), *torch.aminmax(second)]
    values = torch.stack(rows).double().abs().view(-1, 4).amax(0).tolist()
    off = max(values[0], values[1])
    highest = max(values[2], values[3])
    if math.isnan(off) or math.isnan(highest):
        return math.inf, math.nan
    scale = highest
    if highest == 0:
        scale = float(before.abs().amax()) if coefficient else math.inf
    return (off / scale if scale else 0.0), highest


def _error(after: Tensor, expected: Tensor, scale: float) -> float:
    """Return max|after − expected| ÷ max|expected|, or ÷ ``scale`` if nothing is expected."""
    if not expected.numel():
        return 0.0
    off = float((after.double() - expected).abs().amax())
    largest = float(expected.abs().amax())
    return math.inf if math.isnan(off) else off / (largest or scale)


def _whole(shard: Tensor, parameter: Any) -> Tensor:
    """Return the whole tensor of which every rank of a mesh has a shard."""
    from torch.distributed.tensor import DTensor

    placed = DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return placed.full_tensor()


def power_of_buffers(model: nn.Module, p: float) -> float:
    """Return the sum of powers of the model's floating-point buffers."""
    sums: list[float] = []
    for buffer in model.buffers():
        if buffer.is_floating_point():
            sums.append(float(power_sum(local(buffer), p)))
    return combined(sums, p)
