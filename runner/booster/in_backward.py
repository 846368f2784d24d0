"""Clip each gradient in the backward pass, as soon as it is final, and step its parameter there.

Where the optimizer steps beside it (as in torch's tutorial "How to save memory by fusing the
optimizer step into the backward pass"), each gradient is freed before the next one is computed.

A mode decides about a part of the gradients without the others (``ModeInfo.by_tensor``): one
gradient in one process, a block under ``fully_shard``. What telemetry reports of a step is added up
while its parts pass; the numbers of a part are those of all ranks already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from runner.booster.fused import match_strides
from runner.booster.optimizers import AT_ONCE, computes_from_all
from runner.booster.step_order import StepOrder, StepOrderError
from runner.clip import ClipMode, Decision, Layout, Number, transfer
from runner.clip.decision import Parts
from runner.clip.norms import Powers, combine
from runner.config.schema import refusals


class InBackward:
    """Clips, and steps where asked, what becomes final in a backward pass.

    Attributes:
        began: whether parts of this step were clipped.
        powers: see :class:`runner.clip.GradStats`; of the step that was finished last.
    """

    def __init__(
        self,
        order: StepOrder,
        optimizers: Sequence[Optimizer],
        mode: ClipMode,
        *,
        steps: bool,
        each: bool,
    ) -> None:
        self.mode, self.steps, self._each = mode, steps, each
        self._layout, self._optimizers, self._order = order.layout, optimizers, ref(order)
        self._names = {id(shard.param): shard.name for shard in order.layout.shards}
        self._known: dict[tuple[str, ...], tuple[Layout, ClipMode]] = {}
        self.powers: Powers | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self.began, self._waits = False, False
        self._broken = False  # whether the host knows of a gradient that is not finite
        self._done: set[str] = set()
        self._found: list[Decision] = []
        self._powers: list[Powers] = []
        self._history: dict[str, Number] = {}

    def callback(self) -> Callable[[Sequence[Tensor]], None]:
        """Return a function for hooks, which live as long as their parameters."""
        weak = ref(self)

        def final(parameters: Sequence[Tensor]) -> None:
            found = weak()
            order = None if found is None else found._order()
            if found is not None and order is not None and not order.accumulating:
                found.clip(parameters)

        return final

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor]) -> None:
        """Clip parameters whose gradients have become final, and step them where asked."""
        if not (self.began or self._waits):
            self._waits = not self.mode.ready_for_parts()
            self.began, self._history = not self._waits, dict(self.mode.history)
            self._require_no_step_hooks()
        if self._waits:
            return
        names = tuple(self._names[id(p)] for p in parameters if id(p) in self._names)
        if twice := self._done.intersection(names):
            raise StepOrderError(
                f"the gradient of {min(twice)} was clipped already: with clip.when=backward a step "
                "has one backward pass outside of no_sync, which accumulates each gradient once "
                "(torch.utils.checkpoint with use_reentrant=False)"
            )
        self._clip(names)

    def _require_no_step_hooks(self) -> None:
        hooks = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        for each in self._optimizers:
            hooks += [each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks]
        if self.steps and any(hooks):
            raise StepOrderError(
                "an optimizer has hooks of register_step_pre_hook or register_step_post_hook, "
                "which run once a step: with clip.step_in_backward=true it steps part by part"
            )

    def _clip(self, names: tuple[str, ...]) -> None:
        """Measure, decide and apply; the step follows while the gradients are in a cache."""
        if not names:
            return
        self._done.update(names)
        if names not in self._known:
            own = self._layout.restricted(names)
            self._known[names] = own, self.mode.of_part(own)
        layout, mode = self._known[names]
        stats = mode.measure(layout, self._each)
        self._broken |= stats.finite is False
        decision = mode.clip(layout, stats)
        self._found.append(decision)
        if stats.powers is not None:
            self._powers.append(stats.powers)
        if not self.steps or self._broken:
            return
        if decision.update is not None:
            mode.before_step(layout, decision)
        match_strides(layout)
        wanted = {id(shard.param) for shard in layout.shards}
        for optimizer in self._optimizers:
            held = [group["params"] for group in optimizer.param_groups]
            try:
                for group in optimizer.param_groups:
                    group["params"] = [p for p in group["params"] if id(p) in wanted]
                if any(group["params"] for group in optimizer.param_groups):
                    optimizer.step()
            finally:
                for group, parameters in zip(optimizer.param_groups, held, strict=True):
                    group["params"] = parameters
        if decision.update is not None:
            mode.after_step(layout, decision)
        for shard in layout.shards:
            shard.param.grad = None

    @torch.no_grad()
    def finish(self) -> Number:
        """Clip, and step, what no hook has told of; return ‖G‖, the same on every rank."""
        whole = self._layout
        rest = [s for s in whole.shards if s.name not in self._done and s.param.requires_grad]
        # Ranks wait for each other, also where this one has no gradient.
        waits = whole.group is not None
        self._clip(tuple(s.name for s in rest if waits or s.param.grad is not None))
        self.powers = None
        if self._powers:
            wide = transfer.widest(whole.device)
            each = torch.cat([torch.as_tensor(own.each, dtype=wide) for own in self._powers])
            shards = [*chain.from_iterable(own.shards for own in self._powers)]
            self.powers = Powers(shards, each, self.mode.norm_type)
        return self._total([own.norm for own in self._found])

    def decide(self, norm: Number, finite: bool | Tensor) -> Decision:
        self.mode.end_parts()
        self.mode.undo(self._history, finite)
        if finite is False:
            return Decision.skipped(norm, self.mode.threshold)
        found = self._found
        changed: Number = sum((own.fraction * own.total for own in found), 0.0)
        total: Number = sum((own.total for own in found), 0.0)
        after = self._total([own.norm_clipped for own in found])
        p, kind = self.mode.norm_type, self.mode.info.clips
        power = after if math.isinf(p) else after**p
        most = norm if kind is None else combine([own.max_stat for own in found] or [0.0], math.inf)
        threshold = found[0].threshold if found else math.nan
        whole = Decision.change_parts(norm, threshold, most, Parts(changed, total, (), power))
        here = Layout((), elsewhere=self._layout.device.type)  # of no other rank
        done = replace(whole, finite=finite).complete(here, p)
        if kind != "updates":
            return done
        return replace(done, coef=-combine([-own.coef for own in found], math.inf))

    def _total(self, norms: Sequence[Number]) -> Number:
        p = self.mode.norm_type
        if math.isinf(p):
            return combine(norms or [0.0], p)
        powers: Number = sum((norm**p for norm in norms), 0.0)
        return combine([powers], p)


def require_possible(
    mode: ClipMode, optimizers: Sequence[Optimizer], options: Mapping[str, Any]
) -> None:
    """Check that gradients can be clipped in the backward pass."""
    found = [f"{key}: {why}" for key, why in refusals(type(mode), vars(mode), **options)]
    found += filter(None, map(why_not_in_parts, optimizers if options["step"] else ()))
    if found:
        raise ValueError(f"clipping in the backward pass: {found[0]}")


def why_not_in_parts(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot step one parameter after the other; empty if it can."""
    if not computes_from_all(optimizer, AT_ONCE):
        return ""
    return (
        f"{type(optimizer).__name__} cannot step one parameter after the other: use "
        "clip.step_in_backward=false, or another optimizer"
    )
