"""Mode ``per_parameter``, and what modes have in common that scale tensors one by one.

``g_p ← g_p · min(1, λ/‖g_p‖)`` for each parameter p, or for each block of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, Number, transfer
from runner.clip.norms import combined_norms, powers_of
from runner.config.simple_modes import PerParameter


@dataclass(frozen=True, slots=True)
class TensorNorms:
    """The norm of each parameter's gradient, the same bits on every rank."""

    norms: Tensor
    present: Tensor
    norm_type: float

    @property
    def total(self) -> Number:
        """‖G‖."""
        every = self.norms
        whole = torch.linalg.vector_norm(every, self.norm_type) if every.numel() else every.sum()
        return transfer.read(whole)

    def scaled(self, scales: Number | Tensor) -> TensorNorms:
        """Return the norms of gradients that were multiplied by one factor, or by one for each."""
        return replace(self, norms=self.norms * scales)


class TensorMode(ClipMode):
    """A mode that decides by the norms of tensors, from which the norm after clipping follows."""

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        p = self.norm_type
        _, powers = powers_of(*layout.gradients(), p, each=True)
        assert powers is not None
        held = powers._replace(each=torch.ones_like(powers.each))
        here = torch.stack([powers.of_parameters(layout), held.of_parameters(layout)])
        every = layout.rows_of_ranks(here.flatten()).view(-1, *here.shape)
        norms, present = combined_norms(every, p)
        tensors = TensorNorms(norms, present > 0, p)
        return GradStats.measured(tensors.total, powers, tensors)

    def decides_by(self, stats: GradStats) -> bool:
        return isinstance(stats.work, TensorNorms) and stats.work.norm_type == self.norm_type

    def tensors(self, layout: Layout, stats: GradStats) -> TensorNorms:
        """Return what :meth:`measure` has measured; measured here for stats of another mode."""
        own = self.decides_by(stats)
        tensors: TensorNorms = stats.work if own else self.measure(layout).work
        return tensors

    def scale_tensors(
        self,
        layout: Layout,
        stats: GradStats,
        scales: Tensor,
        *,
        after: TensorNorms,
        compared: tuple[Tensor, Tensor, Tensor],
        threshold: Number,
    ) -> Decision:
        """Decide to multiply each tensor by its own of ``scales``; its norm is then ``after``.

        ``compared`` are the values of tensors or blocks that are compared with λ, which of them are
        above it, and which have a gradient.
        """
        values, over, present = compared
        if self.tally is not None and layout.counts_common:
            self.tally.add(values.where(present, math.nan), 1.0)
        share, total = share_of(over, present)
        most = transfer.read(values.amax()) if values.numel() else 0.0
        more: Any = {"scales": scales}
        return Decision.of_share(stats.norm, after.total, share, most, threshold, total, **more)


def share_of(over: Tensor, present: Tensor) -> tuple[Number, Number]:
    """Return the share of what is ``present`` that is ``over``, 0 of nothing; and its number."""
    total = present.sum(dtype=transfer.widest(over.device))
    return transfer.read(over.sum() / total.clamp(min=1.0)), transfer.read(total)


@dataclass(eq=False)
class PerParameterClip(PerParameter, TensorMode):
    """Limit the norm of each tensor, or of each block of tensors."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _block: Tensor | None = field(default=None, init=False, repr=False)
    _blocks: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("by", self.by in ("tensor", "block"), "tensor or block")

    def bind(self, layout: Layout) -> None:
        self._layout, self._block = layout, None
        if self.by == "block":
            numbers: dict[str, int] = {}
            each = [numbers.setdefault(block_of(name), len(numbers)) for name in layout.names]
            self._block = transfer.on_device(each, layout.device).long()
            self._blocks = len(numbers)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Compare the norm of each tensor or block with λ; every rank knows all of them."""
        if self._layout is not layout:
            self.bind(layout)
        limit, tensors = self.limit, self.tensors(layout, stats)
        norms, present = self._parts(tensors)
        over = norms > limit
        scales = torch.where(over, limit / norms, 1.0)
        each = scales if self._block is None else scales[self._block]
        after, compared = tensors.scaled(each), (norms, over, present)
        return self.scale_tensors(
            layout, stats, each, after=after, compared=compared, threshold=limit
        )

    def _parts(self, tensors: TensorNorms) -> tuple[Tensor, Tensor]:
        """Return the norm of each tensor or block, and whether it has a gradient."""
        if self._block is None:
            return tensors.norms, tensors.present
        p, zeros = tensors.norm_type, tensors.norms.new_zeros(self._blocks)
        present = zeros.index_add(0, self._block, tensors.present.to(zeros.dtype)) > 0
        if math.isinf(p):
            return zeros.scatter_reduce(0, self._block, tensors.norms, "amax"), present
        return zeros.index_add(0, self._block, tensors.norms**p) ** (1.0 / p), present


def block_of(name: str) -> str:
    """Return the block of a parameter: its name up to the first number, or its module's name."""
    parts = name.split(".")[:-1]
    end = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:end])


MODE = PerParameterClip
