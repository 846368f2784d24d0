"""How far two trainings are apart, and whether that is rounding. Pure functions of figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from runner.clip import Decision
from runner.run_folder import keys

FLOOR = 1e-3
"""Of the largest element of all tensors: a parameter is not held to less. The gradient of a key's
bias, say, is zero but for rounding."""

WORST = 5
"""Parameters that are named."""


@dataclass(frozen=True)
class SideMetrics:
    """What clipping did in one step, on the host; see :class:`runner.clip.Decision`."""

    norm: float
    norm_clipped: float
    coef: float
    clipped: float
    fraction: float
    peak: float

    @classmethod
    def of(cls, decision: Decision) -> SideMetrics:
        """Return the metrics of ``decision`` on the host, which waits for an accelerator."""
        return cls(*(float(metric) for metric in decision.metrics[:6]))


@dataclass(frozen=True)
class Naive:
    """What ``torch.nn.utils.get_total_norm`` makes of the gradients that one rank holds.

    Attributes:
        norm: its result; None where it raised.
        raised: the class of what it raised.
        said: the first line of that.
        error: relative, against ‖G‖ of one process; infinite where it raised.
        rank: whose gradients they are.
    """

    norm: float | None
    raised: str | None = None
    said: str = ""
    error: float = math.inf
    rank: int = 0


@dataclass(frozen=True)
class ComparedStep:
    """One optimizer step of both sides.

    Attributes:
        step: its number, from 1.
        plugin: figures of the plugin's first rank.
        reference: of one process.
        gradients: relative error of each parameter's clipped gradient, by name.
        present: names of parameters with a gradient on one side alone, in words.
        disagreeing: figures that are not the same bits on all ranks, in words.
        naive: of the rank where it is furthest off; None with one process.
        loss: of both sides; the plugin's first.
    """

    step: int
    plugin: SideMetrics
    reference: SideMetrics
    gradients: Mapping[str, float]
    disagreeing: Sequence[str] = ()
    present: Sequence[str] = ()
    naive: Naive | None = None
    loss: tuple[float, float] = (math.nan, math.nan)

    @property
    def norm_error(self) -> float:
        """Of ‖G‖ before clipping."""
        return relative(self.plugin.norm, self.reference.norm)

    @property
    def clipped_error(self) -> float:
        """Of ‖G‖ after clipping."""
        return relative(self.plugin.norm_clipped, self.reference.norm_clipped)

    @property
    def gradient_error(self) -> float:
        """The largest over all parameters."""
        return max(self.gradients.values(), default=0.0)

    @property
    def largest(self) -> float:
        """The largest of this step's errors."""
        return max(self.norm_error, self.clipped_error, self.gradient_error)


@dataclass(frozen=True)
class Compared:
    """All steps of one clipping mode.

    Attributes:
        mode: of clipping.
        threshold: λ; None for ``none``.
        derived: whether λ was chosen so that it binds, instead of by the request.
        steps: in order.
        weights: relative error of each parameter after the last step, by name.
        drifted: parameters whose copies on several ranks are no longer the same bits.
        placed: where each parameter lies, in words.
    """

    mode: str
    threshold: float | None
    derived: bool
    steps: Sequence[ComparedStep]
    weights: Mapping[str, float]
    drifted: Sequence[str] = ()
    placed: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_error(self) -> float:
        """The largest over all parameters."""
        return max(self.weights.values(), default=0.0)

    @property
    def largest(self) -> float:
        """The largest error of all."""
        return max([self.weight_error, *(step.largest for step in self.steps)])

    @property
    def binds(self) -> bool:
        """Whether any step was clipped."""
        return any(step.reference.clipped for step in self.steps)

    def worst(self) -> list[tuple[str, float, str]]:
        """The parameters that are furthest off: name, error, and what of it is."""
        found = {name: (error, "weight") for name, error in self.weights.items()}
        for step in self.steps:
            for name, error in step.gradients.items():
                if error > found.get(name, (-1.0, ""))[0]:
                    found[name] = (error, f"gradient of step {step.step}")
        ranked = sorted(found.items(), key=lambda item: -item[1][0])
        return [(name, error, what) for name, (error, what) in ranked[:WORST]]

    def failures(self, bound: float) -> Iterator[str]:
        """What is more than rounding, in words.

        Args:
            bound: the largest relative error that is taken for rounding.
        """
        for step in self.steps:
            for what, error in (
                ("‖G‖", step.norm_error),
                ("‖G‖ after clipping", step.clipped_error),
                ("the clipped gradient", step.gradient_error),
            ):
                if not error <= bound:
                    yield f"{what} of step {step.step} is off by {error:.2g}"
            ours, theirs = step.plugin.fraction, step.reference.fraction
            if ours != theirs:
                yield (
                    f"{keys.CLIP_FRACTION} of step {step.step} is {ours!r} instead of {theirs!r}: "
                    "the counts differ"
                )
            yield from step.disagreeing
            yield from step.present
        if not self.weight_error <= bound:
            yield f"the weights after the last step are off by {self.weight_error:.2g}"
        if self.drifted:
            names = ", ".join(self.drifted[:WORST])
            more = len(self.drifted) - WORST
            yield f"replicas no longer hold the same bits: {names}" + (
                f" and {more} more" if more > 0 else ""
            )


def relative(ours: float, reference: float) -> float:
    """Relative error of ``ours``; infinite where one is not finite and the other differs."""
    if ours == reference:
        return 0.0
    error = abs(ours - reference) / abs(reference) if reference else math.inf
    return error if math.isfinite(error) else math.inf


def tensor_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """max|a - b| ÷ max(max|b|, 1e-3 · max over all b) of each tensor b of ``reference``, by name.

    A tensor that only one side has counts as zeros on the other: a parameter without a gradient.

    Args:
        ours: on the host.
        reference: on the host, of the same shapes.
    """
    largest = max((_size(tensor) for tensor in reference.values()), default=0.0)
    errors = {}
    for name in {**reference, **ours}:
        a, b = ours.get(name), reference.get(name)
        size = max(_size(b) if b is not None else 0.0, FLOOR * largest)
        if a is None or b is None:
            off = _size(a if b is None else b)
        else:
            off = _size(a - b) if a.shape == b.shape else math.inf
        error = off / size if size else (0.0 if off == 0.0 else math.inf)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def presence(step: int, ours: Iterable[str], reference: Iterable[str]) -> list[str]:
    """Which parameters have a gradient on one side alone, in words.

    A gradient of zeros is no error in :func:`tensor_errors`, but momentum and weight decay move a
    parameter that has one, and leave alone one that has none.
    """
    found = []
    for names, where in (
        (set(ours) - set(reference), "under the plugin, but none in one process"),
        (set(reference) - set(ours), "in one process, but none under the plugin"),
    ):
        if names:
            shown = sorted(names)[:WORST]
            more = f" and {len(names) - WORST} more" if len(names) > WORST else ""
            found.append(f"in step {step}, {', '.join(shown)}{more}: a gradient {where}")
    return found


def disagreements(step: int, ranks: Sequence[SideMetrics]) -> list[str]:
    """Figures of ``ranks`` that are not those of the first to the bit, in words."""
    found = []
    for name, first in vars(ranks[0]).items():
        for rank, figures in enumerate(ranks):
            other = getattr(figures, name)
            if other != first and not (math.isnan(other) and math.isnan(first)):
                found.append(
                    f"{name} of step {step} is {other!r} on rank {rank}, {first!r} on rank 0"
                )
                break
    return found


def _size(tensor: Tensor | None) -> float:
    """max|t|, NaN where any element is; 0 of nothing."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().abs().amax())
