"""Mode ``adaptive`` (AGC): a unit's gradient is limited by the norm of the unit's own weights.

Brock, De, Smith and Simonyan 2021 (arXiv 2102.06171, section 4):
``G_u ← G_u · min(1, λ·max(‖W_u‖, ε)/‖G_u‖)`` with L2 norms and ε = 1e-3, which lets weights that
start at zero move. The final classifier's weight is left out.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip.layout import Layout, Number, Piece
from runner.clip.measure import combine
from runner.clip.mode import ClipMode, Outcome, after_counting


class AdaptiveClip(ClipMode):
    """Scale each unit's gradient by its own coefficient."""

    _excluded: frozenset[str] = frozenset()

    def bind(self, layout: Layout) -> None:
        """Resolve ``exclude`` against the names of ``layout``."""
        if self.exclude == "auto":
            self._excluded = frozenset([layout.head] if layout.head else [])
        else:
            globs = (self.exclude,) if isinstance(self.exclude, str) else self.exclude
            self._excluded = layout.matching(globs)

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Scale in place; one collective for each group that shares units, one for the counts."""
        pieces = [
            piece
            for piece in layout.pieces
            if piece.name not in self._excluded and (piece.cut or piece.param.grad is not None)
        ]
        lengths = [_lengths(piece) for piece in pieces]
        _complete_cut_units(pieces, lengths)
        changed: Number = 0.0
        units = 0.0
        peaks: list[Number] = []
        for piece, (weight, length) in zip(pieces, lengths, strict=True):
            gradient = piece.gradient
            if gradient is None or length.numel() == 0:
                continue
            held = piece.holders * (piece.cut.size() if piece.cut else 1)
            units += length.numel() / held
            ratio = length / weight.clamp(min=self.eps)
            peak: Number = ratio.amax()
            if gradient.device.type == "cpu":
                peak = float(peak)
            peaks.append(peak)
            if not isinstance(peak, Tensor) and peak <= self.limit:
                continue
            over = ratio > self.limit
            count: Number = over.sum() if isinstance(peak, Tensor) else int(over.sum())
            piece.units.view(gradient).mul_(torch.where(over, self.limit / ratio, 1.0))
            changed = changed + count / held
        highest = combine(peaks or [0.0], math.inf)
        return after_counting(self, layout, norm, changed, units, highest)


def _lengths(piece: Piece) -> tuple[Tensor, Tensor]:
    """‖W_u‖ and ‖G_u‖ of each local unit, in float32 or better, broadcastable to the tensor."""
    weight, gradient = piece.weight, piece.gradient
    return (
        _unit_norm(weight, piece),
        _unit_norm(torch.zeros_like(weight) if gradient is None else gradient, piece),
    )


def _unit_norm(tensor: Tensor, piece: Piece) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    view, dims = piece.units.view(tensor), piece.units.dims
    if not dims:
        return view.abs().to(wide)
    norm: Tensor = torch.linalg.vector_norm(view, 2.0, dim=dims, keepdim=True, dtype=wide)
    return norm


def _complete_cut_units(pieces: list[Piece], lengths: list[tuple[Tensor, Tensor]]) -> None:
    """Complete the units that a shard boundary cuts: one flat buffer for each group of ranks.

    Whether a rank has a gradient plays no part in which collectives run: an absent one adds zeros.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.cut is not None:
            groups.setdefault(piece.cut, []).append(i)
    for group, members in groups.items():
        parts = [part for i in members for part in lengths[i]]
        flat = torch.cat([part.reshape(-1).double().square() for part in parts])
        dist.all_reduce(flat, group=group)
        whole = iter(torch.split(flat.sqrt(), [part.numel() for part in parts]))
        for i in members:
            weight, gradient = lengths[i]
            lengths[i] = (
                next(whole).view_as(weight).to(weight.dtype),
                next(whole).view_as(gradient).to(gradient.dtype),
            )


MODE = AdaptiveClip
