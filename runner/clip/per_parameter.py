"""Mode ``per_parameter``: each tensor's gradient is scaled to a norm of at most λ.

``g_p ← g_p · min(1, λ/‖g_p‖)`` for each parameter p, or for each block of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
from runner.clip.tensors import TensorMode, TensorNorms, combined
from runner.config.simple_modes import PerParameter


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
        self.count(layout, norms, present)
        return self.scale_tensors(
            stats,
            tensors,
            scales if self._block is None else scales[self._block],
            over,
            present,
            max_stat=transfer.read(combined(norms, math.inf)),
            threshold=limit,
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
