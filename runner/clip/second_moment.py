"""Modes ``spike`` and ``update``, and the second moments of gradients that they take of optimizers.

Adam, AdamW, NAdam and RAdam keep a running mean v of g² of each element, and so does RMSprop. Each
step sets ``v ← β·v + (1 − β)·g²`` with β = ``betas[1]``, or ``alpha``; where ``weight_decay`` is
not decoupled, g is the gradient plus ``weight_decay`` times the parameter. With ZeRO stage 1 the
rank that steps a parameter has its second moment, and measures and clips it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from runner.clip import Change, ChangeMode, ClipMode, Decision, Norms
from runner.clip.per_parameter import decide_on_tensors
from runner.clip.stepped import SteppedShards
from runner.config.modes import Spike, Update
from runner.gradients import Layout, ParamShard, transfer
from runner.gradients.kernels import kernels_of
from runner.gradients.norms import is_finite, norm_of_ranks, powers_of, root
from runner.gradients.shard import local

# Name of the second moment in the state of an optimizer. A subclass may change its value.
NAMES: dict[type[Optimizer], str] = {
    Adam: "exp_avg_sq",
    AdamW: "exp_avg_sq",
    NAdam: "exp_avg_sq",
    RAdam: "exp_avg_sq",
    RMSprop: "square_avg",
}
# An RMS that is above λ by no more than this share counts as λ: in the first step of the Adam kinds
# the RMS of each tensor is 1, apart from rounding.
TIE = 1e-6


class OptimizerMisfit(ValueError):
    """An optimizer that a clipping mode is not defined on; the message says what to change."""


class Moment(NamedTuple):
    """The second moment of a shard before a step."""

    value: Tensor | None  # of the shape of the local shard; None before the first step
    beta: float
    steps: Tensor  # that ``value`` has averaged, 0-dimensional; torch may keep it on the host
    corrected: bool  # whether the optimizer divides v by 1 − β^steps
    decay: float  # factor of the parameter in the gradient that is squared


@dataclass(eq=False)
class OptimizerMode(ClipMode):
    """A mode on the optimizer's step; with ``predicts`` it computes the second moment after it."""

    name: ClassVar[str]
    predicts: ClassVar[bool] = False
    _bound_to: tuple[Any, ...] = field(default=(), init=False, repr=False)
    _stepped: SteppedShards = field(init=False, repr=False)

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            # A subclass may compute its step differently, which cannot be predicted.
            is_exact = type(optimizer) in NAMES
            if not (is_exact if self.predicts else isinstance(optimizer, tuple(NAMES))):
                raise OptimizerMisfit(
                    f"clip={self.name} needs the second moments of Adam, AdamW, NAdam, RAdam or "
                    f"RMSprop, and not {type(optimizer).__name__}: choose optimizer=adamw, or "
                    "another mode, as clip=norm"
                )

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Find out which optimizer steps which shard, once; a collective of all ranks."""
        self.require_optimizers(optimizers)
        bound_to = (*optimizers, layout)
        if [id(item) for item in self._bound_to] == [id(item) for item in bound_to]:
            return
        self._bound_to = bound_to
        self._stepped = SteppedShards(optimizers, layout)

    def require_bound(self) -> None:
        if not self._bound_to:
            raise OptimizerMisfit(
                f"clip={self.name} works on the optimizer's step, so it needs the optimizer: boost "
                "both (booster.boost(model, optimizer)) or train with runner.Trainer"
            )

    def moment(self, shard: ParamShard) -> Moment | None:
        """Return the second moment of a shard, before the step; None where another rank has it."""
        place = self._stepped.place(shard)
        if place is None:
            return None
        optimizer, group = place
        state = optimizer.state.get(shard.param, {})
        name = next(name for kind, name in NAMES.items() if isinstance(optimizer, kind))
        value = state.get(name)
        betas = group.get("betas")
        coupled = not (isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay"))
        # An optimizer that maximizes squares the negated gradient plus decay.
        sign = -1.0 if group.get("maximize") else 1.0
        return Moment(
            value=None if value is None else local(value),
            beta=float(group["alpha"] if betas is None else betas[1]),
            steps=torch.as_tensor(state["step"]) if "step" in state else torch.zeros(()),
            corrected=betas is not None,
            decay=sign * float(group.get("weight_decay") or 0.0) if coupled else 0.0,
        )


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views of tensors of one shape, block by block along dimension 0."""
    first = tensors[0]
    if not first.ndim:
        return iter([tensors])
    elements = kernels_of(first.device).TOGETHER
    size = max(1, len(first) * elements // max(first.numel(), 1))
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


@dataclass(eq=False)
class SpikeClip(Spike, OptimizerMode, ChangeMode):
    """Clamp elements that are large beside their own second moment.

    The clipping of SPAM (Huang et al. 2025, arXiv 2501.06842, section 3): where ``g² > θ·v``,
    ``g ← sign(g)·sqrt(θ·v)``, with v the second moment before the step, without bias correction,
    and θ the threshold. SPAM's reset of the moments every 500 steps is no part of this mode.

    As in the authors' code an element is compared once its second moment has averaged ``min_steps``
    steps: after one step v is 0.001·g² with β2 = 0.999, and an element that has grown by 2.3 would
    be clamped. Where v is 0, because the element never had a gradient, nothing is clamped: the
    published code clamps such an element to 0, and v then stays 0 forever.
    """

    name = "spike"

    def change(self, layout: Layout, norms: Norms) -> Change:
        """Clamp elements above θ·v; the norm after clipping counts each where it is stepped."""
        self.require_bound()
        p = self.norm_type
        nothing = layout.number(0.0)
        changed = nothing
        total = 0.0
        maxima = [nothing]
        after = [nothing]
        for shard, gradient in zip(*layout.gradients(), strict=True):
            weight = self._stepped.weight(shard)
            if not weight:
                continue  # another rank steps it
            if self._stepped.copies[shard.name]:
                total += gradient.numel() * weight
            value, ready = self._compared(shard, gradient)
            power, above, largest = self._read(gradient, value, ready, weight)
            changed = changed + above * weight
            maxima.append(largest)
            after.append(power if math.isinf(p) else power * weight)
            if any(kernels_of(above.device).may_hold((above > 0).view(1))):
                for g, v in pieces(gradient, value):
                    g.copy_(self._clamped(g, v, ready)[1])
        return Change(
            changed=changed,
            total=layout.number(total),
            max_stat=torch.stack(maxima).amax(),
            power=torch.stack(after).amax() if math.isinf(p) else torch.stack(after).sum(),
        )

    def _compared(self, shard: ParamShard, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return v of a shard, and whether it is ready; the gradient and false without v."""
        moment = self.moment(shard)
        if moment is None or moment.value is None:
            return gradient, torch.zeros((), dtype=torch.bool)
        return moment.value, moment.steps >= self.min_steps

    def _clamped(self, gradient: Tensor, value: Tensor, ready: Tensor) -> tuple[Tensor, Tensor]:
        """Return g²/v of some elements and these elements clamped, in the widest type."""
        g = gradient.to(transfer.widest(gradient.device))
        v = value.to(transfer.widest(value.device))
        ratio = (g * g / v).where((v > 0) & ready, 0.0)
        return ratio, torch.where(ratio > self.limit, (v * self.limit).sqrt().copysign(g), g)

    def _read(
        self, gradient: Tensor, value: Tensor, ready: Tensor, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ|g|^p after clamping (max|g| for p = inf), the spikes, and the largest g²/v."""
        p = self.norm_type
        rows = []
        for g, v in pieces(gradient, value):
            ratio, clamped = self._clamped(g, v, ready)
            size = clamped.abs().amax() if math.isinf(p) else (clamped.abs() ** p).sum()
            rows.append(torch.stack([size, (ratio > self.limit).sum(), ratio.amax()]))
            if self.tally is not None:
                self.tally.add(ratio.where(ready, math.nan), weight)
        sizes, above, largest = torch.stack(rows).T
        size = sizes.amax() if math.isinf(p) else sizes.sum()
        return size, above.sum(), largest.amax()


@dataclass(eq=False)
class UpdateClip(Update, OptimizerMode):
    """Limit the optimizer's update of each tensor, and leave the gradient as it is.

    The update clipping of StableAdamW (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2; from
    Adafactor, Shazeer and Stern 2018, arXiv 1804.04235, section 6): the update of each tensor is
    divided by ``max(1, RMS/λ)`` with ``RMS = sqrt(mean(g²/max(v, ε²)))``. v is the second moment
    *after* the step, bias-corrected where the optimizer corrects it (the Adam kinds do, RMSprop
    does not), computed from the one before it, so that a CPU copies no tensor but those that are
    limited. The update is all that the step adds to a tensor, decoupled weight decay included.

    ``norm_clipped`` of a decision is ``norm``, and ``coef`` the smallest factor of an update.
    """

    name = "update"
    predicts = True
    _kept: list[tuple[ParamShard, Tensor, Tensor]] = field(
        default_factory=list, init=False, repr=False
    )

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> Norms:
        """Measure ‖G‖ and the RMS of each tensor, with one collective for both (two for p = inf).

        ``work`` is the RMS of each of ``layout.names``, and whether an optimizer steps it with a
        gradient.
        """
        self.require_bound()
        shards, gradients = layout.gradients()
        power, shares = powers_of(layout, shards, gradients, self.norm_type, each)
        device = layout.device
        sums = torch.zeros(2, len(layout.names), dtype=transfer.widest(device), device=device)
        stepped = []
        ratios = []
        for shard, gradient in zip(shards, gradients, strict=True):
            moment = self.moment(shard)
            if moment is not None:
                stepped.append(shard)
                ratios.append(self._ratio(shard, gradient, moment))
        if stepped:
            positions = layout.positions_of(stepped)
            sizes = layout.constant("elements", stepped, lambda shard: shard.weight.numel())
            sums[0].index_add_(0, positions, torch.stack(ratios))
            sums[1].index_add_(0, positions, sizes)
        if math.isinf(self.norm_type):
            norm = norm_of_ranks(layout, power, self.norm_type)
            totals = layout.sum(sums.view(-1))
        else:
            of_all_ranks = layout.sum(torch.cat([power.view(1), sums.view(-1)]))
            norm = root(of_all_ranks[0], self.norm_type)
            totals = of_all_ranks[1:]
        ratio, elements = totals.view(2, -1)
        work = ((ratio / elements.clamp(min=1.0)).sqrt(), elements > 0)
        return Norms(norm, is_finite(norm), self.norm_type, shards, shares, work)

    def _ratio(self, shard: ParamShard, gradient: Tensor, moment: Moment) -> Tensor:
        """Return Σg²/max(v, ε²) of a gradient, with v after the step."""
        wide = transfer.widest(gradient.device)
        least = self.eps * self.eps
        steps = moment.steps.to(wide)  # float32 rounds 1 - β^2 by 1e-5
        correction = 1.0 - moment.beta ** (steps + 1) if moment.corrected else 1.0
        squared = gradient
        if moment.decay:
            squared = torch.add(gradient, shard.weight, alpha=moment.decay)
        sums = []
        tensors = (squared,) if moment.value is None else (squared, moment.value)
        for g, *value in pieces(*tensors):
            squares = g.to(wide).square()
            v = (1.0 - moment.beta) * squares
            if value:
                v = v.add_(value[0].to(wide), alpha=moment.beta)
            sums.append((squares / (v / correction).clamp_(min=least)).sum())
        return torch.stack(sums).sum()

    @torch.no_grad()
    def clip_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Decide on the updates of tensors; no gradient is changed."""
        limit = self.limit
        rms, present = norms.work or self.measure(layout).work
        over = rms > limit * (1.0 + TIE)
        factors = torch.where(over, limit / rms, 1.0)
        limits = {"factor": factors.amin(), "update": factors} if factors.numel() else {}
        return decide_on_tensors(
            self,
            layout,
            norms=(norms.total, norms.total),
            compared=(rms, over, present),
            threshold=limit,
            **limits,
        )

    @torch.no_grad()
    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Copy the tensors whose update is limited; all of them where the host does not know."""
        self._kept = []
        factors = decision.update
        limited = kernels_of(factors.device).may_hold(factors < 1.0)
        for shard in layout.gradients()[0]:
            position = layout.positions[shard.name]
            if shard in self._stepped and limited[position]:
                self._kept.append((shard, shard.weight.clone(), factors[position]))

    @torch.no_grad()
    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Move each limited tensor back by a part of its update."""
        for shard, before, factor in self._kept:
            shard.weight.lerp_(before, (1.0 - factor).to(before.dtype))
        self._kept = []
        return decision
