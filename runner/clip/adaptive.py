"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.norms import SQUARES_OVERFLOW, combine
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number
from runner.config.modes.adaptive import Adaptive
from runner.config.notation import first_few

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AdaptiveClip(Adaptive, ClipMode):
    """Scale each unit's gradient by its own coefficient.

    Raises:
        ValueError: an eps that is not above 0, units that are no dimensions.
    """

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _shards: Sequence[ParamShard] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        for pattern, dims in (self.units or {}).items():
            listed = dims if isinstance(dims, list | tuple) else [dims]
            if any(type(dim) is not int for dim in listed):
                raise ValueError(
                    f"units of {pattern} must be the dimension that indexes outputs, or a list of "
                    f"dimensions, not {dims!r}"
                )

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units`` against the parameters of ``layout``.

        Logs which parameters ``auto`` excludes, and which layers have unknown units.
        """
        if self.exclude == "auto":
            excluded = set(layout.heads)
        else:
            given: Sequence[str] = self.exclude
            globs = [given] if isinstance(given, str) else given
            excluded = {name for glob in globs for name in layout.matching(glob, "exclude")}
        units = self.units or {}
        shards = layout.with_units(units)
        self._shards = [shard for shard in shards if shard.name not in excluded]
        self._layout = layout
        if layout.device.type == "meta" or (dist.is_initialized() and dist.get_rank() > 0):
            return  # a model that is only checked, or a rank that need not repeat the first one
        if self.exclude == "auto":
            _log_once(logging.INFO, _left_out(layout))
        chosen = {name for glob in units for name in layout.matching(glob, "units")}
        assumed = [n for n, p in layout.parameters.items() if not p.known and n not in chosen]
        if left := [name for name in assumed if name not in excluded]:
            _log_once(logging.WARNING, _unknown(layout, left))

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Compute the coefficient of each unit.

        Collectives: one for each group that shares the units of a matrix (tensor parallelism has
        one), and one for all vectors that are spread over ranks.
        """
        if self._layout is not layout:
            self.bind(layout)
        norm, limit = stats.norm, self.limit
        shards = [
            shard
            for shard in self._shards
            if shard.shard_groups or shard.sharded_vector or shard.param.grad is not None
        ]
        # Every rank has the same norm, so all of them measure units in the same type. The host
        # cannot read the norm of an accelerator, which sums in its widest type at any size.
        narrow = not isinstance(norm, Tensor) and norm * norm <= SQUARES_OVERFLOW
        dtype = torch.float32 if narrow else transfer.widest(layout.device)
        lengths = [_lengths(shard, dtype) for shard in shards]
        _complete_rows(shards, lengths)
        ratios, present = _complete_vectors(layout, shards, lengths, self.eps)
        # Every rank knows the sharded vectors: the first rank counts them.
        first = layout.group is None or layout.group.rank() == 0
        changed: Number = transfer.count(ratios > limit) if first else 0.0
        units: Number = transfer.count(present) if first else 0.0
        maxima: list[Number] = [transfer.read(ratios.amax())] if ratios.numel() else []
        if self.tally is not None and first:
            self.tally.add(ratios.where(present, math.nan), 1.0)
        above = []
        for shard, (weight, length) in zip(shards, lengths, strict=True):
            gradient = shard.gradient
            if length.numel() == 0 or (gradient is None and not shard.shard_groups):
                continue
            ratio = length / weight.clamp(min=self.eps)
            largest = transfer.read(ratio.amax())
            held = shard.num_replicas * math.prod(group.size() for group in shard.shard_groups)
            if not shard.sharded_vector:
                # Without a gradient here, a cut unit counts where other ranks have one.
                counted = length.numel() if gradient is not None else transfer.count(length > 0)
                units = units + counted / held
                if self.tally is not None:
                    there = ratio if gradient is not None else ratio.where(length > 0, math.nan)
                    self.tally.add(there, 1 / held)
                maxima.append(largest)
            if not isinstance(largest, Tensor) and largest <= limit:
                continue
            over = ratio > limit
            if gradient is not None:
                coefs = torch.where(over, limit / ratio, 1.0)
                above.append((shard.units.view(gradient), coefs))
            if not shard.sharded_vector:
                changed = changed + transfer.count(over) / held
        parts = Parts(changed, units, above)
        return Decision.change_parts(norm, limit, combine(maxima or [0.0], math.inf), parts)

    def apply_parts(self, decision: Decision) -> None:
        """Multiply each unit by its coefficient, in tensors with a unit above λ."""
        assert decision.parts is not None
        for gradient, coefs in decision.parts.work:
            gradient.mul_(coefs)


def _left_out(layout: Layout) -> str:
    if not layout.heads:
        return "clip.exclude=auto: no head was found, adaptive clipping leaves out nothing"
    return f"clip.exclude=auto: adaptive clipping leaves out {', '.join(layout.heads)}"


def _unknown(layout: Layout, names: Sequence[str]) -> str:
    shapes = [f"{name} {list(layout.parameters[name].shape)}" for name in names]
    return (
        f"adaptive clipping takes dimension 0 for the outputs of {first_few(shapes)}, "
        f"because it does not know their layer: set clip.units={{{names[0]}:D}} to the dimension "
        "that indexes outputs, or to a list of dimensions"
    )


@cache
def _log_once(level: int, message: str) -> None:
    log.log(level, "%s", message)


def _lengths(shard: ParamShard, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """‖W_u‖ and ‖G_u‖ of each local unit, in ``dtype`` or better, broadcastable to the tensor."""
    weight, gradient = shard.weight, shard.gradient
    return (
        _unit_norm(weight, shard, dtype),
        _unit_norm(torch.zeros_like(weight) if gradient is None else gradient, shard, dtype),
    )


def _unit_norm(tensor: Tensor, shard: ParamShard, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(tensor.dtype, dtype)
    view, dims = shard.units.view(tensor), shard.units.dims
    if not dims:
        return view.abs().to(wide)
    norm: Tensor = torch.linalg.vector_norm(view, 2.0, dim=dims, keepdim=True, dtype=wide)
    return norm


def _complete_rows(shards: list[ParamShard], lengths: list[tuple[Tensor, Tensor]]) -> None:
    """Complete the rows that a shard boundary cuts: one flat buffer for each group of ranks.

    Whether a rank has a gradient plays no part in which collectives run: an absent one adds zeros.
    """
    cuts: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, shard in enumerate(shards):
        if shard.shard_groups:
            cuts.setdefault(shard.shard_groups, []).append(i)
    for groups, members in cuts.items():
        parts = [part for i in members for part in lengths[i]]
        wide = transfer.widest(parts[0].device)
        flat = torch.cat([part.reshape(-1).to(wide).square() for part in parts])
        for group in groups:
            dist.all_reduce(flat, group=group)
        whole = iter(torch.split(flat.sqrt(), [part.numel() for part in parts]))
        for i in members:
            weight, gradient = lengths[i]
            lengths[i] = (
                next(whole).view_as(weight).to(weight.dtype),
                next(whole).view_as(gradient).to(gradient.dtype),
            )


def _complete_vectors(
    layout: Layout, shards: list[ParamShard], lengths: list[tuple[Tensor, Tensor]], eps: float
) -> tuple[Tensor, Tensor]:
    """Complete the vectors that are spread over ranks: one flat buffer with a place for each name.

    Returns:
        ‖G_u‖/max(‖W_u‖, ε) of every such vector of the model, and whether it has a gradient
        anywhere (the ratio is 0 where it has none); the same on all ranks.
    """
    device = layout.device
    places = {name: i for i, name in enumerate(layout.sharded_vector)}
    flat = torch.zeros(3, len(places), dtype=transfer.widest(device), device=device)
    if not places:
        return flat[0], flat[2] > 0
    here = [i for i, shard in enumerate(shards) if shard.sharded_vector]
    if here:
        at = transfer.on_device([places[shards[i].name] for i in here], device).long()
        for row in (0, 1):
            powers = [
                lengths[i][row].reshape(()).to(flat.dtype) ** 2 / shards[i].num_replicas
                for i in here
            ]
            flat[row].index_add_(0, at, torch.stack(powers))
        there = [float(shards[i].gradient is not None) for i in here]
        flat[2].index_add_(0, at, transfer.on_device(there, device))
    dist.all_reduce(flat, group=layout.group)
    weight, gradient, present = flat[0].sqrt(), flat[1].sqrt(), flat[2] > 0
    for i in here:
        place = places[shards[i].name]
        lengths[i] = (
            weight[place].view_as(lengths[i][0]).to(lengths[i][0].dtype),
            gradient[place].view_as(lengths[i][1]).to(lengths[i][1].dtype),
        )
    # A mask as an index would make the host wait for the number of its elements.
    return gradient / weight.clamp(min=eps), present


MODE = AdaptiveClip
