"""The contract of a clipping mode: bind to a layout once, then decide and apply in each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout, Number
from runner.clip.tally import Tally


@dataclass
class ClipMode(ABC):
    """A rule of clipping.

    A subclass implements :meth:`decide_finite`, and :meth:`apply_parts` where it clips elements,
    units or tensors instead of scaling the whole gradient.

    Args:
        threshold: λ, above 0. It may be changed between steps; each step logs the one in force.
        norm_type: p of the total norm that is measured (and that mode ``norm`` limits).
        exclude: globs of parameter names that the mode leaves alone, or ``"auto"``: the weights of
            the model's heads. Used only by modes that clip parameter by parameter.
        eps: lower bound of a weight's norm in adaptive clipping.
        units: globs of parameter names, and the dimension or dimensions of these parameters that
            index outputs, for layers that adaptive clipping does not know; of two globs that match
            a parameter the last one counts. Without any dimension the whole tensor is one unit.

    Attributes:
        history: what the mode remembers of earlier steps, by name: floats, or tensors on the
            device. It starts as ``initial_history``, and holds finite steps only:
            :meth:`decide_finite` replaces values, and what it derives from a gradient that is not
            finite is dropped. Never write into a tensor of it in place.
        tally: counts the elements or units that the mode compares with λ, where it is set.

    Raises:
        ValueError: a threshold that is not above 0, a norm_type below 1, an eps not above 0, units
            that are no dimensions.
    """

    initial_history: ClassVar[Mapping[str, Number]] = {}

    threshold: float | None = None
    norm_type: float = 2.0
    exclude: tuple[str, ...] | str = "auto"
    eps: float = 1e-3
    units: Mapping[str, int | Sequence[int]] = field(default_factory=dict)

    history: dict[str, Number] = field(init=False, repr=False)
    tally: Tally | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.history = dict(self.initial_history)
        if self.threshold is not None and not self.threshold > 0:
            raise ValueError(f"the clipping threshold must be above 0, not {self.threshold}")
        if not self.norm_type >= 1:
            raise ValueError(f"norm_type must be at least 1 (or inf), not {self.norm_type}")
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        for pattern, dims in self.units.items():
            listed = dims if isinstance(dims, list | tuple) else [dims]
            if any(type(dim) is not int for dim in listed):
                raise ValueError(
                    f"units of {pattern} must be the dimension that indexes outputs, or a list of "
                    f"dimensions, not {dims!r}"
                )

    @property
    def limit(self) -> float:
        """λ of a mode that needs one.

        Raises:
            ValueError: no threshold was given.
        """
        if self.threshold is None:
            raise ValueError("this clipping mode needs a threshold")
        return self.threshold

    def bind(self, layout: Layout) -> None:  # noqa: B027 (most modes have nothing to prepare)
        """Prepare for ``layout``, once, before the first step.

        Raises:
            ValueError: the options do not fit the layout (a glob that matches nothing).
        """

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
                self.history[name] = torch.where(stats.finite, value, before[name])
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
            _scale(layout, decision.coef)
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
        measured = GradStats.of(layout, self.norm_type) if stats is None else stats
        return self.apply(layout, self.decide(layout, measured))

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and, where there is one, the history."""
        state: dict[str, Any] = {"threshold": self.threshold}
        return state | {"history": dict(self.history)} if self.history else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.threshold = state["threshold"]
        self.history |= state.get("history", {})


def _scale(layout: Layout, coef: Number) -> None:
    """Multiply all gradients by ``coef``; no collective, every rank has the same one."""
    if not isinstance(coef, Tensor) and coef == 1.0:
        return
    _, gradients = layout.gradients()
    if not gradients:
        return
    if isinstance(coef, Tensor):
        # foreach is fast where the scalar has the gradients' type; a narrower type would round it.
        factor = coef.to(torch.promote_types(gradients[0].dtype, torch.float32))
    else:
        # A tensor as the scalar takes foreach's fast path on a CPU: a third of the time.
        factor = torch.tensor(coef, dtype=torch.float64)
    torch._foreach_mul_(gradients, factor)
