"""The contract of a clipping mode: bind to a layout once, then decide and apply in each step."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.clip.decision import Change, Decision, limit_in_force
from runner.config import modes
from runner.config.modes import MODES, NAMES, Mode, checked
from runner.config.problem import did_you_mean, or_list
from runner.gradients import transfer
from runner.gradients.kernels import kernels_of
from runner.gradients.layout import Layout
from runner.gradients.norms import FALSE, TRUE, Norms

NEVER = 1e30  # A finite float32 threshold that no gradient reaches
_CLASSES: Mapping[type[Mode], str] = {
    modes.AdaGC: "per_parameter.AdaGCClip",
    modes.Adaptive: "adaptive.AdaptiveClip",
    modes.ByGroups: "nested.GroupsClip",
    modes.Chain: "nested.ChainClip",
    modes.Norm: "norm.NormClip",
    modes.PerParameter: "per_parameter.PerParameterClip",
    modes.Percentile: "norm.PercentileClip",
    modes.Schedule: "nested.ScheduleClip",
    modes.Spike: "second_moment.SpikeClip",
    modes.Unclipped: "norm.NoClip",
    modes.Update: "second_moment.UpdateClip",
    modes.Value: "value.ValueClip",
    modes.ZScore: "norm.ZScoreClip",
}


@dataclass(eq=False)
class ClipMode(Mode, ABC):
    """A rule of clipping: from norms and what it remembers to clipped gradients.

    It is of one of two kinds: a :class:`FactorMode` decides on factors of the gradients, and a
    :class:`ChangeMode` changes elements or units itself. Options and ``info`` are described in
    :class:`runner.config.mode.Mode`.

    Attributes:
        memory: what the mode remembers of earlier steps, by name: tensors on the device. It
            starts as ``initial_memory``, and holds finite steps only: a mode replaces values, and
            what it derives from a gradient that is not finite is dropped. Never write into a
            tensor of it in place.
        tally: counts the elements or units that the mode compares with λ, where it is set: a
            :class:`runner.calibrate.calibrate.Tally`.
    """

    initial_memory: ClassVar[Mapping[str, float]] = {}

    memory: dict[str, Any] = field(init=False, repr=False)
    tally: Any = field(default=None, init=False, repr=False)
    _limit: Tensor | None = field(default=None, init=False, repr=False)
    _limit_of: float | None = field(default=None, init=False, repr=False)

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "initial_history"):
            raise TypeError(
                f"{cls.__name__}: initial_history is called initial_memory, and history memory"
            )
        if hasattr(cls, "apply_parts"):
            raise TypeError(
                f"{cls.__name__}: apply_parts has become change: derive the class from ChangeMode"
            )
        if hasattr(cls, "decide_finite") and not hasattr(cls, "decide"):
            raise TypeError(f"{cls.__name__} decides on factors: derive the class from FactorMode")

    def __post_init__(self) -> None:
        # A class that is called directly has options that nothing has validated.
        if self.threshold is not None and not self.threshold > 0:
            raise ValueError(f"the clipping threshold must be above 0, not {self.threshold}")
        if not self.norm_type >= 1:
            raise ValueError(f"norm_type must be at least 1 (or inf), not {self.norm_type}")
        self.memory = dict(self.initial_memory)
        self.info = self.info_here()  # type: ignore[misc]  # with these options

    @property
    def limit(self) -> float:
        """λ of a mode that needs one; a ``ValueError`` without a threshold."""
        if self.threshold is None:
            raise ValueError("this clipping mode needs a threshold")
        return self.threshold

    def limit_on(self, norm: Tensor) -> Tensor:
        """Return λ as a number like ``norm``, which is made again only when λ or the device moves.

        It is shared: never write into it.
        """
        limit = self._limit
        if limit is None or self._limit_of != self.threshold or limit.device != norm.device:
            limit = limit_in_force(norm, self.limit)
            self._limit = limit
            self._limit_of = self.threshold
        return limit

    @property
    def limit_moves(self) -> bool:
        """Whether λ changes from step to step. A skipped step then has no λ."""
        return self.info.follows == "norms"

    def bind(self, layout: Layout) -> None:
        """Prepare for ``layout``, once; a ``ValueError`` if options do not fit it."""

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise an ``OptimizerMisfit`` if the mode is not defined on these optimizers."""

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Prepare for the optimizers of this rank, once, after :meth:`bind`, on all ranks together.

        For modes whose ``info.needs_optimizer`` is set: they read state, or limit updates.
        """
        self.require_optimizers(optimizers)

    def measure(self, layout: Layout, each: bool = False) -> Norms:
        """Measure the final gradients of ``layout``; the host does not wait for an accelerator.

        A mode may measure what it decides by in the same read, and leave it in ``work``. With
        ``each`` the share of each gradient in the norm is measured too.
        """
        return Norms.of(layout, self.norm_type, each)

    @property
    def scales_whole(self) -> bool:
        """Whether the mode multiplies the whole gradient by one coefficient."""
        return self.info.parts is None

    def clip(self, layout: Layout, norms: Norms | None = None) -> Decision:
        """Clip the gradients in place, and return what was done.

        The host does not wait for an accelerator. A step that is not finite is skipped, and leaves
        ``memory`` as it was.

        Args:
            layout: the layout this mode was bound to. Gradients are final: synchronised, unscaled,
                divided by the items of the window.
            norms: what was measured of them; they are measured here by default.
        """
        measured = self.measure(layout) if norms is None else norms
        return self._unless_skipped(layout, measured, self.clip_finite)

    @abstractmethod
    def clip_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Clip a gradient that is finite, in place; on an accelerator it may turn out not to be."""

    def _unless_skipped(
        self,
        layout: Layout,
        norms: Norms,
        rule: Callable[[Layout, Norms], Decision],
    ) -> Decision:
        finite = norms.finite
        if finite is not TRUE and transfer.can_read(finite.device) and not finite:
            # A λ that follows from earlier steps holds for its own step alone.
            return Decision.skipped(norms.total, None if self.limit_moves else self.threshold)
        before = self._begin_memory(layout.device)
        decision = rule(layout, norms)
        if self.tally is not None:
            self.tally.end_step(norms.total)
        if finite is TRUE:
            return decision
        self.undo(before, finite)
        return decision.if_finite(finite, threshold_moves=self.limit_moves)

    def _begin_memory(self, device: torch.device) -> dict[str, Any]:
        """Move the memory to ``device``, also one that was loaded; return it as it is then."""
        if not self.memory:
            return {}
        for name, value in self.memory.items():
            if isinstance(value, Tensor):
                self.memory[name] = value.to(device)
            else:
                self.memory[name] = transfer.number(value, device)
        return dict(self.memory)

    def memories(self) -> list[dict[str, Any]]:
        """Return the memory of this mode, and of the modes inside of it."""
        return [self.memory]

    def undo(self, before: Mapping[str, Any], finite: Tensor) -> None:
        """Make ``before`` the memory again, unless the gradient turns out to be ``finite``."""
        if transfer.can_read(finite.device):
            if not finite:
                self.memory.update(before)
            return
        for name, value in self.memory.items():
            if value is not before[name]:
                self.memory[name] = torch.where(finite, value, before[name])

    @property
    def by_factors(self) -> bool:
        """Whether the mode decides on factors, by :meth:`FactorMode.decide`."""
        return False

    @property
    def reads(self) -> Literal["norm", "tensors", "gradient"]:
        """What the mode decides by: ‖G‖, norms of tensors, or a gradient that it measures itself.

        A mode that reads ‖G‖ decides on one coefficient, which an optimizer's step may multiply by.
        """
        return "gradient"

    def before_step(self, layout: Layout, decision: Decision) -> None:
        """Prepare to limit the update of a step, where ``decision.update`` is not None.

        On an accelerator the step may turn out to be skipped: parameters and optimizer state are
        then unchanged.
        """

    def after_step(self, layout: Layout, decision: Decision) -> Decision:
        """Limit the update that was taken, before ZeRO broadcasts it; complete the decision."""
        return decision

    def waits_for(self) -> str:
        """Return why the mode cannot clip a tensor before other gradients are final."""
        if type(self).info.by_tensor:
            return ""
        return "needs the whole gradient, which is known after the backward pass"

    def of_part(self, layout: Layout) -> ClipMode:
        """Return this mode for some parameters of its layout, with the same memory.

        For modes with ``info.by_tensor``, which clip in the backward pass: in each step the parts
        decide one after the other, and then :meth:`end_parts` is called. A step that is not finite
        is taken back by :meth:`undo`.
        """
        part = copy.copy(self)
        part.bind(layout)
        return part

    def ready_for_parts(self) -> bool:
        """Return whether parts may decide in this step; the same on every rank."""
        return True

    def end_parts(self) -> None:
        """Note that all parts have decided, once a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold and, where there is one, the memory."""
        state: dict[str, Any] = {"threshold": self.threshold}
        return state | {"memory": dict(self.memory)} if self.memory else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a state without a threshold leaves it as it is."""
        self.threshold = state.get("threshold", self.threshold)
        self.memory.update(memory_of(state))


class FactorMode(ClipMode):
    """A mode that decides on factors: a coefficient of all gradients, or one for each tensor.

    They can be folded into a step of the optimizer, and multiplied in a chain.

    Attributes:
        by_norm_alone: whether :meth:`decide_finite` reads ``norms.total`` and nothing else of the
            gradient, and decides on one coefficient. An optimizer's step may then multiply by it
            instead of :meth:`apply`, and in a chain the norm of the link before is enough.
    """

    by_norm_alone: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for kind in cls.__mro__:
            if "by_norm_alone" in vars(kind):
                return
            for name in ("measure", "clip", "apply"):
                if cls.by_norm_alone and name in vars(kind):
                    raise TypeError(
                        f"{kind.__name__} has {name} of its own: add by_norm_alone = False, so "
                        "that it is always called"
                    )

    @property
    def by_factors(self) -> bool:
        """Whether the mode decides on factors: it does."""
        return True

    @property
    def reads(self) -> Literal["norm", "tensors", "gradient"]:
        """What the mode decides by, see :attr:`ClipMode.reads`."""
        return "norm" if self.by_norm_alone else "gradient"

    def decide(self, layout: Layout, norms: Norms) -> Decision:
        """Decide how far to scale the gradients, without changing them."""
        return self._unless_skipped(layout, norms, self.decide_finite)

    @abstractmethod
    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Decide on the factors of a gradient that is finite.

        On an accelerator it may turn out not to be: decision and memory are then dropped. Ranks
        hold the same ``norms``, and have to make the same decision.
        """

    def clip_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Decide, and multiply the gradients in place."""
        return self.apply(layout, self.decide_finite(layout, norms))

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        """Multiply the gradients in place, as decided."""
        if decision.finite is FALSE:
            return decision
        if decision.scales is not None:
            scale_each(layout, decision.scales)
            return replace(decision, scales=None)
        assert decision.factor is not None
        scale(layout, decision.factor)
        return decision


class ChangeMode(ClipMode):
    """A mode that changes elements or units of the gradients, and counts them."""

    @abstractmethod
    def change(self, layout: Layout, norms: Norms) -> Change:
        """Change the gradients of this rank in place; return what was changed of a finite one.

        On an accelerator a gradient may turn out not to be finite: its step is then skipped.
        """

    @torch.no_grad()
    def clip_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Change a gradient that is finite; one collective tells what all ranks changed."""
        change = self.change(layout, norms)
        return Decision.of_change(layout, norms.total, self.limit, change, self.norm_type)


def memory_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory in the state of a mode; earlier versions called it ``history``."""
    memory: dict[str, Any] = state.get("memory", state.get("history", {}))
    return memory


def build(mode: str | type[Mode] | Mode, **options: Any) -> ClipMode:
    """Make a clipping mode.

    Args:
        mode: a name of :data:`runner.config.modes.NAMES`, a class of your own, or a mode whose
            options were validated, as a request does.
        options: options of the mode: ``threshold``, ``norm_type``, and its own.

    Raises:
        ValueError: there is no such mode, it has no such option, or an option is out of range.
        TypeError: ``mode`` is neither a name nor a class or an object of a mode.
    """
    if isinstance(mode, Mode):
        chosen = {declared.name: getattr(mode, declared.name) for declared in _options(mode)}
        return class_of(type(mode))(**{**chosen, **options})
    if isinstance(mode, str) and mode not in NAMES:
        text = f"unknown clipping mode {mode!r}: use {or_list(NAMES)}"
        raise ValueError(text + did_you_mean(mode, NAMES))
    if not isinstance(mode, str | type):
        raise TypeError(f"the clipping mode must be a name, such as 'norm', not {mode!r}")
    kind = MODES[mode] if isinstance(mode, str) else mode
    names = [declared.name for declared in _options(kind)]
    for name in options:
        if name not in names:
            raise ValueError(f"mode {mode} has no option {name}: it has {', '.join(names)}")
    if not isinstance(mode, str):
        return class_of(kind)(**options)
    return build(checked(kind, options))


def _options(mode: Mode | type[Mode]) -> list[Field[Any]]:
    return [declared for declared in fields(mode) if declared.init]


def class_of(kind: type[Mode]) -> type[ClipMode]:
    """Return the class of this room that clips as a class of options says."""
    if issubclass(kind, ClipMode):
        return kind
    module, _, name = _CLASSES[kind].partition(".")
    clip_mode: type[ClipMode] = getattr(import_module(f"runner.clip.{module}"), name)
    return clip_mode


def scale(layout: Layout, coef: Tensor) -> None:
    """Multiply all gradients by ``coef``."""
    if transfer.can_read(coef.device) and coef.item() == 1.0:
        return
    kernels_of(coef.device).multiply(layout.gradients()[1], coef)


def scale_each(layout: Layout, scales: Tensor) -> None:
    """Multiply the gradient of each parameter of ``layout.names`` by its own of ``scales``."""
    shards, gradients = layout.gradients()
    if gradients:
        coefs = scales[layout.positions_of(shards)]
        kernels_of(scales.device).multiply_each(gradients, coefs)
