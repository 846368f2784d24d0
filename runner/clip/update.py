"""Mode ``update``: the optimizer's update is limited, and the gradient is left as it is.

Rule ``rms`` is the update clipping of StableAdamW (Wortsman et al. 2023, arXiv 2304.13013,
algorithm 2; from Adafactor, Shazeer and Stern 2018, arXiv 1804.04235, section 6): the update of
each tensor is divided by ``max(1, RMS/λ)`` with ``RMS = sqrt(mean(g²/max(v, ε²)))``. v is the
optimizer's second moment *after* the step, bias-corrected where the optimizer corrects it (the Adam
kinds do, RMSprop does not). It is computed before the step from the one before it, so that no
tensor but those to be limited is copied on a CPU. The update is everything that the step adds to a
tensor, decoupled weight decay included.

Published implementations differ from this in details. The paper, optimi and pytorch_optimizer write
the bias correction into β, so their v is the corrected one too; all three scale the decay with the
learning rate of a tensor. optimi 0.3.3 with ``decouple_lr`` scales the decay by another rate; torch
has none. ε is a floor of √v here and there, and 1e-8 by default in pytorch_optimizer 4.1.0, 1e-6 in
optimi. λ is fixed to 1 in all of them.

Rule ``sigma`` is in :mod:`runner.clip.update_sigma`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.second_moment import (
    WITHOUT_OPTIMIZER,
    OptimizerMisfit,
    SecondMoments,
    Stepped,
    require_second_moments,
)
from runner.clip.shard import ParamShard
from runner.clip.tensors import share_of
from runner.clip.transfer import Number
from runner.clip.update_rms import TensorRms, rms_of_tensors
from runner.clip.update_sigma import PastUpdates
from runner.config.simple_modes import Update

NAME = "update"

TIE = 1e-6
"""An RMS that is above λ by no more than this share counts as λ: that of each tensor is 1, apart
from rounding, in the first step of the Adam kinds."""

SIGMA = "sigma"
"""What the decision of that rule says of the update before the step."""


@dataclass(eq=False)
class UpdateClip(Update, ClipMode):
    """Limit the update of each tensor, or of all of them together.

    Before it is bound to optimizers it cannot decide. ``norm_clipped`` of a decision is ``norm``,
    and ``coef`` is the smallest factor that the update of a tensor is multiplied by.
    """

    _stepped: Stepped | None = field(default=None, init=False, repr=False)
    _kept: list[tuple[ParamShard, Tensor, Number]] = field(
        default_factory=list, init=False, repr=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        if self.rule not in ("rms", "sigma"):
            raise ValueError(f"rule must be rms or sigma, not {self.rule!r}")
        if self.window < 2:
            raise ValueError(f"window must be at least 2, not {self.window}")
        if self.rule == "sigma":
            self.history = PastUpdates.initial(self.window)

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that each optimizer has second moments; rule ``sigma`` takes any optimizer."""
        if self.rule == "rms":
            require_second_moments(optimizers, NAME, predicts=True)

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Find out which optimizer steps which shard, once; a collective of all ranks."""
        if self._stepped is not None and self._stepped.are_of(optimizers, layout):
            return
        if self.rule == "rms":
            self._stepped = SecondMoments(optimizers, layout, NAME, predicts=True)
        else:
            self._stepped = Stepped(optimizers, layout)

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure ‖G‖ and the RMS of each tensor, with one collective for both."""
        if self.rule == "sigma":
            return super().measure(layout, each)
        found = rms_of_tensors(layout, self._moments(), self.eps, self.norm_type, each)
        norm = found.norm
        finite = torch.isfinite(norm) if isinstance(norm, Tensor) else math.isfinite(norm)
        return GradStats(norm, finite, found.powers, found)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide what the update of each tensor is multiplied by; no collective."""
        norm, limit = stats.norm, self.limit
        if self.rule == "sigma":
            self._steps()
            return replace(Decision.untouched(norm, None, math.nan), update=SIGMA)
        found: TensorRms = stats.work or self.measure(layout).work
        rms, present = found.rms, found.present
        if self.tally is not None and (layout.group is None or layout.group.rank() == 0):
            self.tally.add(rms.where(present, math.nan), 1.0)
        over = rms > limit * (1.0 + TIE)
        factors = torch.where(over, limit / rms, 1.0)
        shares = share_of(over, present)
        max_stat, coef = rms.amax(), factors.amin()
        if not isinstance(norm, Tensor):
            if not over.any():
                kept = Decision.untouched(norm, limit, float(max_stat))
                return replace(kept, total=float(present.sum()))
            return Decision(
                norm,
                norm,
                float(coef),
                1.0,
                float(shares),
                float(max_stat),
                limit,
                update=factors.tolist(),
                total=float(present.sum()),
            )
        share = shares.to(norm.dtype)
        metrics = (norm, norm, coef, share.sign(), share, max_stat, limit)
        return Decision(*metrics, update=factors.unbind(), total=present.sum().to(norm.dtype))

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        """Leave the gradients as they are."""
        return decision

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Copy the tensors whose update is limited; all of them where the host does not know."""
        steps = self._steps()
        own = [shard for shard in layout.gradients()[0] if steps.steps(shard)]
        if self.rule == "sigma":
            self._kept = [(shard, shard.weight.clone(), 1.0) for shard in own]
            return
        factors = [decision.update[steps.index[shard.name]] for shard in own]
        self._kept = [
            (shard, shard.weight.clone(), factor)
            for shard, factor in zip(own, factors, strict=True)
            if isinstance(factor, Tensor) or factor < 1.0
        ]

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Move each limited tensor back by a part of its update.

        With rule ``sigma`` the norm of the update takes one collective.
        """
        kept, self._kept = self._kept, []
        if self.rule == "sigma":
            past = PastUpdates(self.history, self.limit)
            return past.limit_update(layout, decision, kept, self._steps())
        for shard, before, factor in kept:
            back = 1.0 - factor
            shard.weight.lerp_(before, back.to(before.dtype) if isinstance(back, Tensor) else back)
        return decision

    def _steps(self) -> Stepped:
        if self._stepped is None:
            raise OptimizerMisfit(WITHOUT_OPTIMIZER.format(NAME))
        return self._stepped

    def _moments(self) -> SecondMoments:
        moments = self._steps()
        assert isinstance(moments, SecondMoments)
        return moments


MODE = UpdateClip
