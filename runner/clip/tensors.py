"""The norm of each whole tensor over all ranks, for modes that scale tensors one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.norms import Powers, local_powers, parameter_norms
from runner.clip.transfer import Number


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
        return transfer.read(combined(self.norms, self.norm_type))

    def scaled(self, scales: Number | Tensor) -> TensorNorms:
        """Return the norms of gradients that were multiplied by one factor, or by one for each."""
        return replace(self, norms=self.norms * scales)


def combined(norms: Tensor, norm_type: float) -> Tensor:
    """Return the norm of everything, given the norm of each part, [parts]."""
    return torch.linalg.vector_norm(norms, norm_type) if norms.numel() else norms.sum()


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
        stats: GradStats,
        tensors: TensorNorms,
        scales: Tensor,
        over: Tensor,
        present: Tensor,
        *,
        max_stat: Number,
        threshold: Number,
    ) -> Decision:
        """Decide to multiply each tensor by its own factor."""
        share, total = transfer.read(share_of(over, present)), transfer.count(present)
        if not isinstance(share, Tensor) and share == 0.0:
            return Decision.untouched(stats.norm, threshold, max_stat, total)
        norm, after = stats.norm, tensors.scaled(scales).total
        clipped = share.sign() if isinstance(share, Tensor) else 1.0
        coef = transfer.ratio(after, norm)
        metrics = (norm, after, coef, clipped, share, max_stat, threshold)
        return Decision(*metrics, scales=scales, total=total)

    def count(self, layout: Layout, values: Tensor, present: Tensor) -> None:
        if self.tally is not None and layout.counts_common:
            self.tally.add(values.where(present, math.nan), 1.0)


def share_of(over: Tensor, present: Tensor) -> Tensor:
    """Return the share of what is ``present`` that is ``over``; 0 where nothing is present."""
    wide = transfer.widest(over.device)
    return over.sum(dtype=wide) / present.sum(dtype=wide).clamp(min=1.0)
