"""Clip each gradient in the backward pass, as soon as it is final, and step its parameter there.

As in torch's tutorial "How to save memory by fusing the optimizer step into the backward pass". In
one process, with modes that need no other gradient (``ModeInfo.by_tensor``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.booster.optimizers import AT_ONCE, computes_from_all, match_strides
from runner.booster.step_order import StepOrder, StepOrderError
from runner.clip import Change, ClipMode, Decision
from runner.clip.groups import mode_of_parameter
from runner.config.modes import MODES
from runner.config.problem import or_list
from runner.gradients import Layout, ParamShard, transfer
from runner.gradients.norms import FALSE, Norms, combine_norms, is_finite


def refused_in_backward(
    mode: ClipMode, *, step: bool, nonfinite: str, fp16: bool, skip: bool
) -> Iterator[tuple[str, str]]:
    """Yield keys that do not go with clipping in the backward pass, each with the reason.

    Args:
        mode: the clipping mode.
        step: whether the backward pass steps the parameters too.
        nonfinite: what happens to a step that is not finite.
        fp16: whether the loss is scaled.
        skip: whether a rule skips steps that are spikes.
    """
    waits_for = mode.waits_for()
    if waits_for:
        names = [name for name, kind in MODES.items() if kind.info.by_tensor]
        text = f"this mode {waits_for}: use step; backward goes with clip={or_list(names)}"
        yield "clip.when", text
    if fp16:
        reason = "an overflow leaves out a whole step: use bf16, fp32 or clip.when=step"
        yield "precision.name", reason
    if nonfinite == "ignore":
        yield "clip.nonfinite", "clips before all gradients are known: use error or skip"
    if nonfinite == "skip" and step:
        yield "clip.nonfinite", "a step in the backward pass cannot be taken back: use error"
    if skip:
        reason = "a spike is known after the backward pass: use null or clip.when=step"
        yield "clip.skip.rule", reason
    if mode.info.clips == "updates" and not step:
        yield "clip.step_in_backward", "this mode limits the step itself: use true"


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
        self.mode = mode
        self.steps = steps
        self._each = each
        self._layout = order.layout
        self._optimizers = optimizers
        self._order = ref(order)  # ``order`` owns this object, and both end with it
        self._names = {id(shard.param): shard.name for shard in order.layout.shards}
        self._parts: dict[str, tuple[Layout, ClipMode]] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what was clipped in the last step."""
        self.began: bool | None = None  # whether gradients of this step are clipped, once asked
        self._broken = False  # whether the host knows of a gradient that is not finite
        self._decisions: dict[str, Decision] = {}
        self._shares: list[tuple[Sequence[ParamShard], Tensor]] = []
        self._memory: dict[str, Any] = {}

    def callback(self) -> Callable[[Tensor], None]:
        """Return a hook for parameters, which clips a gradient once it is accumulated."""
        weak = ref(self)  # A hook lives as long as its parameter.

        def final(parameter: Tensor) -> None:
            clipper = weak()
            order = None if clipper is None else clipper._order()
            if clipper is not None and order is not None and not order.accumulating:
                clipper.clip(parameter)

        return final

    @torch.no_grad()
    def clip(self, parameter: Tensor) -> None:
        """Clip a gradient that has become final."""
        if self.began is None:
            self.began = self.mode.ready_for_parts()
            self._memory = dict(self.mode.memory)
        name = self._names.get(id(parameter))
        if not self.began or name is None:
            return
        if name in self._decisions:
            raise StepOrderError(
                f"the gradient of {name} was clipped already: with clip.when=backward a step "
                "has one backward pass outside of no_sync, which accumulates each gradient once "
                "(torch.utils.checkpoint with use_reentrant=False)"
            )
        self._clip(name, parameter)

    def _clip(self, name: str, parameter: Tensor) -> None:
        """Measure, decide and apply; the step follows while the gradient is in a cache."""
        if name not in self._parts:
            part = self._layout.restricted([name])
            self._parts[name] = part, mode_of_parameter(self.mode, part)
        layout, mode = self._parts[name]
        norms = mode.measure(layout, self._each)
        self._broken = self._broken or norms.finite is FALSE
        decision = mode.clip(layout, norms)
        self._decisions[name] = decision
        if norms.shares is not None:
            self._shares.append((norms.shards, norms.shares))
        if not self.steps or self._broken:
            return
        if decision.update is not None:
            mode.before_step(layout, decision)
        match_strides(layout)
        for optimizer in self._optimizers:
            _step_one(optimizer, parameter)
        if decision.update is not None:
            mode.after_step(layout, decision)
        parameter.grad = None

    @torch.no_grad()
    def finish(self) -> Norms:
        """Clip, and step, gradients for which no hook was called; return the norms of all."""
        for shard in self._layout.shards:
            trained = shard.param.requires_grad and shard.param.grad is not None
            if trained and shard.name not in self._decisions:
                self._clip(shard.name, shard.param)
        total = self._total([decision.norm for decision in self._decisions.values()])
        norms = Norms(total, is_finite(total), self.mode.norm_type)
        if self._shares:
            norms.shards = [shard for shards, _ in self._shares for shard in shards]
            norms.shares = torch.cat([shares.to(total) for _, shares in self._shares])
        return norms

    def decide(self, norms: Norms) -> Decision:
        """Return what the backward pass did to the whole gradient.

        Args:
            norms: what was measured of the gradients before clipping.
        """
        norm = norms.total
        finite = norms.finite
        self.mode.end_parts()
        self.mode.undo(self._memory, finite)
        if transfer.can_read(finite.device) and not finite:
            return Decision.skipped(norm, self.mode.threshold)
        p = self.mode.norm_type
        clips = self.mode.info.clips
        threshold = None if clips is None else self.mode.threshold
        decisions = self._of_clipped()
        change = self._change(norm, decisions)
        whole = Decision.of_change(self._layout, norm, threshold, change, p).if_finite(finite)
        if clips != "updates":
            return whole
        smallest = torch.stack([decision.coef for decision in decisions]).amin()
        return replace(whole, factor=smallest)

    def _of_clipped(self) -> list[Decision]:
        """Return the decisions of parameters in no group that is left out."""
        decisions = []
        for name, decision in self._decisions.items():
            _, mode = self._parts[name]
            if mode.info.clips == self.mode.info.clips:
                decisions.append(decision)
        return decisions

    def _change(self, norm: Tensor, decisions: Sequence[Decision]) -> Change:
        """Add up what was changed of each parameter."""
        p = self.mode.norm_type
        after = self._total([decision.norm_clipped for decision in self._decisions.values()])
        nothing = torch.zeros_like(norm)
        changed = [decision.fraction * decision.total for decision in decisions]
        totals = [nothing + decision.total for decision in decisions]
        max_stat = norm
        if self.mode.info.clips is not None:
            max_stats = [decision.max_stat for decision in decisions]
            max_stat = torch.stack([nothing, *max_stats]).amax()
        return Change(
            changed=torch.stack([nothing, *changed]).sum(),
            total=torch.stack([nothing, *totals]).sum(),
            max_stat=max_stat,
            power=after if math.isinf(p) else after**p,
        )

    def _total(self, norms: Sequence[Tensor]) -> Tensor:
        return combine_norms([self._layout.number(0.0), *norms], self.mode.norm_type)


def _step_one(optimizer: Optimizer, parameter: Tensor) -> None:
    """Step one parameter, if the optimizer has it."""
    groups = optimizer.param_groups
    of_groups = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [p for p in group["params"] if p is parameter]
        if any(group["params"] for group in groups):
            optimizer.step()
    finally:
        for group, parameters in zip(groups, of_groups, strict=True):
            group["params"] = parameters


def why_not_in_parts(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot step one parameter after the other; empty if it can."""
    if not computes_from_all(optimizer, AT_ONCE):
        return ""
    return (
        f"{type(optimizer).__name__} cannot step one parameter after the other: use "
        "clip.step_in_backward=false, or another optimizer"
    )
