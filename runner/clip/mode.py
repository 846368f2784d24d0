"""The contract of a clipping mode: bind to a layout once, then decide and apply in each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
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
        self.history = dict(self.initial_history)

    @property
    def limit(self) -> float:
        """λ of a mode that needs one.

        Raises:
            ValueError: no threshold was given.
        """
        if self.threshold is None:
            raise ValueError("this clipping mode needs a threshold")
        return self.threshold

    def bind(self, layout: Layout) -> None:
        """Prepare for ``layout``, once, before the first step.

        Raises:
            ValueError: the options do not fit the layout (a glob that matches nothing).
        """

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure the final gradients of ``layout``; the host does not wait for an accelerator.

        A mode may measure what it decides by in the same read, and leave it in ``work``.

        Args:
            layout: see :meth:`decide`.
            each: whether the share of each gradient in the norm is wanted too.
        """
        return GradStats.of(layout, self.norm_type, each)

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide what to do to the gradients of ``layout``, without changing them.

        The host does not wait for an accelerator. A step that is not finite is skipped, and leaves
        ``history`` as it was.

        Args:
            layout: the layout this mode was bound to. Gradients are final: synchronised, unscaled,
                divided by the items of the window.
            stats: what was measured of them.
        """
        if stats.finite is False:
            return Decision.skipped(stats.norm, self.threshold)
        before = dict(self.history)
        decision = self.decide_finite(layout, stats)
        if self.tally is not None:
            self.tally.end_step(stats.norm)
        if not isinstance(stats.finite, Tensor):
            return decision
        for name, value in self.history.items():
            if value is not before[name]:
                self.history[name] = _where(stats.finite, value, before[name])
        return decision.where(stats.finite)

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
            it has no parts.
        """
        if decision.finite is False:
            return decision
        if decision.parts is None:
            scale(layout, decision.coef)
            return decision
        self.apply_parts(decision)
        return decision.complete(layout, self.norm_type)

    def apply_parts(self, decision: Decision) -> None:
        """Change the parts of ``decision`` in place, for a mode that decides on parts."""
        raise TypeError(f"{type(self).__name__} decides on parts, so it needs apply_parts")

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
        """Load what :meth:`state_dict` returned."""
        self.threshold = state["threshold"]
        self.history |= state.get("history", {})


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


def scale(layout: Layout, coef: Number) -> None:
    """Multiply all gradients by ``coef``; no collective, every rank has the same one."""
    if not isinstance(coef, Tensor) and coef == 1.0:
        return
    parts = None if layout.flat is None else layout.flat.parts(writes=True)
    multiply(layout.gradients()[1] if parts is None else parts, coef)


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
