"""Clip each gradient in the backward pass, as soon as it is final, and step its parameter there.

As in torch's tutorial "How to save memory by fusing the optimizer step into the backward pass". In
one process, with modes that need no other gradient (``ModeInfo.by_tensor``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.booster.optimizers import AT_ONCE, computes_from_all, match_strides
from runner.booster.step_order import StepOrder, StepOrderError
from runner.clip import ClipMode, Decision, Layout, Number, transfer
from runner.clip.decision import Parts
from runner.clip.norms import Powers, combine


class InBackward:
    """Clips, and steps where asked, what becomes final in a backward pass."""

    def __init__(
        self,
        order: StepOrder,
        optimizers: Sequence[Optimizer],
        mode: ClipMode,
        steps: bool,
        each: bool,
    ) -> None:
        self.mode, self.steps, self._each = mode, steps, each
        self._layout, self._optimizers = order.layout, optimizers
        self._order = ref(order)  # ``order`` owns this object, and both end with it
        self._names = {id(shard.param): shard.name for shard in order.layout.shards}
        self._parts: dict[str, tuple[Layout, ClipMode]] = {}
        self.powers: Powers | None = None  # of the step that was finished last
        self.begin_step()

    def begin_step(self) -> None:
        self.began: bool | None = None  # whether gradients of this step are clipped, once asked
        self._broken = False  # whether the host knows of a gradient that is not finite
        self._found: dict[str, Decision] = {}
        self._powers: list[Powers] = []
        self._history: dict[str, Number] = {}

    def callback(self) -> Callable[[Tensor], None]:
        weak = ref(self)  # A hook lives as long as its parameter.

        def final(parameter: Tensor) -> None:
            order = None if (found := weak()) is None else found._order()
            if found is not None and order is not None and not order.accumulating:
                found.clip(parameter)

        return final

    @torch.no_grad()
    def clip(self, parameter: Tensor) -> None:
        """Clip a gradient that has become final."""
        if self.began is None:
            self.began, self._history = self.mode.ready_for_parts(), dict(self.mode.history)
        if not self.began or (name := self._names.get(id(parameter))) is None:
            return
        if name in self._found:
            raise StepOrderError(
                f"the gradient of {name} was clipped already: with clip.when=backward a step "
                "has one backward pass outside of no_sync, which accumulates each gradient once "
                "(torch.utils.checkpoint with use_reentrant=False)"
            )
        self._clip(name, parameter)

    def _clip(self, name: str, parameter: Tensor) -> None:
        """Measure, decide and apply; the step follows while the gradient is in a cache."""
        if name not in self._parts:
            own = self._layout.restricted([name])
            self._parts[name] = own, self.mode.of_part(own)
        layout, mode = self._parts[name]
        stats = mode.measure(layout, self._each)
        self._broken |= stats.finite is False
        decision = mode.clip(layout, stats)
        self._found[name] = decision
        if stats.powers is not None:
            self._powers.append(stats.powers)
        if not self.steps or self._broken:
            return
        if decision.update is not None:
            mode.before_step(layout, decision)
        match_strides(layout)
        for optimizer in self._optimizers:
            groups, held = optimizer.param_groups, [g["params"] for g in optimizer.param_groups]
            try:
                for group in groups:
                    group["params"] = [p for p in group["params"] if p is parameter]
                if any(group["params"] for group in groups):
                    optimizer.step()
            finally:
                for group, parameters in zip(groups, held, strict=True):
                    group["params"] = parameters
        if decision.update is not None:
            mode.after_step(layout, decision)
        parameter.grad = None

    @torch.no_grad()
    def finish(self) -> Number:
        """Clip, and step, what no hook has told of; return ‖G‖."""
        for shard in self._layout.shards:
            trained = shard.param.requires_grad and shard.param.grad is not None
            if trained and shard.name not in self._found:
                self._clip(shard.name, shard.param)
        wide, found = transfer.widest(self._layout.device), self._powers
        each = [torch.as_tensor(own.each, dtype=wide) for own in found]
        shards = [shard for own in found for shard in own.shards]
        self.powers = Powers(shards, torch.cat(each), self.mode.norm_type) if found else None
        return self._total([own.norm for own in self._found.values()])

    def decide(self, norm: Number, finite: bool | Tensor) -> Decision:
        self.mode.end_parts()
        self.mode.undo(self._history, finite)
        if finite is False:
            return Decision.skipped(norm, self.mode.threshold)
        found, p, kind = [*self._found.values()], self.mode.norm_type, self.mode.info.clips
        changed: Number = sum((own.fraction * own.total for own in found), 0.0)
        total: Number = sum((own.total for own in found), 0.0)
        after = self._total([own.norm_clipped for own in found])
        parts = Parts(changed, total, (), after if math.isinf(p) else after**p)
        most = norm if kind is None else combine([own.max_stat for own in found] or [0.0], math.inf)
        threshold = found[0].threshold if found else math.nan
        whole = replace(Decision.change_parts(norm, threshold, most, parts), finite=finite)
        done = whole.complete(self._layout, p)
        if kind != "updates":
            return done
        return replace(done, coef=-combine([-own.coef for own in found], math.inf))

    def _total(self, norms: Sequence[Number]) -> Number:
        p = self.mode.norm_type
        if math.isinf(p):
            return combine(norms or [0.0], p)
        powers: Number = sum((norm**p for norm in norms), 0.0)
        return combine([powers], p)


def why_not_in_parts(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot step one parameter after the other; empty if it can."""
    if not computes_from_all(optimizer, AT_ONCE):
        return ""
    return (
        f"{type(optimizer).__name__} cannot step one parameter after the other: use "
        "clip.step_in_backward=false, or another optimizer"
    )
