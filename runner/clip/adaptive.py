"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.

The norms of all units of a rank lie in one vector, see :mod:`runner.gradients.unit_index`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import nan

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import Change, ChangeMode, Norms
from runner.clip.patterns import matching, with_units
from runner.config.modes import Adaptive
from runner.config.notation import first_few
from runner.gradients import Layout, ParamShard
from runner.gradients.host import OVERFLOWS, VANISHES
from runner.gradients.kernels import kernels_of
from runner.gradients.layout import OptionError
from runner.gradients.norms import is_finite, norm_of_ranks, powers_of
from runner.gradients.shard import local
from runner.gradients.unit_index import UnitIndex

# A message about one model is logged once, however often a mode is bound to it.
_log_once = cache(logging.getLogger(__name__).log)


@dataclass(slots=True)
class UnitNorms:
    """Norms of the units of gradients, whose squares were summed in ``dtype`` at least."""

    index: UnitIndex
    gradients: Sequence[Tensor | None]  # of each shard
    dtype: torch.dtype
    norms: Tensor  # of all units, also of those that are not clipped


@dataclass(eq=False)
class AdaptiveClip(Adaptive, ChangeMode):
    """Scale each unit's gradient by its own coefficient."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _shards: list[ParamShard] = field(default_factory=list, init=False, repr=False)
    _excluded: set[str] = field(default_factory=set, init=False, repr=False)
    _index: UnitIndex | None = field(default=None, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units``; log what ``auto`` excludes, and unknown layers."""
        self._excluded = self._excluded_of(layout)
        self._shards = with_units(layout, self.units or {})
        self._layout = layout
        self._index = None
        if layout.device.type == "meta" or (dist.is_initialized() and dist.get_rank() > 0):
            return  # a model that is only checked, or a rank that need not repeat the first one
        if self.exclude == "auto":
            heads = ", ".join(layout.heads) or "nothing, because no head was found"
            _log_once(logging.INFO, f"clip.exclude=auto: adaptive clipping leaves out {heads}")
        self._warn_of_assumed_units(layout)

    def _excluded_of(self, layout: Layout) -> set[str]:
        """Return the names of the parameters that ``exclude`` leaves out."""
        if self.exclude != "auto":
            matches = [matching(layout, glob, "exclude") for glob in self.exclude]
            return {name for names in matches for name in names}
        if not layout.heads_known:
            raise OptionError(
                "exclude",
                "clip.exclude=auto leaves out the head of the model, which is not known where "
                "ranks hold different parts of it: name the weights that are not clipped, as "
                'in exclude=["head.weight"], or exclude=[] for none',
            )
        return set(layout.heads)

    def _warn_of_assumed_units(self, layout: Layout) -> None:
        chosen = set(self._excluded)
        for glob in self.units or {}:
            chosen.update(matching(layout, glob, "units"))
        assumed = []
        for name, parameter in layout.parameters.items():
            if not parameter.known and name not in chosen:
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
        is_outside = any(kernels.may_hold(outside.view(1)))
        if each or is_outside:
            shards, gradients = layout.gradients()
            whole, shares = powers_of(layout, shards, gradients, 2.0, each=True)
            power = whole if is_outside else power
        norm = norm_of_ranks(layout, power, 2.0)
        return Norms(norm, is_finite(norm), 2.0, shards, shares, units)

    def _unit_norms(self, layout: Layout, dtype: torch.dtype) -> UnitNorms:
        """Measure the gradients' units, with sums of squares in ``dtype`` at least."""
        if self._layout is not layout:
            self.bind(layout)
        gradients = _gradient_of_each_shard(layout)
        present = [gradient is not None for gradient in gradients]
        if self._index is None or self._index.present != present:
            left_out = [shard.name in self._excluded for shard in self._shards]
            self._index = UnitIndex(self._shards, present, left_out)
        return UnitNorms(self._index, gradients, dtype, self._index.norms(gradients, dtype))

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
        weight_norms = index.norms_of_clipped([local(shard.param) for shard in self._shards], dtype)
        gradient_norms = units.norms[: index.units]
        weight_norms, gradient_norms = index.complete(torch.stack([weight_norms, gradient_norms]))
        ratios = gradient_norms / weight_norms.clamp(min=self.eps)
        over = ratios > limit
        after = units.norms
        if any(kernels.may_hold(over.any().view(1))):
            coefs = torch.where(over, limit / ratios, 1.0)
            index.scale(units.gradients, coefs, dtype)
            after = torch.cat([after[: index.units] * coefs, after[index.units :]])
        counted = index.counted(gradient_norms)
        if self.tally is not None:
            for weight in index.weights:
                self.tally.add(ratios.where(counted == weight, nan), weight)
        return Change(
            changed=(counted * over).sum(),
            total=counted.sum(),
            max_stat=ratios.amax().to(norm.dtype) if ratios.numel() else layout.number(0.0),
            power=index.power(after) if self.norm_type == 2.0 else None,
        )


def _gradient_of_each_shard(layout: Layout) -> list[Tensor | None]:
    """Return the gradient of each shard of ``layout``, also an empty one; None without one."""
    shards, gradients = layout.gradients()
    if len(shards) == len(layout.shards):
        return [*gradients]
    present: dict[int, Tensor] = {}
    for shard, gradient in zip(shards, gradients, strict=True):
        present[id(shard)] = gradient
    return [present.get(id(shard), _empty(layout, shard)) for shard in layout.shards]


def _empty(layout: Layout, shard: ParamShard) -> Tensor | None:
    """Return the gradient of a shard that has no elements here and may have some on other ranks."""
    return None if 0 in layout.parameters[shard.name].shape else shard.gradient
