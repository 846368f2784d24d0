"""Mode ``update``: the optimizer's update is limited, and the gradient is left as it is.

Rule ``rms`` is the update clipping of StableAdamW (Wortsman et al. 2023, arXiv 2304.13013,
algorithm 2; from Adafactor, Shazeer and Stern 2018, arXiv 1804.04235, section 6): the update of
each tensor is divided by ``max(1, RMS/λ)`` with ``RMS = sqrt(mean(g²/max(v, ε²)))``. v is the
optimizer's second moment *after* the step, bias-corrected where the optimizer corrects it (the Adam
kinds do, RMSprop does not). It is computed before the step from the one before it, so that no
tensor but those to be limited is copied on a CPU. The update is everything that the step adds to a
tensor, decoupled weight decay included.

Rule ``sigma`` is Levanter's ``clip_update_norm``: the update, weight decay included and before it
is multiplied by the learning rate, is scaled down to a norm of at most the mean of the last 128
such norms plus k times their standard deviation (that of a population, at least 1e-6), from 64
norms on. Norms enter the history before they are limited. Levanter also keeps norms that are not
finite, after which it compares with NaN for 128 steps; here these steps do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.clip import Decision, GradStats, Layout, Number, ParamShard, transfer
from runner.clip.norms import combine, local_powers, powers_of
from runner.clip.per_parameter import share_of
from runner.clip.second_moment import Moment, OptimizerMode, pieces
from runner.config.simple_modes import Update

TIE = 1e-6
"""An RMS that is above λ by no more than this share counts as λ: that of each tensor is 1, apart
from rounding, in the first step of the Adam kinds."""

SMALLEST = 1e-6  # lower bound of a standard deviation, as published
SIGMA = "sigma"  # what the decision of that rule says of the update before the step


@dataclass(eq=False)
class UpdateClip(Update, OptimizerMode):
    """Limit the update of each tensor, or of all of them together.

    Before it is bound to optimizers it cannot decide. ``norm_clipped`` of a decision is ``norm``,
    and ``coef`` is the smallest factor that the update of a tensor is multiplied by.
    """

    name = "update"
    predicts = True
    _kept: list[tuple[ParamShard, Tensor, Number]] = field(
        default_factory=list, init=False, repr=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("eps", self.eps > 0, "above 0")
        self.require("rule", self.rule in ("rms", SIGMA), "rms or sigma")
        self.require("window", self.window >= 2, "at least 2")
        if self.rule == SIGMA:
            norms = torch.zeros(self.window, dtype=torch.float64)
            self.history = {"norms": norms, "count": 0.0}

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self.rule == "rms":
            super().require_optimizers(optimizers)

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure ‖G‖ and the RMS of each tensor, with one collective for both.

        ``work`` is the RMS of each of ``layout.names``, 0 where nothing is stepped, and whether an
        optimizer steps the tensor with a gradient; the same on every rank. With ZeRO stage 1 the
        rank that has the second moment of a tensor measures it; where several ranks step the same
        elements, each of them counts them.
        """
        if self.rule == SIGMA:
            return super().measure(layout, each)
        power, powers = local_powers(layout, self.norm_type, each)
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
        if self.rule == SIGMA:
            self.stepped()
            return replace(Decision.untouched(norm, None, math.nan), update=SIGMA)
        rms, present = stats.work or self.measure(layout).work
        if self.tally is not None and layout.counts_common:
            self.tally.add(rms.where(present, math.nan), 1.0)
        over = rms > limit * (1.0 + TIE)
        factors = torch.where(over, limit / rms, 1.0)
        share, total = transfer.read(share_of(over, present)), transfer.count(present)
        max_stat = transfer.read(rms.amax()) if rms.numel() else 0.0
        if not isinstance(share, Tensor) and share == 0.0:
            return Decision.untouched(norm, limit, max_stat, total)
        clipped = share.sign() if isinstance(share, Tensor) else 1.0
        metrics = (norm, norm, transfer.read(factors.amin()), clipped, share, max_stat, limit)
        every = factors.tolist() if transfer.can_read(layout.device) else factors.unbind()
        return Decision(*metrics, update=every, total=total)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        return decision

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Copy the tensors whose update is limited; all of them where the host does not know."""
        stepped, self._kept = self.stepped(), []
        for shard in layout.gradients()[0]:
            if stepped.steps(shard):
                sigma = decision.update is SIGMA
                factor = 1.0 if sigma else decision.update[layout.positions[shard.name]]
                if sigma or isinstance(factor, Tensor) or factor < 1.0:
                    self._kept.append((shard, shard.weight.clone(), factor))

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Move each limited tensor back by a part of its update.

        With rule ``sigma`` the norm of the update takes one collective.
        """
        kept, self._kept = self._kept, []
        if self.rule == SIGMA:
            return self._limit_whole(layout, decision, kept)
        for shard, before, factor in kept:
            back = 1.0 - factor
            shard.weight.lerp_(before, back.to(before.dtype) if isinstance(back, Tensor) else back)
        return decision

    def _limit_whole(
        self, layout: Layout, decision: Decision, kept: list[tuple[ParamShard, Tensor, Number]]
    ) -> Decision:
        """Measure the update that was taken, limit it, and remember its norm; one collective."""
        stepped, power = self.stepped(), list[Number]()
        weights, backwards = [shard.weight for shard, *_ in kept], [before for _, before, _ in kept]
        if kept:
            torch._foreach_sub_(backwards, weights)
        for (shard, *_), update in zip(kept, backwards, strict=True):
            rate = stepped.rate(shard)
            scale = stepped.copies[shard.name] / shard.num_replicas
            if isinstance(rate, Tensor) or rate:
                square = powers_of([shard], [update], 2.0, True)[0] if update.numel() else 0.0
                power.append(square / (rate * rate * scale))
        norm = combine(layout.gather([sum(power, 0.0)])[0], 2.0)
        limit = transfer.read(self._limit_of(layout.device))
        over = norm > limit  # never of a NaN
        coef, clipped = transfer.where(over, limit / norm, 1.0), transfer.where(over, 1.0, 0.0)
        if kept and over is not False:
            torch._foreach_mul_(backwards, 1.0 - coef)
            torch._foreach_add_(weights, backwards)
        self._remember(norm, layout.device)
        done = replace(
            decision,
            coef=coef,
            clipped=clipped,
            fraction=clipped,
            max_stat=norm,
            threshold=limit,
            update=None,
        )
        return done.where(decision.finite) if isinstance(decision.finite, Tensor) else done

    def _limit_of(self, device: torch.device) -> Tensor:
        """Return mean + k·σ of the history; NaN while it holds too few norms."""
        norms = torch.as_tensor(self.history["norms"]).to(device, transfer.widest(device))
        [count] = transfer.on_device([self.history["count"]], device).clamp(max=len(norms))
        mask = torch.arange(len(norms), device=device) >= len(norms) - count
        mean = norms.where(mask, 0.0).sum() / count.clamp(min=1.0)
        spread = (norms - mean).where(mask, 0.0).square().sum() / count.clamp(min=1.0)
        limit = mean + self.limit * spread.sqrt().clamp(min=SMALLEST)
        return torch.where(count >= max(2, len(norms) // 2), limit, torch.nan)

    def _remember(self, norm: Number, device: torch.device) -> None:
        """Add the norm of an update to the history, where it is finite and not 0."""
        norms = torch.as_tensor(self.history["norms"]).to(device, transfer.widest(device))
        count, valid = self.history["count"], transfer.is_finite(norm) & (norm > 0)
        added = torch.cat([norms[1:], transfer.on_device([norm], device)])
        self.history["norms"] = transfer.where(valid, added, norms)
        self.history["count"] = transfer.where(valid, count + 1.0, count)


MODE = UpdateClip
