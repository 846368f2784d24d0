"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, ParamShard, Parts, transfer
from runner.clip.norms import OVERFLOWS, VANISHES, combine, powers_of
from runner.clip.unit_norms import UnitIndex, UnitNorms
from runner.config.notation import first_few
from runner.config.simple_modes import Adaptive

# A message about one model is logged once, however often a mode is bound to it.
_log_once = cache(logging.getLogger(__name__).log)


@dataclass(eq=False)
class AdaptiveClip(Adaptive, ClipMode):
    """Scale each unit's gradient by its own coefficient."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _shards: list[ParamShard] = field(default_factory=list, init=False, repr=False)
    _excluded: set[str] = field(default_factory=set, init=False, repr=False)
    _index: UnitIndex | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("eps", self.eps > 0, "above 0")
        for pattern, dims in (self.units or {}).items():
            listed = dims if isinstance(dims, list | tuple) else [dims]
            right = all(type(dim) is int for dim in listed)
            must = f"the dimension that indexes outputs of {pattern}, or a list of dimensions"
            self.require("units", right, must, dims or repr(dims))

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units``; log what ``auto`` excludes, and unknown layers."""
        if self.exclude == "auto":
            self._excluded = set(layout.heads)
        else:
            given: Sequence[str] = self.exclude
            globs = [given] if isinstance(given, str) else given
            self._excluded = {n for glob in globs for n in layout.matching(glob, "exclude")}
        units = self.units or {}
        self._shards = layout.with_units(units)
        self._layout, self._index = layout, None
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
        narrow = not isinstance(norm, Tensor) and _fit_float32(norm, limit * self.eps)
        dtype = torch.float32 if narrow else transfer.widest(layout.device)
        own: UnitNorms | None = stats.work
        if own is None or own.dtype != dtype:
            own = self._unit_norms(layout, dtype)
        index = own.index
        lengths = [index.weight_norms(dtype), own.norms[: index.units]]
        _complete(index, lengths)
        ratios = lengths[1] / lengths[0].clamp(min=self.eps)
        over, counted = ratios > limit, index.counted(lengths[1])
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


def _fit_float32(norm: float, least: float) -> bool:
    """Return whether squares in float32 tell which units are to be clipped."""
    large_enough = norm == 0.0 or norm * norm > VANISHES
    return large_enough and norm * norm < OVERFLOWS and least * least > VANISHES


def _complete(index: UnitIndex, lengths: list[Tensor]) -> None:
    """Complete the units that a shard boundary cuts: one flat buffer for each group of ranks.

    Whether a rank has a gradient plays no part in which collectives run: an absent one adds zeros.
    """
    if not index.cuts:
        return
    powers = torch.stack([each[: index.cut] for each in lengths]).square()
    for group, at in index.cuts:
        part = powers[:, at]
        dist.all_reduce(part, group=group)
        powers[:, at] = part
    lengths[:] = [
        torch.cat([whole, each[index.cut :]])
        for whole, each in zip(powers.sqrt(), lengths, strict=True)
    ]


MODE = AdaptiveClip
