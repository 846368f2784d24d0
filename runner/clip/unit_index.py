"""The units of a whole model in one order: measured, summed and scaled in a few calls.

The norms of a rank's units lie in one vector. Units of one length that belong to small tensors are
copied side by side and measured as the rows of one matrix; a large tensor is read in place. So the
number of calls grows with the number of lengths and of large tensors, not with that of units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, groupby
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from runner.clip import transfer
from runner.clip.norms import SMALL, Powers, gathered
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number
from runner.clip.unit_norms import large_norms, row_norms, scale_large

_PARAM = attrgetter("param")


class Place(NamedTuple):
    """Where the units of one shard lie in the vector.

    Attributes:
        number: number of the shard in the layout.
        left_out: whether the shard is measured as one unit, which is not clipped.
        start: place of its first unit.
        units: number of its units.
        length: elements of each.
        kept: how many dimensions index units, see :meth:`runner.clip.units.Units.first`.
        held: ranks of the layout's group that count each of these units; 0 if they are not counted
            by place (a sharded vector is counted by its name).
    """

    number: int
    left_out: bool
    start: int
    units: int
    length: int
    kept: int
    held: int

    @property
    def stop(self) -> int:
        """Place after the last unit."""
        return self.start + self.units

    @property
    def small(self) -> bool:
        """Whether the tensor is copied before it is measured."""
        return self.units * self.length <= SMALL


class Cut(NamedTuple):
    """Consecutive units that several ranks hold a part of.

    Attributes:
        groups: see ``shard_groups`` of :class:`runner.clip.shard.ParamShard`.
        start: place of the first unit.
        stop: place after the last one.
    """

    groups: tuple[dist.ProcessGroup, ...]
    start: int
    stop: int


class UnitIndex:
    """The order of all units of this rank.

    Cut units come in the order of the layout, in which all ranks that share them have them; other
    units are sorted by length. Shards that are not clipped follow at the end, each as one unit: the
    total norm needs them. A shard without a gradient takes part where other ranks may have one.

    Attributes:
        shards: the same shards.
        present: the same flags.
        places: place of each shard that takes part, in the order of the vector.
        units: number of units that are clipped, which come first.
        size: number of all units.
        cuts: cut units.
        sharded_vectors: places of vectors that are spread over ranks.
        absent: places of cut units without a gradient here; they count where other ranks have one.
        held: ranks that count the units of each place that is clipped; inf where they are not
            counted by place.
    """

    def __init__(
        self, shards: Sequence[ParamShard], present: Sequence[bool], left_out: Sequence[bool]
    ) -> None:
        self.shards, self.present = shards, list(present)
        self.places = self._placed(left_out)
        clipped = [place for place in self.places if not place.left_out]
        self.units = sum(place.units for place in clipped)
        self.size = sum(place.units for place in self.places)
        self.cuts = [
            Cut(groups, same[0].start, same[-1].stop)
            for groups, run in groupby(clipped, lambda place: shards[place.number].shard_groups)
            if groups and (same := list(run))
        ]
        self.sharded_vectors = [place for place in clipped if shards[place.number].sharded_vector]
        counted = [place for place in clipped if place.held]
        self.absent = [place for place in counted if not present[place.number]]
        self._present_units = float(
            sum(place.units / place.held for place in counted if present[place.number])
        )
        self._clipped = len(clipped)
        self._calls = list(self._measured_together())
        device = shards[0].param.device if shards else torch.device("cpu")
        self._sizes = transfer.on_device([place.units for place in self.places], device).long()
        replicas = [shards[place.number].num_replicas for place in self.places]
        self._replicas = transfer.on_device(replicas, device) if {*replicas} - {1} else None
        self._named = [shards[place.number] for place in self.places]
        self.held = transfer.on_device([place.held or math.inf for place in clipped], device)

    def _placed(self, left_out: Sequence[bool]) -> list[Place]:
        known: list[tuple[tuple[object, ...], tuple[int, bool, int, int, int, int]]] = []
        groups = list(dict.fromkeys(shard.shard_groups for shard in self.shards))
        for number, shard in enumerate(self.shards):
            out, cut = left_out[number], bool(shard.shard_groups)
            if not self.present[number] and (out or not (cut or shard.sharded_vector)):
                continue
            weight, dims = shard.weight, shard.units.dims
            shape = (weight if out else shard.units.first(weight)).shape
            kept = 0 if out else len(shape) - len(dims)
            units, length = math.prod(shape[:kept]), math.prod(shape[kept:])
            held = shard.num_replicas * math.prod(group.size() for group in shard.shard_groups)
            if out or shard.sharded_vector:
                held = 0
            order: tuple[object, ...] = (out, groups.index(shard.shard_groups))
            if not cut:
                dtype, small = str(weight.dtype), units * length <= SMALL
                order += (shard.sharded_vector, shard.num_replicas, dtype, length, small)
            known.append(((*order, number), (number, out, units, length, kept, held)))
        known.sort(key=lambda each: each[0])
        starts = accumulate((units for _, (_, _, units, *_) in known), initial=0)
        return [
            Place(number, out, start, *others)
            for (_, (number, out, *others)), start in zip(known, starts, strict=False)
        ]

    def _measured_together(self) -> Iterator[slice]:
        """Yield runs of places that are measured by one call."""

        def alike(i: int) -> tuple[object, ...]:
            place = self.places[i]
            shard = self.shards[place.number]
            # A mixture of types would be rounded differently on ranks that hold other tensors.
            kind = (shard.param.dtype, shard.num_replicas, shard.sharded_vector)
            there = self.present[place.number], place.units * place.length > 0
            return (place.left_out, place.length, kind, there, -1 if place.small else i)

        for _, run in groupby(range(len(self.places)), alike):
            together = list(run)
            yield slice(together[0], together[-1] + 1)

    def weights(self) -> list[Tensor]:
        """Return the local shard of each weight of the layout."""
        parameters = list(map(_PARAM, self.shards))
        if {*map(type, parameters)} <= {Tensor, nn.Parameter}:
            return parameters
        return [shard.weight for shard in self.shards]

    def norms(
        self, tensors: Sequence[Tensor | None], dtype: torch.dtype, stop: int | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Measure units."""
        norms: list[Tensor] = []
        matrices: list[Tensor | None] = []
        for call in self._calls:
            places = self.places[call]
            units, length = places[-1].stop - places[0].start, places[0].length
            if stop is not None and places[0].start >= stop:
                break
            matrix = None
            if tensors[places[0].number] is None or not units * length:
                norms.append(self._sizes.new_zeros(units, dtype=dtype))
            elif places[0].small:
                rows = gathered(self._units_first(places, tensors)).view(units, length)
                norms.append(row_norms(rows, dtype))
                # One tensor may be no copy but itself: it is scaled in place.
                matrix = rows if len(places) > 1 else None
            else:
                [tensor] = self._units_first(places, tensors)
                norms.append(large_norms(tensor, places[0].kept, dtype))
            matrices.append(matrix)
        wide = transfer.widest(self._sizes.device)
        return torch.cat([self._sizes.new_zeros(0, dtype=wide), *norms]), matrices

    def _units_first(
        self, places: Sequence[Place], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        found = []
        for place in places:
            tensor = tensors[place.number]
            assert tensor is not None
            found.append(
                tensor
                if place.left_out or tensor.ndim < 2
                else self.shards[place.number].units.first(tensor)
            )
        return found

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of the values of each place."""
        sizes = self._sizes if len(values) == self.size else self._sizes[: self._clipped]
        if values.device.type == "mps":  # It has no sums of segments.
            owners = torch.repeat_interleave(sizes)
            return values.new_zeros(len(sizes)).index_add_(0, owners, values)
        return torch.segment_reduce(values, "sum", lengths=sizes, unsafe=True)

    def shares(self, norms: Tensor) -> Tensor:
        """Return the share of each place in ‖G‖², given the norms of all units [size]."""
        powers = self.sums(norms.square())
        return powers if self._replicas is None else powers / self._replicas

    def counted(self, ratios: Tensor, gradients: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield the ratios that this rank counts, and how many ranks count them."""
        if self.absent:
            ratios = ratios.clone()
        for place in self.absent:
            part = slice(place.start, place.stop)
            ratios[part] = ratios[part].where(gradients[part] > 0, math.nan)
        for held, run in groupby(self.places[: self._clipped], attrgetter("held")):
            places = list(run)
            if held:
                yield ratios[places[0].start : places[-1].stop], held

    def total(self, gradients: Tensor) -> Number:
        """Return how many units this rank counts, each divided by the ranks that count it."""
        total: Number = self._present_units
        for place in self.absent:
            total = total + transfer.count(gradients[place.start : place.stop] > 0) / place.held
        return total

    def powers(self, shares: Tensor) -> Powers:
        """Return the result of :meth:`shares` with the shards that it belongs to."""
        return Powers(self._named, shares, 2.0)

    def scale(
        self,
        measured: UnitNorms,
        coefs: Tensor,
        clipped: Sequence[float] | None,
    ) -> None:
        """Multiply units in place."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        for call, matrix in zip(self._calls, measured.matrices, strict=True):
            places = self.places[call]
            counts = None if clipped is None else clipped[call]
            here = measured.gradients[places[0].number] is not None
            if places[0].left_out or not here or (counts is not None and not any(counts)):
                continue
            tensors = self._units_first(places, measured.gradients)
            factors = coefs[places[0].start : places[-1].stop]
            factors = factors.to(torch.promote_types(tensors[0].dtype, measured.dtype))
            if matrix is not None:
                matrix.mul_(factors.unsqueeze(1))
                parts = _parts(matrix, tensors)
                targets += tensors if counts is None else compress(tensors, counts)
                values += parts if counts is None else compress(parts, counts)
            elif places[0].units * places[0].length:
                known = None if counts is None else counts[0]
                scale_large(tensors[0], places[0].kept, factors, known)
        if targets:
            torch._foreach_copy_(targets, values)


def _parts(matrix: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return views of the rows of ``matrix`` in the shapes of the tensors that were copied."""
    if len(tensors) == len(matrix) and {*map(Tensor.dim, tensors)} == {1}:
        return matrix.unbind()  # a third of the time
    parts: Sequence[Tensor] = _unflatten_dense_tensors(matrix.view(-1), tensors)  # type: ignore[no-untyped-call]
    return parts


@dataclass(slots=True)
class UnitNorms:
    """Norms of the units of gradients.

    Attributes:
        index: order of the units.
        gradients: gradient of each shard of the layout.
        dtype: type in which squares were summed, at least.
        norms: norm of the part of each unit on this rank, [index.size].
        matrices: see :meth:`UnitIndex.norms`.
    """

    index: UnitIndex
    gradients: Sequence[Tensor | None]
    dtype: torch.dtype
    norms: Tensor
    matrices: Sequence[Tensor | None]

    @classmethod
    def of(
        cls, index: UnitIndex, gradients: Sequence[Tensor | None], dtype: torch.dtype
    ) -> UnitNorms:
        """Measure the gradients of a layout's shards."""
        return cls(index, gradients, dtype, *index.norms(gradients, dtype))
