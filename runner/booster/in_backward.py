"""Clip each gradient in the backward pass, as soon as it is final, and step its parameter there.

The gradient is still in a cache then. Where the optimizer steps beside it (as in torch's tutorial
"How to save memory by fusing the optimizer step into the backward pass"), each gradient is freed
before the next one is computed: the memory of one gradient instead of that of all.

A mode decides about a part of the gradients without the others (``ModeInfo.by_tensor``). A part is
one gradient in one process, a bucket under DDP, and a block under ``fully_shard``. What telemetry
reports of a step is added up while its parts pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from runner.booster.fused import match_strides
from runner.booster.optimizer_trial import TOLERANCE, error_of_parts
from runner.booster.step_order import StepOrderError
from runner.clip import ClipMode, Decision, Layout, Number, transfer
from runner.clip.decision import Parts
from runner.clip.norms import Powers, combine
from runner.config.schema import refusals

Names = tuple[str, ...]
"""Names of parameters that become final together."""

NOT_FINAL = (
    "clipping in the backward pass works with SinglePlugin, TorchDDPPlugin and TorchFSDPPlugin: "
    "the gradients of other plugins become final after the backward pass"
)

INSTEAD = "use clip.step_in_backward=false, or another optimizer"

KEPT = 4096
"""Number of parts that are kept for further steps: others are made anew."""


@dataclass(frozen=True)
class _Part:
    """Parameters that are clipped together.

    Attributes:
        layout: where they live.
        mode: the mode, for these parameters.
        replicas: how many ranks add the same numbers to those of the step.
    """

    layout: Layout
    mode: ClipMode
    replicas: int = 1


class InBackward:
    """Clips, and steps where asked, what becomes final in a backward pass.

    Attributes:
        mode: the mode.
        steps: see above.
        began: whether parts of this step were clipped.
        powers: see :func:`runner.clip.norms.measure`; of the step that was finished last.
    """

    def __init__(
        self,
        layout: Layout,
        optimizers: Sequence[Optimizer],
        mode: ClipMode,
        accumulates: Callable[[], bool],
        *,
        steps: bool = False,
        each: bool = False,
    ) -> None:
        self.mode, self.steps = mode, steps
        self._layout, self._optimizers = layout, optimizers
        self._accumulates, self._each = accumulates, each
        self._names = {id(shard.param): shard.name for shard in layout.shards}
        # Where a mode clips elements, a rank needs nothing of the others before the step ends.
        self._alone = (
            mode.info.clips in (None, "elements")
            and not mode.info.needs_optimizer
            and layout.group is not None
        )
        # Otherwise the numbers of each part are those of all ranks already.
        self._adding = layout if self._alone else Layout((), elsewhere=layout.device.type)
        self._known: dict[Names, tuple[Layout, list[_Part]]] = {}
        self.powers: Powers | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the next step."""
        self.began, self._waits = False, False
        self._broken = False  # whether the host knows of a gradient that is not finite
        self._done: set[str] = set()
        self._found: list[tuple[_Part, Decision]] = []
        self._powers: list[tuple[_Part, Powers]] = []
        self._history: dict[str, Number] = {}

    def callback(self) -> Callable[[Sequence[Tensor]], None]:
        """Return a function for hooks, which live as long as their parameters."""
        weak = ref(self)

        def final(parameters: Sequence[Tensor]) -> None:
            found = weak()
            if found is not None and not found._accumulates():
                found.clip(parameters)

        return final

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor]) -> None:
        """Clip parameters whose gradients have become final, and step them where asked."""
        if not (self.began or self._waits):
            self._begin()
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

    def _begin(self) -> None:
        """Begin the backward pass that makes the gradients of this step final."""
        self._waits = not self.mode.ready_for_parts()
        if self._waits:
            return
        self.began, self._history = True, dict(self.mode.history)
        if not self.steps:
            return
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks or self._hooked():
            raise StepOrderError(
                "an optimizer has hooks of register_step_pre_hook or register_step_post_hook, "
                "which run once a step: with clip.step_in_backward=true it steps part by part"
            )
        # By number: loading a state makes new groups.
        self._places = {
            id(parameter): (which, number)
            for which, optimizer in enumerate(self._optimizers)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def _hooked(self) -> bool:
        return any(
            optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
            for optimizer in self._optimizers
        )

    def _clip(self, names: Names) -> None:
        """Measure, decide and apply; the step follows while the gradients are in a cache."""
        if not names:
            return
        self._done.update(names)
        layout, parts = self._parts(names)
        decision: Decision | None = None
        for part in parts:
            stats = part.mode.measure(part.layout, self._each)
            self._broken |= stats.finite is False
            decision = part.mode.clip(part.layout, stats)
            self._found.append((part, decision))
            if stats.powers is not None:
                self._powers.append((part, stats.powers))
        if self.steps and not self._broken:
            limiting = None
            if decision is not None and decision.update is not None:
                limiting = partial(parts[-1].mode.after_step, layout, decision)
                parts[-1].mode.before_step(layout, decision)
            self._step(layout)
            if limiting is not None:
                limiting()
            for shard in layout.shards:
                shard.param.grad = None

    def _parts(self, names: Names) -> tuple[Layout, list[_Part]]:
        """Return the layout of some parameters, and the parts of it that are clipped together."""
        if names not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            own = self._layout.restricted(names)
            parts = [_Part(own, self.mode.of_part(own))]
            if self._alone:
                parts = [self._of_one(own.restricted([shard.name])) for shard in own.shards]
            self._known[names] = own, parts
        return self._known[names]

    def _of_one(self, layout: Layout) -> _Part:
        """Return the part of one parameter, of which this rank measures its shard."""
        [shard] = layout.shards
        here = Layout([replace(shard, num_replicas=1)], None, layout.heads, layout.parameters)
        return _Part(here, self.mode.of_part(here), shard.num_replicas)

    def _step(self, layout: Layout) -> None:
        """Step some parameters."""
        match_strides(layout)
        stepped: dict[int, dict[int, list[Any]]] = {}
        for shard in layout.shards:
            if (place := self._places.get(id(shard.param))) is not None:
                stepped.setdefault(place[0], {}).setdefault(place[1], []).append(shard.param)
        for which, groups in stepped.items():
            step_some(self._optimizers[which], groups)

    @torch.no_grad()
    def finish(self) -> Number:
        """Clip, and step, what no hook has told of; return ‖G‖, the same on every rank.

        One collective where the mode clips elements and a layout spans ranks.
        """
        whole = self._layout
        self._clip(
            tuple(
                shard.name
                for shard in whole.shards
                if shard.name not in self._done
                and shard.param.requires_grad
                and (whole.group is not None or shard.param.grad is not None)
            )
        )
        self.powers = self._all_powers()
        powers = [self._power(own.norm, part) for part, own in self._found]
        return combine(self._adding.gather([self._sum(powers)])[0], self.mode.norm_type)

    def decide(self, norm: Number, finite: bool | Tensor) -> Decision:
        """Return the decision on all parts; one collective, where :meth:`finish` has one."""
        self.mode.end_parts()
        self.mode.undo(self._history, finite)
        if finite is False:
            return Decision.skipped(norm, self.mode.threshold)
        changed: Number = 0.0
        total: Number = 0.0
        for part, own in self._found:
            changed = changed + own.fraction * own.total / part.replicas
            total = total + own.total / part.replicas
        after = self._sum([self._power(own.norm_clipped, part) for part, own in self._found])
        stats = [own.max_stat for _, own in self._found] or [0.0]
        most = norm if self.mode.info.clips is None else combine(stats, math.inf)
        threshold = self._found[0][1].threshold if self._found else math.nan
        parts = Parts(changed, total, (), after)
        whole = Decision.change_parts(norm, threshold, most, parts)
        done = replace(whole, finite=finite).complete(self._adding, self.mode.norm_type)
        if self.mode.info.clips != "updates":
            return done
        return replace(done, coef=-combine([-own.coef for _, own in self._found], math.inf))

    def _power(self, norm: Number, part: _Part) -> Number:
        """Return the share of a part in ‖G‖^p; its norm for p = inf."""
        p = self.mode.norm_type
        return norm if math.isinf(p) else norm**p / part.replicas

    def _sum(self, powers: Sequence[Number]) -> Number:
        if math.isinf(self.mode.norm_type):
            return combine(powers or [0.0], math.inf)
        total: Number = sum(powers, 0.0)
        return total

    def _all_powers(self) -> Powers | None:
        """Return the share of each gradient of this rank, where parts have measured it."""
        if not self._powers:
            return None
        p, wide, values = self.mode.norm_type, transfer.widest(self._layout.device), []
        for part, own in self._powers:
            each = torch.as_tensor(own.each, dtype=wide)
            values.append(each if math.isinf(p) else each / part.replicas)
        shards = [*chain.from_iterable(own.shards for _, own in self._powers)]
        return Powers(shards, torch.cat(values), p)


def require_possible(
    mode: ClipMode, optimizers: Sequence[Optimizer], *, step: bool, **options: Any
) -> None:
    """Check that gradients can be clipped in the backward pass."""
    for key, why in refusals(type(mode), vars(mode), step=step, **options):
        raise ValueError(f"clipping in the backward pass: {key}: {why}")
    for optimizer in optimizers if step else ():
        if why := why_not_in_parts(optimizer):
            raise ValueError(f"clipping in the backward pass: {why}")


def why_not_in_parts(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot step one parameter after the other; empty if it can."""
    name = type(optimizer).__name__
    try:
        off = error_of_parts(optimizer, step_some)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{name} cannot step one parameter after the other ({first}): {INSTEAD}"
    if off <= TOLERANCE:
        return ""
    return (
        f"{name} takes other steps one parameter after the other than at once (off by {off:.1g} in "
        f"a trial): {INSTEAD}"
    )


def step_some(optimizer: Optimizer, groups: dict[int, list[Any]]) -> None:
    """Step some parameters of an optimizer alone."""
    held = [group["params"] for group in optimizer.param_groups]
    try:
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = groups.get(number, [])
        optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, held, strict=True):
            group["params"] = parameters
