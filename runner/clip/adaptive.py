"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.

The norms of a rank's units lie in one vector, sorted by length. Shards that are left out come last,
each as one unit, because the total norm needs them. Units of one length that belong to small
tensors are copied side by side and measured as the rows of one matrix; a large tensor is read in
place. So the number of calls grows with the number of lengths and of large tensors, not with that
of units.

The result of a unit depends on its elements alone, not on what else is measured by the same call:
ranks that hold the same unit get the same bits.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, ParamShard, Parts, transfer
from runner.clip.norms import OVERFLOWS, ROW, SMALL, VANISHES, combine, flatten, gathered, powers_of
from runner.clip.shard import local
from runner.config.modes import Adaptive
from runner.config.notation import first_few

# A message about one model is logged once, however often a mode is bound to it.
_log_once = cache(logging.getLogger(__name__).log)
LONG = 8_192  # longest unit that is summed in float32 at once, which loses digits


class Place(NamedTuple):
    """Where the units of one shard lie in the vector: ``units`` of ``length`` elements each."""

    number: int  # of the shard in the layout
    shard: ParamShard
    left_out: bool  # measured as one unit, which is not clipped
    units: int
    length: int
    kept: int  # dimensions that index units, see :meth:`Units.first`
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
    def kind(self) -> tuple[str, int]:
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

    A shard without a gradient takes part where other ranks may have one. The first ``units`` are
    clipped; ``weights`` are the different weights of their places.
    """

    def __init__(
        self, shards: Sequence[ParamShard], present: Sequence[bool], left_out: Sequence[bool]
    ) -> None:
        self.present = list(present)
        self._shards = shards
        known = [
            Place.of(number, shard, out)
            for number, (shard, out) in enumerate(zip(shards, left_out, strict=True))
            if present[number] or (shard.shard_groups and not out)
        ]
        places: list[Place] = []
        for place in sorted(known, key=lambda p: (p.left_out, p.kind, p.small, p.number)):
            places.append(place._replace(start=places[-1].stop if places else 0))
        self.calls = [list(run) for _, run in groupby(places, self._alike)]
        clipped = [place for place in places if not place.left_out]
        self.units = sum(place.units for place in clipped)
        self.weights = {place.weight for place in clipped}
        self._weights = self._each_unit(clipped, [place.weight for place in clipped])
        self._present = self._each_unit(clipped, [float(present[p.number]) for p in clipped]) > 0
        self._share = self._each_unit(places, [1.0 / p.shard.num_replicas for p in places])
        # Ranks that share units have them in the order of the layout, whatever their lengths are.
        found: dict[dist.ProcessGroup, list[Tensor]] = {}
        for place in sorted(clipped, key=lambda place: place.number):
            for group in place.shard.shard_groups:
                at = torch.arange(place.start, place.stop, device=place.shard.param.device)
                found.setdefault(group, []).append(at)
        self._cuts = [(group, torch.cat(each)) for group, each in found.items()]
        cut = [float(bool(place.shard.shard_groups)) for place in clipped]
        self._cut = self._each_unit(clipped, cut) > 0

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
        """Return the norm of each unit (that is ``clipped``), and each call's copy of its units."""
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

    def power(self, norms: Tensor) -> transfer.Number:
        """Return this rank's share of ‖G‖², given the norms of all units."""
        return transfer.read(torch.dot(norms.square(), self._share))

    def counted(self, gradients: Tensor) -> Tensor:
        """Return the share of each clipped unit that this rank counts, given gradients' norms."""
        # A unit without a gradient here counts where another rank has one.
        return self._weights.where(self._present | (gradients > 0), 0.0)

    def complete(self, lengths: Tensor) -> Tensor:
        """Complete the norms [2, units] of units that a shard boundary cuts: one buffer a group.

        Collectives run whether or not this rank has a gradient: an absent one adds zeros.
        """
        if not self._cuts:
            return lengths
        powers = lengths.square()
        for group, at in self._cuts:
            part = powers[:, at]
            dist.all_reduce(part, group=group)
            powers[:, at] = part
        return powers.sqrt().where(self._cut, lengths)


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
            if host and not (factors != 1.0).any():
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
            tensor.mul_(factors.view((*tensor.shape[:kept], *[1] * (tensor.ndim - kept))))
        if targets:
            torch._foreach_copy_(targets, values)


def _row_norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    wide, length = torch.promote_types(rows.dtype, dtype), rows.shape[1]
    if not transfer.can_read(rows.device) or wide != torch.float32 or length <= LONG:
        return _norm(rows, 1, wide)
    rows, whole = rows.to(wide), length // ROW * ROW
    parts = torch.linalg.vector_norm(rows[:, :whole].view(len(rows), -1, ROW), 2.0, 2)
    tail = torch.linalg.vector_norm(rows[:, whole:], 2.0, 1, keepdim=True)
    return _norm(torch.cat([parts, tail], 1), 1, torch.float64)


def _unit_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a tensor whose first ``kept`` dimensions index them."""
    wide, reduced = torch.promote_types(tensor.dtype, dtype), tuple(range(kept, tensor.ndim))
    if not reduced:
        return tensor.abs().to(wide).reshape(-1)
    host = transfer.can_read(tensor.device)
    if host and (rows := _as_rows(tensor, kept)) is not None:
        return _row_norms(rows, dtype)
    return _norm(tensor, reduced, torch.float64 if host else wide).reshape(-1)


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


@dataclass(eq=False)
class AdaptiveClip(Adaptive, ClipMode):
    """Scale each unit's gradient by its own coefficient."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _shards: list[ParamShard] = field(default_factory=list, init=False, repr=False)
    _excluded: set[str] = field(default_factory=set, init=False, repr=False)
    _index: UnitIndex | None = field(default=None, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units``; log what ``auto`` excludes, and unknown layers."""
        globs = () if self.exclude == "auto" else self.exclude
        self._excluded = {name for glob in globs for name in layout.matching(glob, "exclude")}
        units = self.units or {}
        self._shards = layout.with_units(units)
        self._layout, self._index = layout, None
        if self.exclude == "auto":
            self._excluded = set(layout.heads)
        if layout.device.type == "meta" or (dist.is_initialized() and dist.get_rank() > 0):
            return  # a model that is only checked, or a rank that need not repeat the first one
        if self.exclude == "auto":
            heads = ", ".join(layout.heads) or "nothing, because no head was found"
            _log_once(logging.INFO, f"clip.exclude=auto: adaptive clipping leaves out {heads}")
        known = {name for glob in units for name in layout.matching(glob, "units")}
        known |= self._excluded
        if assumed := [n for n, p in layout.parameters.items() if not (p.known or n in known)]:
            shapes = [f"{name} {list(layout.parameters[name].shape)}" for name in assumed]
            _log_once(
                logging.WARNING,
                f"adaptive clipping takes dimension 0 for the outputs of {first_few(shapes)}, "
                f"because it does not know their layer: set clip.units={{{assumed[0]}:D}} to the "
                "dimension that indexes outputs, or to a list of dimensions",
            )

    def of_part(self, layout: Layout) -> AdaptiveClip:
        """Return the mode for some parameters; the patterns were resolved against all of them."""
        made, names = copy.copy(self), {*layout.names}
        made._shards = [shard for shard in self._shards if shard.name in names]
        made._layout, made._index = layout, None
        return made

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure the norm of each unit and, from these, ‖G‖ by one read on a CPU."""
        if self.norm_type != 2.0 or not transfer.can_read(layout.device):
            return super().measure(layout, each)
        units, powers = self._unit_norms(layout, torch.float32), None
        power = units.index.power(units.norms)
        if each or not VANISHES < power < OVERFLOWS:
            power, powers = powers_of(*layout.gradients(), 2.0, each=True)
        return GradStats.measured(combine(layout.gather([power])[0], 2.0), powers, units)

    def _unit_norms(self, layout: Layout, dtype: torch.dtype) -> UnitNorms:
        """Measure the gradients' units, with sums of squares in ``dtype`` at least."""
        if self._layout is not layout:
            self.bind(layout)
        gradients = _of_each_shard(layout)
        present = [gradient is not None for gradient in gradients]
        if self._index is None or self._index.present != present:
            left_out = [shard.name in self._excluded for shard in self._shards]
            self._index = UnitIndex(self._shards, present, left_out)
        return UnitNorms(self._index, gradients, dtype, *self._index.norms(gradients, dtype))

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Compute the coefficient of each unit; units that ranks share take a collective."""
        norm, limit = stats.norm, self.limit
        # Every rank has the same norm, so all of them measure units in the same type. The host
        # cannot read the norm of an accelerator, which sums in its widest type at any size.
        fit = isinstance(norm, float) and (norm == 0.0 or VANISHES < norm * norm < OVERFLOWS)
        narrow = fit and (limit * self.eps) ** 2 > VANISHES
        dtype = torch.float32 if narrow else transfer.widest(layout.device)
        own: UnitNorms | None = stats.work
        if own is None or own.dtype != dtype:
            own = self._unit_norms(layout, dtype)
        index = own.index
        weights = [local(shard.param) for shard in self._shards]
        sizes = [index.norms(weights, dtype, clipped=True)[0], own.norms[: index.units]]
        of_weights, of_gradients = index.complete(torch.stack(sizes))
        ratios = of_gradients / of_weights.clamp(min=self.eps)
        over, counted = ratios > limit, index.counted(of_gradients)
        changed, total = transfer.read((counted * over).sum()), transfer.read(counted.sum())
        if self.tally is not None:
            for weight in index.weights:
                self.tally.add(ratios.where(counted == weight, math.nan), weight)
        max_stat = transfer.read(ratios.amax()) if ratios.numel() else 0.0
        after, work = own.norms, []
        if not transfer.can_read(layout.device) or over.any():
            coefs = torch.where(over, limit / ratios, 1.0)
            after = torch.cat([after[: index.units] * coefs, after[index.units :]])
            work = [(own, coefs)]
        power = index.power(after) if self.norm_type == 2.0 else None
        return Decision.change_parts(norm, limit, max_stat, Parts(changed, total, work, power))

    def apply_parts(self, decision: Decision) -> None:
        assert decision.parts is not None
        for own, coefs in decision.parts.work:
            own.scale(coefs)


def _of_each_shard(layout: Layout) -> list[Tensor | None]:
    """Return the gradient of each shard of ``layout``; None for a parameter without elements."""
    shards, gradients = layout.gradients()
    if len(shards) == len(layout.shards):
        return list(gradients)
    found = dict(zip(map(id, shards), gradients, strict=True))
    return [
        found.get(id(shard), None if 0 in layout.parameters[shard.name].shape else shard.gradient)
        for shard in layout.shards
    ]
