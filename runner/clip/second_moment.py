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
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from runner.clip import ClipMode, Decision, GradStats, Layout, Number, ParamShard, Parts, transfer
from runner.clip.norms import combine, powers_of
from runner.clip.per_parameter import decide_on_tensors
from runner.clip.shard import local
from runner.config.modes import Spike, Update

# Name of the second moment in the state of an optimizer. A subclass may change its value.
NAMES = {**dict.fromkeys((Adam, AdamW, NAdam, RAdam), "exp_avg_sq"), RMSprop: "square_avg"}
# Elements for which a CPU computes together, in a cache, and an accelerator, within its memory.
BLOCK, CHUNK = 2**16, 2**26
# An RMS that is above λ by no more than this share counts as λ: in the first step of the Adam kinds
# that of each tensor is 1, apart from rounding.
TIE = 1e-6


class OptimizerMisfit(ValueError):
    """An optimizer that a clipping mode is not defined on; the message says what to change."""


class Moment(NamedTuple):
    """The second moment of a shard before a step."""

    value: Tensor | None  # of the shape of the local shard; None before the first step
    beta: float
    steps: Number  # that ``value`` has averaged: a float where the host knows it
    corrected: bool  # whether the optimizer divides v by 1 − β^steps
    decay: float  # factor of the parameter in the gradient that is squared


@dataclass(eq=False)
class OptimizerMode(ClipMode):
    """A mode on the optimizer's step; one that ``predicts`` knows the second moment after it.

    ``_copies`` is for each parameter the number of ranks that step each element: with ZeRO 1 not
    all that have it, and 0 without an optimizer.
    """

    name: ClassVar[str]
    predicts: ClassVar[bool] = False
    _of: tuple[Any, ...] = field(default=(), init=False, repr=False)
    _places: dict[int, tuple[Optimizer, int]] = field(init=False, repr=False)
    _copies: dict[str, float] = field(init=False, repr=False)

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            exact = type(optimizer) in NAMES
            if not (exact if self.predicts else isinstance(optimizer, tuple(NAMES))):
                raise OptimizerMisfit(
                    f"clip={self.name} needs the second moments of Adam, AdamW, NAdam, RAdam or "
                    f"RMSprop, and not {type(optimizer).__name__}: choose optimizer=adamw, or "
                    "another mode, as clip=norm"
                )

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Find out which optimizer steps which shard, once; a collective of all ranks."""
        self.require_optimizers(optimizers)
        if list(map(id, self._of)) == list(map(id, (*optimizers, layout))):
            return
        self._of = (*optimizers, layout)
        # By number: loading a state makes new groups.
        self._places = {
            id(parameter): (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        here = [0.0] * len(layout.names)
        for shard in layout.shards:
            if id(shard.param) in self._places:
                here[layout.positions[shard.name]] += shard.weight.numel()
        row = transfer.on_device(here, layout.device)
        stepped: list[float] = layout.rows_of_ranks(row).sum(0).tolist()
        pairs = zip(layout.parameters.items(), stepped, strict=True)
        self._copies = {name: n / max(1, math.prod(known.shape)) for (name, known), n in pairs}

    def require_bound(self) -> None:
        if not self._of:
            raise OptimizerMisfit(
                f"clip={self.name} works on the optimizer's step, so it needs the optimizer: boost "
                "both (booster.boost(model, optimizer)) or train with runner.Trainer"
            )

    def weight(self, shard: ParamShard) -> float:
        """Return 1 ÷ the ranks that count a shard: those that step it, or all that have it."""
        copies = self._copies[shard.name]
        if not copies:
            return 1.0 / shard.num_replicas
        return 1.0 / copies if id(shard.param) in self._places else 0.0

    def moment(self, shard: ParamShard) -> Moment | None:
        """Return the second moment of a shard, before the step; None where another rank has it."""
        if id(shard.param) not in self._places:
            return None
        optimizer, number = self._places[id(shard.param)]
        state, group = optimizer.state.get(shard.param, {}), optimizer.param_groups[number]
        name = next(name for kind, name in NAMES.items() if isinstance(optimizer, kind))
        value, steps, betas = state.get(name), state.get("step", 0.0), group.get("betas")
        coupled = not (isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay"))
        # An optimizer that maximizes squares the negated gradient plus decay.
        sign = -1.0 if group.get("maximize") else 1.0
        return Moment(
            None if value is None else local(value),
            float(group["alpha"] if betas is None else betas[1]),
            transfer.read(steps) if isinstance(steps, Tensor) else steps,
            betas is not None,
            sign * float(group.get("weight_decay") or 0.0) if coupled else 0.0,
        )


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views of tensors of one shape, block by block along dimension 0."""
    first = tensors[0]
    if not first.ndim:
        return iter([tensors])
    most = BLOCK if transfer.can_read(first.device) else CHUNK
    size = max(1, len(first) * most // max(first.numel(), 1))
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


@dataclass(eq=False)
class SpikeClip(Spike, OptimizerMode):
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

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Count the elements above θ·v; the norm after clipping counts each where it is stepped."""
        self.require_bound()
        p, work, changed = self.norm_type, list[tuple[Any, ...]](), cast(Number, 0.0)
        total, maxima, after = 0.0, list[Number](), list[Number]()
        for shard, gradient in zip(*layout.gradients(), strict=True):
            if not (weight := self.weight(shard)):
                continue  # another rank steps it
            if self._copies[shard.name]:
                total += gradient.numel() * weight
            moment, value, ready = self.moment(shard), gradient, cast(bool | Tensor, False)
            if moment is not None and moment.value is not None:
                value, ready = moment.value, moment.steps >= self.min_steps
            one = gradient, value, ready
            power, above, largest = self._read(*one, weight)
            changed = changed + above * weight
            maxima.append(largest)
            after.append(power if math.isinf(p) else power * weight)
            if isinstance(above, Tensor) or above:
                work.append(one)
        whole = combine(after or [0.0], p) if math.isinf(p) else sum(after, 0.0)
        largest = combine(maxima or [0.0], math.inf)
        parts = Parts(changed, total, work, whole)
        return Decision.change_parts(stats.norm, self.limit, largest, parts)

    def apply_parts(self, decision: Decision) -> None:
        assert decision.parts is not None
        for gradient, value, ready in decision.parts.work:
            for g, v in pieces(gradient, value):
                g.copy_(self._clamped(g, v, ready)[1])

    def _clamped(self, some: Tensor, of: Tensor, ready: bool | Tensor) -> tuple[Tensor, Tensor]:
        """Return g²/v of some elements and these elements clamped, in the widest type."""
        g, v = (each.to(transfer.widest(each.device)) for each in (some, of))
        ratio = (g * g / v).where((v > 0) & ready, 0.0)
        return ratio, torch.where(ratio > self.limit, (v * self.limit).sqrt().copysign(g), g)

    def _read(
        self, gradient: Tensor, value: Tensor, ready: bool | Tensor, weight: float
    ) -> tuple[Number, Number, Number]:
        """Return Σ|g|^p after clamping (max|g| for p = inf), the spikes, and the largest g²/v."""
        p, found = self.norm_type, []
        for g, v in pieces(gradient, value):
            ratio, clamped = self._clamped(g, v, ready)
            size = clamped.abs().amax() if math.isinf(p) else (clamped.abs() ** p).sum()
            found.append(torch.stack([size, (ratio > self.limit).sum(), ratio.amax()]))
            if self.tally is not None and ready is not False:
                self.tally.add(ratio, weight)
        sizes, above, largest = torch.stack(found).T
        size = sizes.amax() if math.isinf(p) else sizes.sum()
        return transfer.read(size), transfer.read(above.sum()), transfer.read(largest.amax())


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
    _kept: list[tuple[ParamShard, Tensor, Number]] = field(
        default_factory=list, init=False, repr=False
    )

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure ‖G‖ and the RMS of each tensor, with one collective for both.

        ``work`` is the RMS of each of ``layout.names``, and whether an optimizer steps it with a
        gradient.
        """
        self.require_bound()
        power, powers = powers_of(*layout.gradients(), self.norm_type, each)
        device = layout.device
        sums = torch.zeros(2, len(layout.names), dtype=transfer.widest(device), device=device)
        pairs = [
            (shard, gradient, moment)
            for shard, gradient in zip(*layout.gradients(), strict=True)
            if (moment := self.moment(shard)) is not None
        ]
        if pairs:
            at = layout.positions_of(shard.name for shard, *_ in pairs)
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
        wide, least, steps = transfer.widest(gradient.device), self.eps * self.eps, moment.steps
        if isinstance(steps, Tensor):
            steps = steps.to(wide)  # float32 rounds 1 - β^2 by 1e-5
        correction = 1.0 - moment.beta ** (steps + 1) if moment.corrected else 1.0
        squared = gradient
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
        norm, limit = stats.norm, self.limit
        rms, present = stats.work or self.measure(layout).work
        over = rms > limit * (1.0 + TIE)
        factors = torch.where(over, limit / rms, 1.0)
        every = transfer.numbers(factors)
        more = {"coef": transfer.read(factors.amin()), "update": every} if every else {}
        return decide_on_tensors(self, layout, (norm, norm), (rms, over, present), limit, **more)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        return decision

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Copy the tensors whose update is limited; all of them where the host does not know."""
        self._kept = []
        for shard in layout.gradients()[0]:
            factor = decision.update[layout.positions[shard.name]]
            if id(shard.param) in self._places and (isinstance(factor, Tensor) or factor < 1.0):
                self._kept.append((shard, shard.weight.clone(), factor))

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Move each limited tensor back by a part of its update."""
        kept, self._kept = self._kept, []
        for shard, before, factor in kept:
            back = 1.0 - factor
            shard.weight.lerp_(before, back.to(before.dtype) if isinstance(back, Tensor) else back)
        return decision
