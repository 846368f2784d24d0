"""What an accelerator computes; :mod:`runner.gradients.host` has the same for a CPU, in less time.

The host waits for nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.gradients.layout import Layout
from runner.gradients.shard import ParamShard
from runner.gradients.transfer import widest

# Largest number of elements of a tensor that is copied into one buffer with other such ones.
SMALL = 32_768
FEW = 4_096  # the same of a matrix whose rows are units
TOGETHER = 2**26  # elements that several operations compute at a time, which fit into the memory


@dataclass(frozen=True, slots=True)
class Elements:
    """All elements of this rank's gradients, compared with λ; each share is divided by replicas."""

    power: Tensor  # Σg²
    clamped: Tensor | None  # Σg² after clamping; None where that is not known before it
    above: Tensor  # elements above λ
    largest: Tensor  # largest |g|
    exceeding: Sequence[Tensor]  # gradients that may have elements above λ


def powers(
    layout: Layout,
    shards: Sequence[ParamShard],
    gradients: Sequence[Tensor],
    norm_type: float,
    each: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return Σ|g|^p (max|g| for p = inf) of all gradients, and of each gradient, [shards].

    A gradient is divided by the ranks that hold it. Without ``each`` a kernel may leave out the
    second value of gradients that are finite.
    """
    values = torch.stack(
        torch._foreach_norm(list(gradients), norm_type, dtype=widest(gradients[0].device))
    )
    if math.isinf(norm_type):
        return values.amax(), values
    values = values**norm_type
    if any(shard.num_replicas > 1 for shard in shards):
        values = values / layout.replicas_of(shards)
    return values.sum(), values


def multiply(gradients: list[Tensor], coef: Tensor) -> None:
    """Multiply gradients by ``coef``, which is 0-dimensional, in place."""
    if gradients:
        # A tensor of the gradients' type takes foreach's fast path; a narrower one is rounded.
        dtypes = {gradient.dtype for gradient in gradients}
        wide = torch.float64
        if len(dtypes) == 1:
            wide = torch.promote_types(dtypes.pop(), torch.float32)
        torch._foreach_mul_(gradients, coef.to(wide))


def multiply_each(gradients: Sequence[Tensor], coefs: Tensor) -> None:
    """Multiply each gradient by its own of ``coefs``, [gradients], in place."""
    together: list[Tensor] = []
    their_coefs: list[Tensor] = []
    for gradient, coef in zip(gradients, coefs.unbind(), strict=True):
        # A coefficient each would be rounded to the type of a narrow tensor.
        if gradient.dtype.itemsize < 4:
            multiply([gradient], coef)
        else:
            together.append(gradient)
            their_coefs.append(coef)
    if together:
        torch._foreach_mul_(together, their_coefs)


def compare_elements(layout: Layout, limit: float) -> Elements:
    """Compare all elements of this rank's gradients with λ."""
    shards, gradients = layout.gradients()
    above = layout.number(0.0)
    largest = layout.number(0.0)
    power = layout.number(0.0)
    if gradients:
        largest, _ = powers(layout, shards, gradients, math.inf, each=False)
        power, _ = powers(layout, shards, gradients, 2.0, each=False)
    for shard, gradient in zip(shards, gradients, strict=True):
        # In the widest type: a count that is divided in float32 is wrong beyond 2^24.
        count = (gradient.abs() > limit).sum(dtype=above.dtype)
        above = above + count / shard.num_replicas
    return Elements(power, None, above, largest, gradients)


def clamp(gradients: Sequence[Tensor], limit: float) -> None:
    """Clamp all elements to [-limit, limit] in place."""
    if gradients:
        torch._foreach_clamp_min_(list(gradients), -limit)
        torch._foreach_clamp_max_(list(gradients), limit)


def unit_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a tensor whose first ``kept`` dimensions index them."""
    reduced = list(range(kept, tensor.ndim))
    norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, reduced, dtype=dtype)
    return norms.reshape(-1)


def unit_dtype(norm: Tensor, least: float) -> torch.dtype:
    """Return the type in which squares of units are summed.

    Args:
        norm: ‖G‖.
        least: the smallest norm of a unit that is compared.
    """
    return widest(norm.device)


def scale_units(gradient: Tensor, kept: int, factors: Tensor) -> None:
    """Multiply units by their factors in place."""
    ones = (1,) * (gradient.ndim - kept)
    gradient.mul_(factors.view((*gradient.shape[:kept], *ones)))


class TensorUnits(NamedTuple):
    """The units of a tensor, whose first dimensions index them."""

    kept: int  # number of these dimensions; 0: the tensor is one unit
    units: int
    length: int  # elements of a unit
    dtype: torch.dtype
    packs: bool  # whether the tensor is there in each step, and may be copied beside others


class UnitKernel:
    """Measures and multiplies the units of tensors, which lie in one vector, tensor by tensor.

    The result of a unit depends on its elements alone: ranks that hold it get the same bits. Small
    tensors of one unit length that follow each other are copied, with a row for each unit, because
    a call for each of thousands would take longer than the work.

    Args:
        tensors: the units of each tensor.
        device: where the tensors are.
    """

    _norms_of = staticmethod(unit_norms)
    _scale_units_of = staticmethod(scale_units)

    def __init__(self, tensors: Sequence[TensorUnits], device: torch.device) -> None:
        self._tensors = tensors
        self._none = torch.empty(0, dtype=widest(device), device=device)
        self._runs: list[tuple[range, int]] = []  # of tensors, and the units of each run
        for kind, alike in groupby(range(len(tensors)), lambda number: _kind(tensors[number])):
            numbers = list(alike)
            runs = [numbers] if kind is not None else [[number] for number in numbers]
            for run in runs:
                units = sum(tensors[number].units for number in run)
                self._runs.append((range(run[0], run[-1] + 1), units))

    def norms(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """Return the norm of each unit, [units]; 0 where there is no tensor.

        Squares are summed in ``dtype`` at least.
        """
        parts = [self._none]
        for run, _ in self._runs:
            if self._is_copied(run):
                rows = self._rows(run, tensors)
                wide = torch.promote_types(rows.dtype, dtype)
                parts.append(self._norms_of(rows, 1, wide))
            else:
                parts.append(self._norms(run.start, tensors[run.start], dtype))
        return torch.cat(parts)

    def scale(self, tensors: Sequence[Tensor | None], coefs: Tensor, dtype: torch.dtype) -> None:
        """Multiply each unit by its coefficient, [units], in place.

        Coefficients are applied in ``dtype`` at least.
        """
        start = 0
        for run, units in self._runs:
            factors = coefs[start : start + units]
            start += units
            if self._is_copied(run):
                rows = self._rows(run, tensors)
                wide = torch.promote_types(rows.dtype, dtype)
                rows.mul_(factors.to(wide).unsqueeze(1))
                _write_back(rows, [tensors[number] for number in run])
            else:
                self._scale(run.start, tensors[run.start], factors, dtype)

    def _is_copied(self, run: range) -> bool:
        return _kind(self._tensors[run.start]) is not None

    def _rows(self, run: range, tensors: Sequence[Any]) -> Tensor:
        """Return a copy of the tensors of a run, a row for each unit."""
        length = self._tensors[run.start].length
        return gathered([tensors[number] for number in run]).view(-1, length)

    def _norms(self, number: int, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        units = self._tensors[number]
        if tensor is None or not tensor.numel():
            return self._none.new_zeros(units.units)
        wide = torch.promote_types(tensor.dtype, dtype)
        if units.kept == tensor.ndim:  # each element is a unit
            return tensor.abs().to(wide).reshape(-1)
        return self._norms_of(tensor, units.kept, wide)

    def _scale(self, number: int, tensor: Tensor | None, coefs: Tensor, dtype: torch.dtype) -> None:
        if tensor is not None:
            wide = coefs.to(torch.promote_types(tensor.dtype, dtype))
            self._scale_units_of(tensor, self._tensors[number].kept, wide)


def gathered(gradients: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements, [elements], in their widest type."""
    if all(gradient.ndim == 1 for gradient in gradients):  # saves a fifth where there are many
        return torch.cat(list(gradients))
    return torch.cat([gradient.flatten() for gradient in gradients])


def _kind(units: TensorUnits) -> tuple[torch.dtype, int] | None:
    """Return what tensors of one copy have in common; None for one that is measured by itself."""
    # A mixture of types would be rounded differently in one copy.
    elements = units.units * units.length
    small = 0 < elements <= (FEW if units.kept else SMALL)
    return (units.dtype, units.length) if small and units.packs else None


def _write_back(rows: Tensor, tensors: list[Any]) -> None:
    """Copy rows, one for each unit, to the tensors that they were copied from."""
    if len(tensors) == len(rows) and tensors[0].ndim == 1:
        torch._foreach_copy_(tensors, rows.unbind())  # a third of the time
        return
    parts = torch.split(rows.view(-1), [tensor.numel() for tensor in tensors])
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(tensors, shaped)


def may_hold(conditions: Tensor) -> list[bool]:
    """Return which of some conditions hold; all of them where the host does not know."""
    return [True] * len(conditions)
