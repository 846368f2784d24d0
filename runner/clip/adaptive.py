"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.

The norms of a rank's units lie in one vector: first those of small tensors, where units of one type
and length are copied side by side and measured together; last the shards that are left out, each as
one unit, because the total norm needs them. The result of a unit depends on its elements alone:
ranks that hold the same unit get the same bits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, groupby
from math import nan, prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, ParamShard, Parts, transfer
from runner.clip.layout import OptionError
from runner.clip.norms import OVERFLOWS, ROW, SMALL, VANISHES, combine, gathered, powers_of
from runner.clip.shard import local
from runner.config.modes import Adaptive
from runner.config.notation import first_few

# A message about one model is logged once, however often a mode is bound to it.
_log_once = cache(logging.getLogger(__name__).log)
FEW = 4_096  # elements of the largest matrix that is copied beside others
SPARSE = 4  # one of so many units, or fewer, are written alone
LONG = 8_192  # longest unit that is summed in float32 at once, which loses digits


class Place(NamedTuple):
    """Where the units of one shard lie in the vector."""

    number: int  # of the shard in the layout
    shard: ParamShard
    left_out: bool  # measured as one unit, which is not clipped
    kind: tuple[str, int]  # type and length of units that are measured together
    kept: int  # dimensions that index units, see :meth:`Units.first`; 0 for one unit
    units: int
    stop: int

    @property
    def weight(self) -> float:
        """1 ÷ the ranks that count each unit; 0 where nothing is clipped."""
        sharing = prod(group.size() for group in self.shard.shard_groups)
        return 0.0 if self.left_out else 1.0 / (self.shard.num_replicas * sharing)

    def of(self, vector: Tensor) -> Tensor:
        """Return the values of these units."""
        return vector[self.stop - self.units : self.stop]

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
        self.present, known = list(present), list[tuple[Any, ...]]()
        self._device = shards[0].param.device if shards else torch.device("cpu")
        for number, shard in enumerate(shards):
            out, weight = left_out[number], shard.weight
            if present[number] or (shard.shard_groups and not out):
                shape = shard.units.first(weight).shape
                kept = 0 if out else len(shape) - len(shard.units.dims)
                small = 0 < weight.numel() <= (FEW if kept else SMALL) and present[number]
                small = small and not out
                # A mixture of types would be rounded differently beside other tensors.
                kind = (str(weight.dtype), prod(shape[kept:])) if small else ("", 0)
                known.append((out, not small, kind, number, kept, prod(shape[:kept])))
        stops = accumulate(units for *_, units in sorted(known))
        self.places = [
            Place(number, shards[number], out, kind, kept, units, stop)
            for (out, _, kind, number, kept, units), stop in zip(sorted(known), stops, strict=True)
        ]
        together = self.places[: sum(not alone for _, alone, *_ in known)]
        self.alike = [list(run) for _, run in groupby(together, attrgetter("kind"))]
        self.alone = len(together)  # the first place that is measured by itself
        self.clipped = [place for place in self.places if not place.left_out]
        self.units = self.clipped[-1].stop if self.clipped else 0
        self.weights = {place.weight for place in self.clipped}
        self._share = self._each_unit(lambda place: 1.0 / place.shard.num_replicas)
        self._weights = self._each_unit(lambda place: place.weight)[: self.units]
        here = self._each_unit(lambda place: float(present[place.number]))
        cut = self._each_unit(lambda place: float(bool(place.shard.shard_groups)))
        self._present, self._cut = here[: self.units] > 0, cut[: self.units] > 0
        found: dict[dist.ProcessGroup, list[Tensor]] = {}
        positions = torch.arange(self.units, device=self._device)
        # Ranks that share units have them in the order of the layout.
        for place in sorted(self.clipped, key=lambda place: place.number):
            for group in place.shard.shard_groups:
                found.setdefault(group, []).append(place.of(positions))
        self._cuts = [(group, torch.cat(each)) for group, each in found.items()]

    def _each_unit(self, value: Callable[[Place], float]) -> Tensor:
        """Return the value of its place for each unit."""
        sizes = transfer.on_device([place.units for place in self.places], self._device).long()
        values = transfer.on_device(list(map(value, self.places)), self._device)
        # Told the size of the result, an accelerator is not waited for.
        size = self.places[-1].stop if self.places else 0
        return torch.repeat_interleave(values, sizes, output_size=size)

    def copies(self, tensors: Sequence[Any]) -> Iterator[tuple[list[Any], Tensor]]:
        """Yield small tensors with units of one type and length, and a copy with a row for each."""
        for places in self.alike:
            some = [place.first(tensors) for place in places]
            yield some, gathered(some).view(-1, places[0].kind[1])

    def norms(
        self, tensors: Sequence[Tensor | None], places: Sequence[Place], dtype: torch.dtype
    ) -> Tensor:
        """Return the norm of each unit, whose squares are summed in ``dtype`` at least."""
        found = [self._share[:0]]
        found += [_unit_norms(rows, 1, dtype) for _, rows in self.copies(tensors)]
        for place in places[self.alone :]:
            tensor = place.first(tensors)
            if tensor is None or not tensor.numel():
                found.append(self._share.new_zeros(place.units))
            else:
                found.append(_unit_norms(tensor, place.kept, dtype))
        return torch.cat(found)

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

    def scale(self, coefs: Tensor) -> None:
        """Multiply each unit by its coefficient in place."""
        host, start = transfer.can_read(coefs.device), 0
        for some, rows in self.index.copies(self.gradients):
            factors = coefs[start : start + len(rows)].unsqueeze(1)
            start += len(rows)
            rows.mul_(factors.to(torch.promote_types(rows.dtype, self.dtype)))
            if len(some) == len(rows) and some[0].ndim == 1:
                torch._foreach_copy_(some, rows.unbind())  # a third of the time
                continue
            parts = torch.split(rows.view(-1), list(map(Tensor.numel, some)))
            torch._foreach_copy_(some, [p.view(s.shape) for p, s in zip(parts, some, strict=True)])
        for place in self.index.clipped[self.index.alone :]:
            tensor, factors = place.first(self.gradients), place.of(coefs)
            at = (factors != 1.0).nonzero().view(-1) if host else factors
            if tensor is None or not len(at):
                continue
            factors = factors.to(torch.promote_types(tensor.dtype, self.dtype))
            wide = (1,) * (tensor.ndim - place.kept)
            if place.kept == 1 and SPARSE * len(at) <= len(factors):
                tensor[at] *= factors[at].view(-1, *wide)
            else:
                tensor.mul_(factors.view(*tensor.shape[: place.kept], *wide))


def _unit_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a tensor whose first ``kept`` dimensions index them."""
    wide, reduced = torch.promote_types(tensor.dtype, dtype), [*range(kept, tensor.ndim)]
    if not reduced:
        return tensor.abs().to(wide).reshape(-1)
    if not transfer.can_read(tensor.device):
        return _norm(tensor, reduced, wide).reshape(-1)
    rows = tensor
    if not rows.is_contiguous():  # Elements of a unit are added in any order, so in that of memory.
        strides = tensor.stride()
        rows = tensor.permute(*range(kept), *sorted(reduced, key=lambda dim: -strides[dim]))
    if not rows.is_contiguous():
        return _norm(tensor, reduced, torch.float64).reshape(-1)
    rows = rows.view(prod(rows.shape[:kept]), -1)
    if wide != torch.float32 or rows.shape[1] <= LONG:
        return _norm(rows, 1, wide)
    whole = rows.shape[1] // ROW * ROW
    parts = _norm(rows[:, :whole].view(len(rows), -1, ROW), 2, wide)
    tail = _norm(rows[:, whole:], 1, wide).unsqueeze(1)
    return _norm(torch.cat([parts, tail], 1), 1, torch.float64)


def _norm(tensor: Tensor, dims: int | list[int], dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, dims, dtype=dtype)
    return norms


@dataclass(eq=False)
class AdaptiveClip(Adaptive, ClipMode):
    """Scale each unit's gradient by its own coefficient."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _shards: list[ParamShard] = field(default_factory=list, init=False, repr=False)
    _excluded: set[str] = field(default_factory=set, init=False, repr=False)
    _index: UnitIndex | None = field(default=None, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units``; log what ``auto`` excludes, and unknown layers."""
        auto, units = self.exclude == "auto", self.units or {}
        if auto and not layout.heads_known:
            raise OptionError(
                "exclude",
                "clip.exclude=auto leaves out the head of the model, which is not known where "
                "ranks hold different parts of it: name the weights that are not clipped, as in "
                'exclude=["head.weight"], or exclude=[] for none',
            )
        globs = () if auto else self.exclude
        named = {name for glob in globs for name in layout.matching(glob, "exclude")}
        self._excluded = set(layout.heads) if auto else named
        self._shards = layout.with_units(units)
        self._layout, self._index = layout, None
        if layout.device.type == "meta" or (dist.is_initialized() and dist.get_rank() > 0):
            return  # a model that is only checked, or a rank that need not repeat the first one
        if auto:
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
        shards, found = layout.gradients()
        gradients: list[Tensor | None] = [*found]
        if len(shards) < len(layout.shards):
            # A shard without elements here may have them on other ranks.
            held = dict(zip(map(id, shards), found, strict=True))
            whole = [layout.parameters[shard.name].shape for shard in layout.shards]
            gradients = [
                held.get(id(shard), None if 0 in shape else shard.gradient)
                for shard, shape in zip(layout.shards, whole, strict=True)
            ]
        present = [gradient is not None for gradient in gradients]
        if self._index is None or self._index.present != present:
            left_out = [shard.name in self._excluded for shard in self._shards]
            self._index = UnitIndex(self._shards, present, left_out)
        norms = self._index.norms(gradients, self._index.places, dtype)
        return UnitNorms(self._index, gradients, dtype, norms)

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
        sizes = [index.norms(weights, index.clipped, dtype), own.norms[: index.units]]
        of_weights, of_gradients = index.complete(torch.stack(sizes))
        ratios = of_gradients / of_weights.clamp(min=self.eps)
        over, counted = ratios > limit, index.counted(of_gradients)
        changed, total = transfer.read((counted * over).sum()), transfer.read(counted.sum())
        if self.tally is not None:
            for weight in index.weights:
                self.tally.add(ratios.where(counted == weight, nan), weight)
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
