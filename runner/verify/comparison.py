"""The differences of two trainings, and whether they exceed rounding errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from runner.clip import Decision
from runner.config.notation import first_few
from runner.run_folder import keys

FLOOR = 1e-3
"""Errors of a tensor are relative to at least this share of the largest element of all tensors,
because some gradients, such as that of a key's bias, are zero up to rounding."""

WORST = 5
"""Number of parameters that a message names."""


@dataclass(frozen=True)
class SideMetrics:
    """Metrics of one clipped step as floats; see :class:`runner.clip.Decision`."""

    norm: float
    norm_clipped: float
    coef: float
    clipped: float
    fraction: float
    peak: float

    @classmethod
    def of(cls, decision: Decision) -> SideMetrics:
        """Convert ``decision``; synchronises with the device."""
        return cls(*(float(metric) for metric in decision.metrics[:6]))


@dataclass(frozen=True)
class Naive:
    """Result of ``torch.nn.utils.get_total_norm`` on the gradients of one rank."""

    norm: float | None
    raised: str | None = None
    message: str = ""
    error: float = math.inf
    rank: int = 0


@dataclass(frozen=True)
class ComparedStep:
    """One optimizer step of both sides."""

    step: int
    plugin: SideMetrics
    reference: SideMetrics
    gradients: Mapping[str, float]
    disagreeing: Sequence[str] = ()
    present: Sequence[str] = ()
    naive: Naive | None = None
    loss: float = math.nan

    @property
    def errors(self) -> dict[str, float]:
        """Relative errors of ‖G‖ before and after clipping, and the largest of a gradient."""
        return {
            "norm_error": relative(self.plugin.norm, self.reference.norm),
            "norm_clipped_error": relative(self.plugin.norm_clipped, self.reference.norm_clipped),
            "gradient_error": max(self.gradients.values(), default=0.0),
        }

    @property
    def largest(self) -> float:
        """Largest error of this step."""
        return max(self.errors.values())


@dataclass(frozen=True)
class Compared:
    """All steps of one clipping mode."""

    mode: str
    threshold: float | None
    derived: bool
    steps: Sequence[ComparedStep]
    weights: Mapping[str, float]
    drifted: Sequence[str] = ()
    placed: Mapping[str, str] = field(default_factory=dict)
    losses: Sequence[float] = ()
    causes: Sequence[str] = ()
    dropped: int = 0

    @property
    def weight_error(self) -> float:
        """Largest error of a parameter after the last step."""
        return max(self.weights.values(), default=0.0)

    @property
    def largest(self) -> float:
        """Largest error of all steps and weights."""
        return max([self.weight_error, *(step.largest for step in self.steps)])

    @property
    def binds(self) -> bool:
        """True if any step was clipped."""
        return any(step.reference.clipped for step in self.steps)

    def worst(self) -> list[tuple[str, float, str]]:
        """Return name, error and quantity of the parameters with the largest errors."""
        found = {name: (error, "weight") for name, error in self.weights.items()}
        for step in self.steps:
            for name, error in step.gradients.items():
                if error > found.get(name, (-1.0, ""))[0]:
                    found[name] = (error, f"gradient of step {step.step}")
        ranked = sorted(found.items(), key=lambda item: -item[1][0])
        return [(name, error, what) for name, (error, what) in ranked[:WORST]]

    def failures(self, bound: float) -> Iterator[str]:
        """Yield a message for each difference that is more than rounding."""
        for step in self.steps:
            compared = ("‖G‖", "‖G‖ after clipping", "the clipped gradient")
            for what, error in zip(compared, step.errors.values(), strict=True):
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
            yield f"replicas no longer hold the same bits: {first_few(self.drifted, WORST)}"


def relative(ours: float, reference: float) -> float:
    """Return the relative error of ``ours``; infinity if the two differ and one is not finite."""
    if ours == reference:
        return 0.0
    error = abs(ours - reference) / abs(reference) if reference else math.inf
    return error if math.isfinite(error) else math.inf


def tensor_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return max|a - b| ÷ max(max|b|, 1e-3 · max over all b) for each tensor b of ``reference``."""
    largest = max((_size(tensor) for tensor in reference.values()), default=0.0)
    errors = {}
    for name in {**reference, **ours}:
        a, b = ours.get(name), reference.get(name)
        size = max(_size(b), FLOOR * largest)
        if a is None or b is None:
            off = _size(a if b is None else b)
        else:
            off = _size(a - b) if a.shape == b.shape else math.inf
        error = off / size if size else (0.0 if off == 0.0 else math.inf)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def presence(step: int, ours: Iterable[str], reference: Iterable[str]) -> list[str]:
    """Return messages about parameters that have a gradient on one side only."""
    sides = (
        (set(ours) - set(reference), "under the plugin, but none in one process"),
        (set(reference) - set(ours), "in one process, but none under the plugin"),
    )
    return [
        f"in step {step}, {first_few(sorted(names), WORST)}: a gradient {where}"
        for names, where in sides
        if names
    ]


def disagreements(step: int, ranks: Sequence[SideMetrics]) -> list[str]:
    """Return messages about metrics of ``ranks`` that are not equal bit for bit."""
    found = []
    for name, first in vars(ranks[0]).items():
        for rank, metrics in enumerate(ranks):
            other = getattr(metrics, name)
            if other != first and not (math.isnan(other) and math.isnan(first)):
                found.append(
                    f"{name} of step {step} is {other!r} on rank {rank}, {first!r} on rank 0"
                )
                break
    return found


def _size(tensor: Tensor | None) -> float:
    """Return max|t|: NaN if any element is NaN, 0 for an empty tensor or None."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().abs().amax())
