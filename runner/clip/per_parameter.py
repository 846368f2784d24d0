"""Mode ``per_parameter``, and what modes have in common that scale tensors one by one.

``g_p ← g_p · min(1, λ/‖g_p‖)`` for each parameter p, or for each block of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, Number, transfer
from runner.clip.norms import Powers, local_powers, parameter_norms
from runner.config.simple_modes import PerParameter


@dataclass(frozen=True, slots=True)
class TensorNorms:
    """The norm of each parameter's gradient, the same bits on every rank."""

    norms: Tensor
    present: Tensor
    norm_type: float

    @classmethod
    def measure(cls, layout: Layout, norm_type: float) -> tuple[TensorNorms, Powers]:
        _, powers = local_powers(layout, norm_type, each=True)
        assert powers is not None
        held = Powers(powers.shards, [1.0] * len(powers.shards), norm_type)
        here = torch.stack([powers.of_parameters(layout), held.of_parameters(layout)])
        norms, present = parameter_norms(layout, here, norm_type)
        return cls(norms, present > 0, norm_type), powers

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
    """A mode that decides by the norm of each tensor.

    All ranks know all of these norms, so the norm after clipping follows from them, and applying a
    decision neither reads gradients again nor needs a collective.
    """

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        tensors, powers = TensorNorms.measure(layout, self.norm_type)
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
        tensors: TensorNorms,
        scales: Tensor,
        *,
        values: Tensor,
        over: Tensor,
        present: Tensor,
        threshold: Number,
    ) -> Decision:
        """Decide to multiply each tensor by its own of ``scales``.

        ``values`` of tensors, or of blocks of them, are compared with λ: those that are ``over``
        are above it, and those that are ``present`` have a gradient.
        """
        if self.tally is not None and layout.counts_common:
            self.tally.add(values.where(present, math.nan), 1.0)
        max_stat = transfer.read(values.amax()) if values.numel() else 0.0
        share, total = transfer.read(share_of(over, present)), transfer.count(present)
        if not isinstance(share, Tensor) and share == 0.0:
            return Decision.untouched(stats.norm, threshold, max_stat, total)
        norm, after = stats.norm, tensors.scaled(scales).total
        clipped = share.sign() if isinstance(share, Tensor) else 1.0
        metrics = (norm, after, transfer.ratio(after, norm), clipped, share, max_stat, threshold)
        return Decision(*metrics, scales=scales, total=total)


def share_of(over: Tensor, present: Tensor) -> Tensor:
    """Return the share of what is ``present`` that is ``over``; 0 where nothing is present."""
    wide = transfer.widest(over.device)
    return over.sum(dtype=wide) / present.sum(dtype=wide).clamp(min=1.0)


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
        scales, over = torch.where(norms > limit, limit / norms, 1.0), norms > limit
        each = scales if self._block is None else scales[self._block]
        found = {"values": norms, "over": over, "present": present}
        return self.scale_tensors(layout, stats, tensors, each, **found, threshold=limit)

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
    """Return the block of a parameter: its name up to the first number, or its module's name.

    ``blocks.3.attn.weight`` belongs to ``blocks.3``, ``layer1.0.conv1.weight`` to ``layer1.0``, and
    ``head.weight`` to ``head``. Parameters of the model itself are one block.
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


MODE = PerParameterClip
