"""The units of a whole model in one order: measured, summed and scaled in a few calls.

The norms of a rank's units lie in one vector. First come the units that are clipped: those that a
shard boundary cuts have the order of the layout, in which all ranks that share them have them, and
others are sorted by length. At last come the shards that are left out, each as one unit, because
the total norm needs them. Units of one length that belong to small tensors are copied side by side
and measured as the rows of one matrix; a large tensor is read in place. So the number of calls
grows with the number of lengths and of large tensors, not with that of units.

The result of a unit depends on its elements alone, not on what else is measured by the same call:
ranks that hold the same unit get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import ParamShard, transfer
from runner.clip.norms import ROW, SMALL, flatten, gathered
from runner.clip.shard import local

LONG = 8_192  # longest unit that is summed in float32 at once, which loses digits
CACHED = 2**16  # elements of a block that is read several times while it is in the cache
# Where less than one of so many units of a large tensor is clipped, only these are written.
SPARSE = 4


class Place(NamedTuple):
    """Where the units of one shard lie in the vector: ``units`` of ``length`` elements each.

    ``kept`` dimensions index units, see :meth:`runner.clip.units.Units.first`.
    """

    number: int  # of the shard in the layout
    shard: ParamShard
    left_out: bool  # measured as one unit, which is not clipped
    units: int
    length: int
    kept: int
    start: int = 0

    @classmethod
    def of(cls, number: int, shard: ParamShard, left_out: bool) -> Place:
        weight = shard.weight
        shape = (weight if left_out else shard.units.first(weight)).shape
        kept = 0 if left_out else len(shape) - len(shard.units.dims)
        return cls(number, shard, left_out, prod(shape[:kept]), prod(shape[kept:]), kept)

    @property
    def stop(self) -> int:
        return self.start + self.units

    @property
    def small(self) -> bool:
        return self.units * self.length <= SMALL

    @property
    def kind(self) -> tuple[object, ...]:
        """What units that are measured by one call have in common."""
        # A mixture of types would be rounded differently on ranks that hold other tensors.
        return (str(self.shard.param.dtype), self.length)

    @property
    def weight(self) -> float:
        """1 ÷ the ranks that count each unit."""
        sharing = prod(group.size() for group in self.shard.shard_groups)
        return 1.0 / (self.shard.num_replicas * sharing)

    def units_first(self, tensors: Sequence[Tensor | None]) -> Tensor:
        tensor = tensors[self.number]
        assert tensor is not None
        return self.shard.units.first(tensor) if self.kept else tensor


class UnitIndex:
    """The order of all units of this rank; see the top of this module.

    A shard without a gradient takes part where other ranks may have one.

    Attributes:
        units: number of units that are clipped, which come first.
        cut: number of units that several ranks hold a part of, which are the first of these.
        cuts: for each group of such ranks the positions of their units.
        weights: different weights of the places that are clipped.
    """

    def __init__(
        self, shards: Sequence[ParamShard], present: Sequence[bool], left_out: Sequence[bool]
    ) -> None:
        self.present = list(present)
        self._shards = shards
        places = self._placed(left_out)
        clipped = [place for place in places if not place.left_out]
        self.units = sum(place.units for place in clipped)
        cut = [place for place in clipped if place.shard.shard_groups]
        self.cut = sum(place.units for place in cut)
        found: dict[dist.ProcessGroup, list[Tensor]] = {}
        for place in cut:
            at = torch.arange(place.start, place.stop, device=place.shard.param.device)
            for group in place.shard.shard_groups:
                found.setdefault(group, []).append(at)
        self.cuts = [(group, torch.cat(each)) for group, each in found.items()]
        self.calls = [list(run) for _, run in groupby(places, self._alike)]
        self.weights = {place.weight for place in clipped}
        self._weights = self._each_unit(clipped, [place.weight for place in clipped])
        self._share = self._each_unit(places, [1.0 / p.shard.num_replicas for p in places])
        absent = [float(not self.present[place.number]) for place in clipped]
        self._absent = self._each_unit(clipped, absent) > 0 if any(absent) else None

    def _placed(self, left_out: Sequence[bool]) -> list[Place]:
        def order(place: Place) -> tuple[object, ...]:
            cut = bool(place.shard.shard_groups)
            rest = () if cut else (*place.kind, place.small)
            return (place.left_out, not cut, *rest, place.number)

        known = []
        for number, (shard, out) in enumerate(zip(self._shards, left_out, strict=True)):
            if self.present[number] or (shard.shard_groups and not out):
                known.append(Place.of(number, shard, out))
        places: list[Place] = []
        for place in sorted(known, key=order):
            places.append(place._replace(start=places[-1].stop if places else 0))
        return places

    def _alike(self, place: Place) -> tuple[object, ...]:
        here = self.present[place.number] and place.units * place.length > 0
        return (place.left_out, place.kind, here, -1 if place.small else place.number)

    def _each_unit(self, places: Sequence[Place], values: Sequence[float]) -> Tensor:
        """Return the value of its place for each unit."""
        device = self._shards[0].param.device if self._shards else torch.device("cpu")
        sizes = transfer.on_device([place.units for place in places], device).long()
        # Told the size of the result, an accelerator is not waited for.
        size = places[-1].stop if places else 0
        return torch.repeat_interleave(transfer.on_device(values, device), sizes, output_size=size)

    def norms(
        self, tensors: Sequence[Tensor | None], dtype: torch.dtype, clipped: bool = False
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the norm of each unit (that is ``clipped``), in ``dtype`` at least.

        And for each call the matrix with a copy of its units; None where they were read in place.
        """
        norms, matrices = [self._weights[:0]], list[Tensor | None]()
        for places in self.calls:
            first, units = places[0], places[-1].stop - places[0].start
            if clipped and first.left_out:
                break
            matrices.append(None)
            if tensors[first.number] is None or not units * first.length:
                norms.append(self._weights.new_zeros(units, dtype=dtype))
            elif first.small:
                flat = gathered([place.units_first(tensors) for place in places])
                rows = flat.view(units, first.length)
                # One tensor may be no copy but itself: it is scaled in place.
                matrices[-1] = rows if len(places) > 1 else None
                norms.append(_row_norms(rows, dtype))
            else:
                norms.append(_unit_norms(first.units_first(tensors), first.kept, dtype))
        return torch.cat(norms), matrices

    def weight_norms(self, dtype: torch.dtype) -> Tensor:
        """Return the norm of the weights of each unit that is clipped."""
        return self.norms([local(shard.param) for shard in self._shards], dtype, clipped=True)[0]

    def power(self, norms: Tensor) -> transfer.Number:
        """Return this rank's share of ‖G‖², given the norms of all units."""
        return transfer.read(torch.dot(norms.square(), self._share))

    def counted(self, gradients: Tensor) -> Tensor:
        """Return the share of each clipped unit that this rank counts, given gradients' norms."""
        # A unit without a gradient here counts where another rank has one.
        if self._absent is None:
            return self._weights
        return self._weights.where(~self._absent | (gradients > 0), 0.0)


@dataclass(slots=True)
class UnitNorms:
    """Norms of the units of gradients, whose squares were summed in ``dtype`` at least."""

    index: UnitIndex
    gradients: Sequence[Tensor | None]
    dtype: torch.dtype
    norms: Tensor
    matrices: Sequence[Tensor | None]

    def scale(self, coefs: Tensor) -> None:
        """Multiply each unit by its coefficient in place."""
        targets, values = list[Tensor](), list[Tensor]()
        host = transfer.can_read(coefs.device)
        for places, matrix in zip(self.index.calls, self.matrices, strict=True):
            factors, first = coefs[places[0].start : places[-1].stop], places[0]
            gradient = self.gradients[first.number]
            if first.left_out or gradient is None or not first.length:
                continue
            if host and not (changed := (factors != 1.0).nonzero().view(-1)).numel():
                continue
            factors = factors.to(torch.promote_types(gradient.dtype, self.dtype))
            tensors = [place.units_first(self.gradients) for place in places]
            if matrix is not None:
                flat = matrix.mul_(factors.unsqueeze(1)).view(-1)
                parts = torch.split(flat, list(map(Tensor.numel, tensors)))
                targets += tensors
                values += [part.view(to.shape) for part, to in zip(parts, tensors, strict=True)]
                continue
            [tensor], kept = tensors, first.kept
            few = host and kept and len(changed) * SPARSE <= len(factors)
            rows = _as_rows(tensor, kept) if few else None
            if rows is None:
                tensor.mul_(factors.view((*tensor.shape[:kept], *[1] * (tensor.ndim - kept))))
            else:
                rows[changed] = (rows[changed] * factors[changed].unsqueeze(1)).to(rows.dtype)
        if targets:
            torch._foreach_copy_(targets, values)


def _row_norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    wide, length = torch.promote_types(rows.dtype, dtype), rows.shape[1]
    host = transfer.can_read(rows.device)
    if host and wide != rows.dtype:
        # A conversion is cheap in the cache.
        blocks = torch.split(rows, max(1, CACHED // max(length, 1)))
        return torch.cat([_row_norms(block.to(wide), wide) for block in blocks])
    if not host or wide != torch.float32 or length <= LONG:
        return _norm(rows, 1, wide)
    whole = length // ROW * ROW
    parts = torch.linalg.vector_norm(rows[:, :whole].view(len(rows), -1, ROW), 2.0, 2)
    tail = torch.linalg.vector_norm(rows[:, whole:], 2.0, 1, keepdim=True)
    return _norm(torch.cat([parts, tail], 1), 1, torch.float64)


def _unit_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a tensor whose first ``kept`` dimensions index them."""
    wide, reduced = torch.promote_types(tensor.dtype, dtype), tuple(range(kept, tensor.ndim))
    if not reduced:
        return tensor.abs().to(wide).reshape(-1)
    if not transfer.can_read(tensor.device):
        return _norm(tensor, reduced, wide).reshape(-1)
    if (rows := _as_rows(tensor, kept)) is not None:
        return _row_norms(rows, dtype)
    # Units are not contiguous: blocks of what is contiguous are read once.
    outer = max(range(tensor.ndim), key=lambda dim: (tensor.shape[dim] > 1, tensor.stride(dim)))
    size = max(1, tensor.shape[outer] * CACHED // tensor.numel())
    blocks = torch.split(tensor, size, outer)
    sums = [block.to(wide).square().sum(reduced, dtype=torch.float64) for block in blocks]
    return (torch.cat(sums, outer) if outer < kept else sum(sums, sums[0] * 0)).sqrt().view(-1)


def _norm(tensor: Tensor, dims: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, dims, dtype=dtype)
    return norms


def _as_rows(tensor: Tensor, kept: int) -> Tensor | None:
    """Return a view [units, length] whose rows are contiguous, in any order; None if none is."""
    if not kept:
        return flatten(tensor).unsqueeze(0)
    if not tensor.is_contiguous():
        strides = tensor.stride()
        inner = sorted(range(kept, tensor.ndim), key=lambda dim: -strides[dim])
        tensor = tensor.permute(*range(kept), *inner)
        if not tensor.is_contiguous():
            return None
    return tensor.view(prod(tensor.shape[:kept]), -1)
