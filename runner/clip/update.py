"""Mode ``update``: the optimizer's update is limited, and the gradient is left as it is.

The update clipping of StableAdamW (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2; from
Adafactor, Shazeer and Stern 2018, arXiv 1804.04235, section 6): the update of each tensor is
divided by ``max(1, RMS/λ)`` with ``RMS = sqrt(mean(g²/max(v, ε²)))``. v is the optimizer's second
moment *after* the step, bias-corrected where the optimizer corrects it (the Adam kinds do, RMSprop
does not). It is computed before the step from the one before it, so that no tensor but those to be
limited is copied on a CPU. The update is everything that the step adds to a tensor, decoupled
weight decay included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runner.clip import Decision, GradStats, Layout, Number, ParamShard, transfer
from runner.clip.norms import combine, powers_of
from runner.clip.per_parameter import share_of
from runner.clip.second_moment import Moment, OptimizerMode, pieces
from runner.config.simple_modes import Update

TIE = 1e-6
"""An RMS that is above λ by no more than this share counts as λ: that of each tensor is 1, apart
from rounding, in the first step of the Adam kinds."""


@dataclass(eq=False)
class UpdateClip(Update, OptimizerMode):
    """Limit the update of each tensor. Before it is bound to optimizers it cannot decide.

    ``norm_clipped`` of a decision is ``norm``, and ``coef`` is the smallest factor that the update
    of a tensor is multiplied by.
    """

    name = "update"
    predicts = True
    _kept: list[tuple[ParamShard, Tensor, Number]] = field(
        default_factory=list, init=False, repr=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("eps", self.eps > 0, "above 0")

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure ‖G‖ and the RMS of each tensor, with one collective for both.

        ``work`` is the RMS of each of ``layout.names``, and whether an optimizer steps it with a
        gradient. With ZeRO stage 1 the rank that has the second moment of a tensor measures it.
        """
        power, powers = powers_of(*layout.gradients(), self.norm_type, each)
        stepped, device = self.stepped(), layout.device
        sums = torch.zeros(2, len(layout.names), dtype=transfer.widest(device), device=device)
        pairs = [
            (shard, gradient, moment)
            for shard, gradient in zip(*layout.gradients(), strict=True)
            if (moment := stepped.moment(shard)) is not None
        ]
        if pairs:
            at = layout.positions_of(shard for shard, *_ in pairs)
            sums[0].index_add_(0, at, torch.stack([self._ratios(*one) for one in pairs]))
            sizes = [float(gradient.numel()) for _, gradient, _ in pairs]
            sums[1].index_add_(0, at, transfer.on_device(sizes, device))
        row = torch.cat([transfer.on_device([power], device), sums.view(-1)])
        every = layout.rows_of_ranks(row)
        norm = combine([transfer.read(one) for one in every[:, 0]], self.norm_type)
        ratios, elements = every[:, 1:].sum(0).view(2, -1)
        work = ((ratios / elements.clamp(min=1.0)).sqrt(), elements > 0)
        return GradStats.measured(norm, powers, work)

    def _ratios(self, shard: ParamShard, gradient: Tensor, moment: Moment) -> Tensor:
        """Return Σg²/max(v, ε²) of a gradient, with v after the step."""
        wide, least = transfer.widest(gradient.device), self.eps * self.eps
        correction, squared = moment.correction(), gradient
        if moment.decay:
            squared = torch.add(gradient, shard.weight, alpha=moment.decay)
        found = []
        given = (squared,) if moment.value is None else (squared, moment.value)
        for g, *value in pieces(*given):
            squares = g.to(wide).square()
            v = (1.0 - moment.beta) * squares
            if value:
                v = v.add_(value[0].to(wide), alpha=moment.beta)
            found.append((squares / (v / correction).clamp_(min=least)).sum())
        return torch.stack(found).sum()

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide what the update of each tensor is multiplied by; no collective."""
        norm, limit = stats.norm, self.limit
        rms, present = stats.work or self.measure(layout).work
        if self.tally is not None and layout.counts_common:
            self.tally.add(rms.where(present, math.nan), 1.0)
        over = rms > limit * (1.0 + TIE)
        factors = torch.where(over, limit / rms, 1.0)
        every = factors.tolist() if transfer.can_read(layout.device) else factors.unbind()
        most = transfer.read(rms.amax()) if rms.numel() else 0.0
        more = {"coef": transfer.read(factors.amin()), "update": every} if every else {}
        share, total = share_of(over, present)
        return Decision.of_share(norm, norm, share, most, limit, total, **more)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        return decision

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Copy the tensors whose update is limited; all of them where the host does not know."""
        stepped, self._kept = self.stepped(), []
        for shard in layout.gradients()[0]:
            factor = decision.update[layout.positions[shard.name]]
            if stepped.steps(shard) and (isinstance(factor, Tensor) or factor < 1.0):
                self._kept.append((shard, shard.weight.clone(), factor))

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Move each limited tensor back by a part of its update."""
        kept, self._kept = self._kept, []
        for shard, before, factor in kept:
            back = 1.0 - factor
            shard.weight.lerp_(before, back.to(before.dtype) if isinstance(back, Tensor) else back)
        return decision


MODE = UpdateClip
