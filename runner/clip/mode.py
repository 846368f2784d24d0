"""The contract of a clipping mode: bind to a layout once, then decide and apply in each step."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
from runner.clip.split import measure_split
from runner.clip.tally import Tally
from runner.clip.transfer import Number
from runner.config.modes import NAMES, Mode
from runner.config.problem import or_list

NEVER = 1e30
"""A finite float32 threshold that no gradient reaches."""

TINY = 1e-30
"""A coefficient below this one is applied in float64."""

_DTYPE = attrgetter("dtype")


@dataclass(eq=False)
class ClipMode(Mode, ABC):
    """A rule of clipping.

    A subclass implements :meth:`decide_finite`, and :meth:`apply_parts` where it clips elements,
    units or tensors instead of scaling the whole gradient. Its options and its ``info`` are
    described in :class:`runner.config.modes.Mode`.

    Attributes:
        history: what the mode remembers of earlier steps, by name: floats, or tensors on the
            device. It starts as ``initial_history``, and holds finite steps only:
            :meth:`decide_finite` replaces values, and what it derives from a gradient that is not
            finite is dropped. Never write into a tensor of it in place.
        tally: counts the elements or units that the mode compares with λ, where it is set.

    Raises:
        ValueError: a threshold that is not above 0, or a norm_type below 1.
    """

    initial_history: ClassVar[Mapping[str, Number]] = {}

    history: dict[str, Number] = field(init=False, repr=False)
    tally: Tally | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold > 0:
            raise ValueError(f"the clipping threshold must be above 0, not {self.threshold}")
        if not self.norm_type >= 1:
            raise ValueError(f"norm_type must be at least 1 (or inf), not {self.norm_type}")
        if self.scales not in ("auto", "all"):
            raise ValueError(f"scales is 'auto' or 'all', not {self.scales!r}")
        self.history = dict(self.initial_history)
        self.info = self.info_with(vars(self))  # type: ignore[misc]  # with these options

    @property
    def limit(self) -> float:
        """λ of a mode that needs one.

        Raises:
            ValueError: no threshold was given.
        """
        if self.threshold is None:
            raise ValueError("this clipping mode needs a threshold")
        return self.threshold

    @property
    def limit_moves(self) -> bool:
        """Whether the λ in force is one of the step, which a skipped step has none of."""
        return self.info.derived

    def bind(self, layout: Layout) -> None:
        """Prepare for ``layout``, once, before the first step.

        Raises:
            ValueError: the options do not fit the layout (a glob that matches nothing).
        """

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that the mode is defined on these optimizers, before there is a layout.

        Raises:
            OptimizerMisfit: it is not; the message says what to choose instead.
        """

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Prepare for the optimizers that take the steps, once, after :meth:`bind`.

        Modes whose ``info.needs_optimizer`` is set read their state or limit their updates. All
        ranks call this together.

        Args:
            optimizers: optimizers of this rank, before or after their first step.
            layout: the layout this mode was bound to.

        Raises:
            OptimizerMisfit: see :meth:`require_optimizers`.
        """
        self.require_optimizers(optimizers)

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure the final gradients of ``layout``; the host does not wait for an accelerator.

        A mode may measure what it decides by in the same read, and leave it in ``work``.

        Args:
            layout: see :meth:`decide`.
            each: whether the share of each gradient in the norm is wanted too.
        """
        return GradStats.of(layout, self.norm_type, each, self.scales_some(layout))

    def scales_some(self, layout: Layout) -> bool:
        """Return whether a coefficient of this mode multiplies some gradients of ``layout`` only.

        It leaves out those of :meth:`Layout.leave_unscaled`, unless option ``scales`` is ``all``.
        They count in ‖G‖, but not in the norm that is compared with λ: no coefficient would bring a
        norm that contains them to λ, and their size would decide how far others are scaled down.
        """
        return layout.partly_scaled and self.scales == "auto" and self.info.parts is None

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide what to do to the gradients of ``layout``, without changing them.

        The host does not wait for an accelerator. A step that is not finite is skipped, and leaves
        ``history`` as it was. Where only some gradients are multiplied (:meth:`scales_some`),
        :meth:`decide_finite` decides by their norm, as if there were no others.

        Args:
            layout: the layout this mode was bound to. Gradients are final: synchronised, unscaled,
                divided by the items of the window.
            stats: what was measured of them.
        """
        if stats.finite is False:
            # A limit that follows from earlier steps is that of no step but its own.
            return Decision.skipped(stats.norm, None if self.limit_moves else self.threshold)
        before = dict(self.history)
        decision = self._decide_finite(layout, stats)
        if self.tally is not None:
            self.tally.end_step(stats.norm)
        if not isinstance(stats.finite, Tensor):
            return decision
        self.undo(before, stats.finite)
        if self.limit_moves and not isinstance(decision.threshold, Tensor):
            # A history that was loaded consists of floats until the device has taken a step.
            moved = _where(stats.finite, decision.threshold, math.nan)
            decision = replace(decision, threshold=moved)
        return decision.where(stats.finite)

    def undo(self, before: Mapping[str, Number], finite: bool | Tensor) -> None:
        """Make ``before`` the history again, unless the gradient turns out to be ``finite``."""
        for name, value in self.history.items():
            if finite is not True and value is not before[name]:
                old = before[name]
                self.history[name] = old if finite is False else _where(finite, value, old)

    def of_part(self, layout: Layout) -> ClipMode:
        """Return this mode for a part of the layout that it is bound to, with the same history.

        For modes with ``info.by_tensor``, which clip in the backward pass: in each step the parts
        decide one after the other, and then :meth:`end_parts` is called. A step that is not finite
        is taken back by :meth:`undo`.

        Args:
            layout: some parameters of the layout that this mode is bound to. Without a group, where
                a mode clips elements: what the parts of other ranks add is added up later.
        """
        made = copy.copy(self)
        made.bind(layout)
        return made

    def ready_for_parts(self) -> bool:
        """Return whether parts may decide in this step; the same on every rank."""
        return True

    def end_parts(self) -> None:
        """Note that all parts have decided, once a step."""

    def _decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        if stats.part or not self.scales_some(layout):
            return self.decide_finite(layout, stats)
        split = stats.split or measure_split(layout, self.norm_type)[1]
        own = replace(stats, norm=split.scaled, split=None, part=True)
        return self.decide_finite(layout, own).of_whole(stats.norm, split, self.norm_type)

    @abstractmethod
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide for a gradient that is finite.

        On an accelerator it may turn out not to be: decision and history are then dropped. Ranks
        hold the same ``stats``, and have to make the same decision.

        Args:
            layout: see :meth:`decide`.
            stats: see :meth:`decide`.
        """

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        """Change the gradients in place, as decided.

        Returns:
            The decision, completed with what is known only after clipping. The same object where
            it is one coefficient.
        """
        if decision.finite is False:
            return decision
        if decision.scales is not None:
            scale_each(layout, decision.scales)
            return replace(decision, scales=None)
        if decision.parts is None:
            if decision.factor is None:
                scale(layout, decision.coef)
            else:
                scale(layout, decision.factor, some=True)
            return decision
        return self.change_parts(layout, decision)

    def change_parts(self, layout: Layout, decision: Decision) -> Decision:
        """Change the parts of ``decision`` in place, and return the completed decision."""
        self.apply_parts(decision)
        return decision.complete(layout, self.norm_type)

    @property
    def may_fold(self) -> bool:
        """Whether an optimizer's step may multiply gradients by the coefficient of a decision.

        So for a mode that clips as this class does.
        """
        kind = type(self)
        return kind.clip is ClipMode.clip and kind.apply is ClipMode.apply

    def decides_by(self, stats: GradStats) -> bool:
        """Return whether ``stats`` of another mode are enough, without reading the gradients.

        So for a mode that needs ‖G‖ alone, and scales the whole gradient.
        """
        kind = type(self)
        return kind.measure is ClipMode.measure and kind.apply_parts is ClipMode.apply_parts

    def apply_parts(self, decision: Decision) -> None:
        """Change the parts of ``decision`` in place, for a mode that decides on parts."""
        raise TypeError(f"{type(self).__name__} decides on parts, so it needs apply_parts")

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Prepare to limit the update of a step that is about to be taken.

        The optimizer wrapper calls it where ``decision.update`` is not None. On an accelerator the
        step may turn out to be skipped: parameters and optimizer state are then unchanged.

        Args:
            layout: see :meth:`decide`.
            decision: what :meth:`clip` returned.
        """

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Limit the update of the step that was taken; no parameter was broadcast to others yet.

        Args:
            layout: see :meth:`decide`.
            decision: see :meth:`before_step`.

        Returns:
            The decision, completed with what is known only after the step.
        """
        return decision

    def clip(self, layout: Layout, stats: GradStats | None = None) -> Decision:
        """Decide and apply.

        Args:
            layout: see :meth:`decide`.
            stats: what was measured of its gradients; measured here by default.
        """
        measured = self.measure(layout) if stats is None else stats
        return self.apply(layout, self.decide(layout, measured))

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and, where there is one, the history."""
        state: dict[str, Any] = {"threshold": self.threshold}
        return state | {"history": dict(self.history)} if self.history else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a state without a threshold leaves it as it is."""
        self.threshold = state.get("threshold", self.threshold)
        for name, value in state.get("history", {}).items():
            # An accelerator's history may go on on a host, where single numbers are floats.
            single = isinstance(value, Tensor) and not value.ndim
            self.history[name] = float(value) if single else value


def build(mode: str | type[Mode], **options: Any) -> ClipMode:
    """Make a clipping mode.

    Args:
        mode: one of :data:`runner.config.modes.NAMES`, made by ``runner/clip/<mode>.py``; or a
            class of your own.
        options: options of the mode: ``threshold``, ``norm_type``, and its own.

    Raises:
        ValueError: there is no such mode, it has no such option, or an option is out of range.
    """
    if isinstance(mode, str) and mode not in NAMES:
        raise ValueError(f"unknown clipping mode {mode!r}: use {or_list(NAMES)}")
    kind: Any = import_module(f"runner.clip.{mode}").MODE if isinstance(mode, str) else mode
    known = [one.name for one in fields(kind) if one.init]
    if unknown := [name for name in options if name not in known]:
        name = mode if isinstance(mode, str) else mode.__name__
        raise ValueError(f"mode {name} has no option {unknown[0]}: it has {', '.join(known)}")
    made: ClipMode = kind(**options)
    return made


def _where(finite: Tensor, new: Number, old: Number) -> Tensor:
    """Return ``new`` where ``finite`` holds, else ``old``; floats in the widest type there is."""
    wide, device = transfer.widest(finite.device), finite.device
    new, old = (
        value if isinstance(value, Tensor) else torch.full((), value, dtype=wide, device=device)
        for value in (new, old)
    )
    return torch.where(finite, new, old)


def scale(layout: Layout, coef: Number, some: bool = False) -> None:
    """Multiply gradients by ``coef``; no collective, every rank has the same one.

    Args:
        layout: where the gradients live.
        coef: their factor.
        some: whether to leave out those that :meth:`Layout.leave_unscaled` named.
    """
    if not isinstance(coef, Tensor) and coef == 1.0:
        return
    if some:
        pairs = zip(*layout.gradients(), strict=True)
        multiply([gradient for shard, gradient in pairs if shard.scaled], coef)
        return
    multiply(layout.gradients()[1], coef)


def scale_each(layout: Layout, scales: Tensor) -> None:
    """Multiply the gradient of each parameter by its own factor; no collective.

    Args:
        layout: where the gradients live.
        scales: factor of each of ``layout.names``, [parameters], the same on every rank.
    """
    shards, gradients = layout.gradients()
    at = [layout.positions[shard.name] for shard in shards]
    if not transfer.can_read(layout.device):
        each = scales.unbind()
        if gradients:
            torch._foreach_mul_(gradients, [each[i] for i in at])
        return
    coefs: list[float] = scales.tolist()
    changed = [(g, coefs[i]) for g, i in zip(gradients, at, strict=True) if coefs[i] != 1.0]
    ordinary = [(gradient, coef) for gradient, coef in changed if coef > TINY]
    if ordinary:
        torch._foreach_mul_(*map(list, zip(*ordinary, strict=True)))
    for gradient, coef in changed:
        if not coef > TINY:
            multiply([gradient], coef)


def multiply(gradients: list[Tensor], coef: Number) -> None:
    """Multiply tensors on one device by ``coef`` in place."""
    if not gradients:
        return
    # A tensor of the gradients' type takes foreach's fast path; a narrower one would be rounded.
    dtypes = {*map(_DTYPE, gradients)}
    dtype = torch.promote_types(dtypes.pop(), torch.float32) if len(dtypes) == 1 else torch.float64
    if isinstance(coef, Tensor):
        factor = coef.to(dtype)
    else:
        factor = torch.tensor(coef, dtype=dtype if coef > TINY else torch.float64)
    torch._foreach_mul_(gradients, factor)
