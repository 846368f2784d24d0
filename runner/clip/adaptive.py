"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.

The norms of a rank's units lie in one vector. Units of small tensors come first: units of one type
and length are copied side by side and measured together. Shards that are left out come last, each
as one unit, because the total norm needs them. The result of a unit depends on its elements alone:
ranks that hold the same unit get the same bits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from math import nan, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import Change, ChangeMode, Norms
from runner.config.modes import Adaptive
from runner.config.notation import first_few
from runner.gradients import Layout, ParamShard, transfer
from runner.gradients.host import OVERFLOWS, SMALL, VANISHES, gathered
from runner.gradients.kernels import kernels_of
from runner.gradients.layout import OptionError
from runner.gradients.norms import is_finite, norm_of_ranks, powers_of
from runner.gradients.shard import local

# A message about one model is logged once, however often a mode is bound to it.
_log_once = cache(logging.getLogger(__name__).log)
FEW = 4_096  # elements of the largest matrix that is copied beside others


@dataclass(slots=True)
class Place:
    """Where the units of one shard lie in the vector."""

    number: int  # of the shard in the layout
    shard: ParamShard
    present: bool  # this rank has a gradient
    left_out: bool  # measured as one unit, which is not clipped
    copied: bool  # measured in a copy beside other units of its type and length
    dtype: str  # of the shard
    length: int  # elements of a unit
    kept: int  # dimensions that index units, see :meth:`Units.first`; 0 for one unit
    units: int
    start: int = 0

    @classmethod
    def of(cls, number: int, shard: ParamShard, present: bool, left_out: bool) -> Place:
        weight = shard.weight
        shape = shard.units.first(weight).shape
        kept = 0 if left_out else len(shape) - len(shard.units.dims)
        small = 0 < weight.numel() <= (FEW if kept else SMALL)
        return cls(
            number=number,
            shard=shard,
            present=present,
            left_out=left_out,
            copied=small and present and not left_out,
            dtype=str(weight.dtype),
            length=prod(shape[kept:]),
            kept=kept,
            units=prod(shape[:kept]),
        )

    @property
    def kind(self) -> tuple[str, int]:
        """Type and length: a mixture of types would be rounded differently in one copy."""
        return self.dtype, self.length

    @property
    def order(self) -> tuple[Any, ...]:
        """Order in the vector: copied places by their kind, then others, last those left out."""
        return self.left_out, not self.copied, self.kind if self.copied else (), self.number

    @property
    def weight(self) -> float:
        """1 ÷ the ranks that count each unit; 0 where nothing is clipped."""
        sharing = prod(group.size() for group in self.shard.shard_groups)
        return 0.0 if self.left_out else 1.0 / (self.shard.num_replicas * sharing)

    @property
    def stop(self) -> int:
        return self.start + self.units

    def values(self, vector: Tensor) -> Tensor:
        """Return the values of these units."""
        return vector[self.start : self.stop]

    def first(self, tensors: Sequence[Tensor | None]) -> Any:
        """Return a view of the tensor of this shard with the dimensions that index units first."""
        tensor = tensors[self.number]
        return self.shard.units.first(tensor) if self.kept and tensor is not None else tensor


class UnitIndex:
    """The order of all units of this rank; the first ``units`` are clipped.

    A shard without a gradient takes part where other ranks may have one.
    """

    def __init__(
        self, shards: Sequence[ParamShard], present: Sequence[bool], left_out: Sequence[bool]
    ) -> None:
        self.present = list(present)
        self._device = shards[0].param.device if shards else torch.device("cpu")
        self.places: list[Place] = []
        for number, shard in enumerate(shards):
            if present[number] or (shard.shard_groups and not left_out[number]):
                self.places.append(Place.of(number, shard, present[number], left_out[number]))
        self.places.sort(key=lambda place: place.order)
        start = 0
        for place in self.places:
            place.start = start
            start = place.stop
        copied = [place for place in self.places if place.copied]
        self.copied = [list(places) for _, places in groupby(copied, lambda place: place.kind)]
        self.num_copied = len(copied)  # the position of the first place that is measured by itself
        self.clipped = [place for place in self.places if not place.left_out]
        self.units = self.clipped[-1].stop if self.clipped else 0
        self.weights = {place.weight for place in self.clipped}
        self._share = self._each_unit(lambda place: 1.0 / place.shard.num_replicas)
        self._weights = self._each_unit(lambda place: place.weight)[: self.units]
        has_gradient = self._each_unit(lambda place: float(place.present))
        self._present = has_gradient[: self.units] > 0
        is_cut = self._each_unit(lambda place: float(bool(place.shard.shard_groups)))
        self._cut = is_cut[: self.units] > 0
        self._cuts = self._positions_by_group()

    def _positions_by_group(self) -> list[tuple[dist.ProcessGroup, Tensor]]:
        """Return the groups that share units, each with the positions of its units."""
        by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        positions = torch.arange(self.units, device=self._device)
        # Ranks that share units have them in the order of the layout.
        for place in sorted(self.clipped, key=lambda place: place.number):
            for group in place.shard.shard_groups:
                by_group.setdefault(group, []).append(place.values(positions))
        return [(group, torch.cat(parts)) for group, parts in by_group.items()]

    def _each_unit(self, value: Callable[[Place], float]) -> Tensor:
        """Return the value of its place for each unit."""
        sizes = transfer.on_device([place.units for place in self.places], self._device).long()
        values = transfer.on_device([value(place) for place in self.places], self._device)
        # Told the size of the result, an accelerator is not waited for.
        size = self.places[-1].stop if self.places else 0
        return torch.repeat_interleave(values, sizes, output_size=size)

    def copies(self, tensors: Sequence[Any]) -> Iterator[tuple[list[Any], Tensor]]:
        """Yield small tensors with units of one type and length, and a copy with a row for each."""
        for places in self.copied:
            small = [place.first(tensors) for place in places]
            yield small, gathered(small).view(-1, places[0].length)

    def norms(
        self, tensors: Sequence[Tensor | None], places: Sequence[Place], dtype: torch.dtype
    ) -> Tensor:
        """Return the norm of each unit, whose squares are summed in ``dtype`` at least."""
        parts = [self._share[:0]]
        parts += [_unit_norms(rows, 1, dtype) for _, rows in self.copies(tensors)]
        for place in places[self.num_copied :]:
            tensor = place.first(tensors)
            if tensor is None or not tensor.numel():
                parts.append(self._share.new_zeros(place.units))
            else:
                parts.append(_unit_norms(tensor, place.kept, dtype))
        return torch.cat(parts)

    def power(self, norms: Tensor) -> Tensor:
        """Return this rank's share of ‖G‖², given the norms of all units."""
        return torch.dot(norms.square(), self._share)

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
        for group, positions in self._cuts:
            part = powers[:, positions]
            dist.all_reduce(part, group=group)
            powers[:, positions] = part
        return powers.sqrt().where(self._cut, lengths)


@dataclass(slots=True)
class UnitNorms:
    """Norms of the units of gradients, whose squares were summed in ``dtype`` at least."""

    index: UnitIndex
    gradients: Sequence[Tensor | None]
    dtype: torch.dtype
    norms: Tensor

    def scale(self, coefs: Tensor) -> None:
        """Multiply each unit by its coefficient in place."""
        start = 0
        for small, rows in self.index.copies(self.gradients):
            factors = coefs[start : start + len(rows)].unsqueeze(1)
            start += len(rows)
            rows.mul_(factors.to(torch.promote_types(rows.dtype, self.dtype)))
            if len(small) == len(rows) and small[0].ndim == 1:
                torch._foreach_copy_(small, rows.unbind())  # a third of the time
                continue
            parts = torch.split(rows.view(-1), [gradient.numel() for gradient in small])
            scaled = [part.view(g.shape) for part, g in zip(parts, small, strict=True)]
            torch._foreach_copy_(small, scaled)
        for place in self.index.clipped[self.index.num_copied :]:
            gradient = place.first(self.gradients)
            if gradient is not None:
                self._scale_large(gradient, place.kept, place.values(coefs))

    def _scale_large(self, gradient: Tensor, kept: int, factors: Tensor) -> None:
        """Multiply the units of one gradient."""
        wide = factors.to(torch.promote_types(gradient.dtype, self.dtype))
        kernels_of(factors.device).scale_units(gradient, kept, wide)


def _unit_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a tensor whose first ``kept`` dimensions index them."""
    wide = torch.promote_types(tensor.dtype, dtype)
    reduced = list(range(kept, tensor.ndim))
    if not reduced:
        return tensor.abs().to(wide).reshape(-1)
    return kernels_of(tensor.device).unit_norms(tensor, kept, wide)


@dataclass(eq=False)
class AdaptiveClip(Adaptive, ChangeMode):
    """Scale each unit's gradient by its own coefficient."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _shards: list[ParamShard] = field(default_factory=list, init=False, repr=False)
    _excluded: set[str] = field(default_factory=set, init=False, repr=False)
    _index: UnitIndex | None = field(default=None, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units``; log what ``auto`` excludes, and unknown layers."""
        units = self.units or {}
        if self.exclude == "auto":
            if not layout.heads_known:
                raise OptionError(
                    "exclude",
                    "clip.exclude=auto leaves out the head of the model, which is not known where "
                    "ranks hold different parts of it: name the weights that are not clipped, as "
                    'in exclude=["head.weight"], or exclude=[] for none',
                )
            self._excluded = set(layout.heads)
        else:
            matches = [layout.matching(glob, "exclude") for glob in self.exclude]
            self._excluded = {name for names in matches for name in names}
        self._shards = layout.with_units(units)
        self._layout = layout
        self._index = None
        if layout.device.type == "meta" or (dist.is_initialized() and dist.get_rank() > 0):
            return  # a model that is only checked, or a rank that need not repeat the first one
        if self.exclude == "auto":
            heads = ", ".join(layout.heads) or "nothing, because no head was found"
            _log_once(logging.INFO, f"clip.exclude=auto: adaptive clipping leaves out {heads}")
        configured = {name for glob in units for name in layout.matching(glob, "units")}
        self._warn_of_assumed_units(layout, configured | self._excluded)

    def _warn_of_assumed_units(self, layout: Layout, configured: set[str]) -> None:
        assumed = []
        for name, parameter in layout.parameters.items():
            if not parameter.known and name not in configured:
                assumed.append(name)
        if assumed:
            shapes = [f"{name} {list(layout.parameters[name].shape)}" for name in assumed]
            _log_once(
                logging.WARNING,
                f"adaptive clipping takes dimension 0 for the outputs of {first_few(shapes)}, "
                f"because it does not know their layer: set clip.units={{{assumed[0]}:D}} to the "
                "dimension that indexes outputs, or to a list of dimensions",
            )

    def of_part(self, layout: Layout) -> AdaptiveClip:
        """Return the mode for some parameters; the patterns were resolved against all of them."""
        names = {*layout.names}
        part = copy.copy(self)
        part._shards = [shard for shard in self._shards if shard.name in names]
        part._layout = layout
        part._index = None
        return part

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> Norms:
        """Measure the norm of each unit and, from these, ‖G‖ by one read on a CPU."""
        if self.norm_type != 2.0:
            return super().measure(layout, each)
        kernels = kernels_of(layout.device)
        ordinary = kernels.unit_dtype(layout.number(1.0), 1.0)
        units = self._unit_norms(layout, ordinary)
        power = units.index.power(units.norms)
        outside = ~((power > VANISHES) & (power < OVERFLOWS))
        shards: Sequence[ParamShard] = ()
        shares: Tensor | None = None
        if each or any(kernels.may_hold(outside.view(1))):
            shards, gradients = layout.gradients()
            power, shares = powers_of(layout, shards, gradients, 2.0, each=True)
        norm = norm_of_ranks(layout, power, 2.0)
        return Norms(norm, is_finite(norm), 2.0, shards, shares, units)

    def _unit_norms(self, layout: Layout, dtype: torch.dtype) -> UnitNorms:
        """Measure the gradients' units, with sums of squares in ``dtype`` at least."""
        if self._layout is not layout:
            self.bind(layout)
        shards, present_gradients = layout.gradients()
        gradients: list[Tensor | None] = [*present_gradients]
        if len(shards) < len(layout.shards):
            by_shard: dict[int, Tensor | None] = {}
            for shard, gradient in zip(shards, present_gradients, strict=True):
                by_shard[id(shard)] = gradient
            gradients = [by_shard.get(id(shard), _empty(layout, shard)) for shard in layout.shards]
        present = [gradient is not None for gradient in gradients]
        if self._index is None or self._index.present != present:
            left_out = [shard.name in self._excluded for shard in self._shards]
            self._index = UnitIndex(self._shards, present, left_out)
        norms = self._index.norms(gradients, self._index.places, dtype)
        return UnitNorms(self._index, gradients, dtype, norms)

    def change(self, layout: Layout, norms: Norms) -> Change:
        """Scale each unit by its coefficient; units that ranks share take a collective."""
        norm = norms.total
        limit = self.limit
        kernels = kernels_of(layout.device)
        dtype = kernels.unit_dtype(norm, limit * self.eps)
        units: UnitNorms | None = norms.work
        if units is None or units.dtype != dtype:
            units = self._unit_norms(layout, dtype)
        index = units.index
        weights = [local(shard.param) for shard in self._shards]
        norms_of_weights = index.norms(weights, index.clipped, dtype)
        norms_of_gradients = units.norms[: index.units]
        of_weights, of_gradients = index.complete(
            torch.stack([norms_of_weights, norms_of_gradients])
        )
        ratios = of_gradients / of_weights.clamp(min=self.eps)
        over = ratios > limit
        counted = index.counted(of_gradients)
        if self.tally is not None:
            for weight in index.weights:
                self.tally.add(ratios.where(counted == weight, nan), weight)
        max_stat = ratios.amax().to(norm.dtype) if ratios.numel() else layout.number(0.0)
        after = units.norms
        if any(kernels.may_hold(over.any().view(1))):
            coefs = torch.where(over, limit / ratios, 1.0)
            after = torch.cat([after[: index.units] * coefs, after[index.units :]])
            units.scale(coefs)
        return Change(
            changed=(counted * over).sum(),
            total=counted.sum(),
            max_stat=max_stat,
            power=index.power(after) if self.norm_type == 2.0 else None,
        )


def _empty(layout: Layout, shard: ParamShard) -> Tensor | None:
    """Return the gradient of a shard that has no elements here and may have some on other ranks."""
    return None if 0 in layout.parameters[shard.name].shape else shard.gradient
