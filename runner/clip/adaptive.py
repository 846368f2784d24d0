"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout, Number, Piece
from runner.clip.measure import SQUARES_OVERFLOW, combine
from runner.clip.mode import ClipMode, Outcome, after_counting

log = logging.getLogger(__name__)


class AdaptiveClip(ClipMode):
    """Scale each unit's gradient by its own coefficient."""

    _layout: Layout | None = None
    _pieces: Sequence[Piece] = ()

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` and ``units`` against the parameters of ``layout``.

        What ``auto`` leaves out, and what layers do not tell about units, is logged.
        """
        if self.exclude == "auto":
            excluded = set(layout.heads)
        else:
            globs = (self.exclude,) if isinstance(self.exclude, str) else self.exclude
            excluded = {name for glob in globs for name in layout.matching(glob, "exclude")}
        pieces = layout.with_units(self.units)
        self._pieces = [piece for piece in pieces if piece.name not in excluded]
        self._layout = layout
        if self.exclude == "auto":
            _log_once(layout, logging.INFO, _left_out(layout))
        chosen = {name for glob in self.units for name in layout.matching(glob, "units")}
        assumed = [n for n, p in layout.parameters.items() if not p.known and n not in chosen]
        if left := [name for name in assumed if name not in excluded]:
            _log_once(layout, logging.WARNING, _unknown(layout, left))

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Scale in place.

        Collectives: one for each group that shares the units of a matrix (tensor parallelism has
        one), one for all vectors that are spread over ranks, one for the counts.
        """
        if self._layout is not layout:
            self.bind(layout)
        pieces = [
            piece
            for piece in self._pieces
            if piece.cut or piece.scattered or piece.param.grad is not None
        ]
        # Every rank has the same norm, so all of them measure units alike. An accelerator cannot
        # look at it, and sums in its widest type at any size.
        narrow = not isinstance(norm, Tensor) and norm * norm <= SQUARES_OVERFLOW
        dtype = torch.float32 if narrow else transfer.widest(layout.device)
        lengths = [_lengths(piece, dtype) for piece in pieces]
        _complete_rows(pieces, lengths)
        ratios, present = _complete_vectors(layout, pieces, lengths, self.eps)
        # What all ranks know alike is counted by the first of them.
        first = layout.group is None or layout.group.rank() == 0
        changed: Number = transfer.count(ratios > self.limit) if first else 0.0
        units: Number = transfer.count(present) if first else 0.0
        peaks: list[Number] = [transfer.read(ratios.amax())] if ratios.numel() else []
        if self.tally is not None and first:
            self.tally.add(ratios.where(present, math.nan), 1.0)
        for piece, (weight, length) in zip(pieces, lengths, strict=True):
            gradient = piece.gradient
            if length.numel() == 0 or (gradient is None and not piece.cut):
                continue
            ratio = length / weight.clamp(min=self.eps)
            peak = transfer.read(ratio.amax())
            held = piece.holders * math.prod(group.size() for group in piece.cut)
            if not piece.scattered:
                # Without a gradient here, a cut unit counts where other ranks have one.
                counted = length.numel() if gradient is not None else transfer.count(length > 0)
                units = units + counted / held
                if self.tally is not None:
                    there = ratio if gradient is not None else ratio.where(length > 0, math.nan)
                    self.tally.add(there, 1 / held)
                peaks.append(peak)
            if not isinstance(peak, Tensor) and peak <= self.limit:
                continue
            over = ratio > self.limit
            if gradient is not None:
                piece.units.view(gradient).mul_(torch.where(over, self.limit / ratio, 1.0))
            if not piece.scattered:
                changed = changed + transfer.count(over) / held
        highest = combine(peaks or [0.0], math.inf)
        return after_counting(self, layout, norm, changed, units, highest)


def _left_out(layout: Layout) -> str:
    if not layout.heads:
        return "clip.exclude=auto: no head was found, adaptive clipping leaves out nothing"
    return f"clip.exclude=auto: adaptive clipping leaves out {', '.join(layout.heads)}"


def _unknown(layout: Layout, names: Sequence[str]) -> str:
    shapes = [f"{name} {list(layout.parameters[name].shape)}" for name in names]
    more = f" and {len(shapes) - 5} more" if len(shapes) > 5 else ""
    return (
        f"adaptive clipping takes dimension 0 for the outputs of {', '.join(shapes[:5])}{more}, "
        f"because it does not know their layer: set clip.units={{{names[0]}:D}} to the dimension "
        "that indexes outputs, or to a list of dimensions"
    )


@cache
def _logged(level: int, message: str) -> None:
    log.log(level, "%s", message)


def _log_once(layout: Layout, level: int, message: str) -> None:
    """Log on the first rank, once in this process; not for a model that is only checked."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and layout.device.type != "meta":
        _logged(level, message)


def _lengths(piece: Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """‖W_u‖ and ‖G_u‖ of each local unit, in ``dtype`` or better, broadcastable to the tensor."""
    weight, gradient = piece.weight, piece.gradient
    return (
        _unit_norm(weight, piece, dtype),
        _unit_norm(torch.zeros_like(weight) if gradient is None else gradient, piece, dtype),
    )


def _unit_norm(tensor: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(tensor.dtype, dtype)
    view, dims = piece.units.view(tensor), piece.units.dims
    if not dims:
        return view.abs().to(wide)
    norm: Tensor = torch.linalg.vector_norm(view, 2.0, dim=dims, keepdim=True, dtype=wide)
    return norm


def _complete_rows(pieces: list[Piece], lengths: list[tuple[Tensor, Tensor]]) -> None:
    """Complete the rows that a shard boundary cuts: one flat buffer for each group of ranks.

    Whether a rank has a gradient plays no part in which collectives run: an absent one adds zeros.
    """
    cuts: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.cut:
            cuts.setdefault(piece.cut, []).append(i)
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
    layout: Layout, pieces: list[Piece], lengths: list[tuple[Tensor, Tensor]], eps: float
) -> tuple[Tensor, Tensor]:
    """Complete the vectors that are spread over ranks: one flat buffer with a place for each name.

    Returns:
        ‖G_u‖/max(‖W_u‖, ε) of every such vector of the model, and whether it has a gradient
        anywhere (the ratio is 0 where it has none); the same on all ranks.
    """
    device = layout.device
    places = {name: i for i, name in enumerate(layout.scattered)}
    flat = torch.zeros(3, len(places), dtype=transfer.widest(device), device=device)
    if not places:
        return flat[0], flat[2] > 0
    here = [i for i, piece in enumerate(pieces) if piece.scattered]
    if here:
        at = transfer.on_device([places[pieces[i].name] for i in here], device).long()
        for row in (0, 1):
            powers = [
                lengths[i][row].reshape(()).to(flat.dtype) ** 2 / pieces[i].holders for i in here
            ]
            flat[row].index_add_(0, at, torch.stack(powers))
        there = [float(pieces[i].gradient is not None) for i in here]
        flat[2].index_add_(0, at, transfer.on_device(there, device))
    dist.all_reduce(flat, group=layout.group)
    weight, gradient, present = flat[0].sqrt(), flat[1].sqrt(), flat[2] > 0
    for i in here:
        place = places[pieces[i].name]
        lengths[i] = (
            weight[place].view_as(lengths[i][0]).to(lengths[i][0].dtype),
            gradient[place].view_as(lengths[i][1]).to(lengths[i][1].dtype),
        )
    # A mask as an index would make the host wait for the number of its elements.
    return gradient / weight.clamp(min=eps), present


MODE = AdaptiveClip
