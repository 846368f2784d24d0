"""Differences of two trainings, and whether they exceed rounding errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.clip import Decision, Layout
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
    """One optimizer step of both sides; ``gradients`` are errors by parameter."""

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

    def failures(self, bound: float) -> Iterator[str]:
        """Yield a message for each difference that is more than rounding."""
        compared = ("‖G‖", "‖G‖ after clipping", "the clipped gradient")
        for what, error in zip(compared, self.errors.values(), strict=True):
            if not error <= bound:
                yield f"{what} of step {self.step} is off by {error:.2g}"
        ours, theirs = self.plugin.fraction, self.reference.fraction
        if ours != theirs:
            count = f"{keys.CLIP_FRACTION} of step {self.step}"
            yield f"{count} is {ours!r} instead of {theirs!r}: the counts differ"
        yield from self.disagreeing
        yield from self.present


@dataclass(frozen=True)
class Compared:
    """All steps of one clipping mode; ``weights`` are errors after the last step."""

    mode: str
    threshold: float | None
    derived: bool
    steps: Sequence[ComparedStep]
    weights: Mapping[str, float]
    drifted: Sequence[str] = ()
    losses: Sequence[float] = ()
    causes: Sequence[str] = ()

    @property
    def weight_error(self) -> float:
        """Largest error of a parameter after the last step."""
        return max(self.weights.values(), default=0.0)

    @property
    def largest(self) -> float:
        """Largest error of all steps and weights."""
        return max([self.weight_error, *(e for step in self.steps for e in step.errors.values())])

    def worst(self) -> list[dict[str, Any]]:
        """Return name, error and quantity of the parameters with the largest errors."""
        found = {name: (error, "weight") for name, error in self.weights.items()}
        for step in self.steps:
            for name, error in step.gradients.items():
                if error > found.get(name, (-1.0, ""))[0]:
                    found[name] = (error, f"gradient of step {step.step}")
        ranked = sorted(found.items(), key=lambda item: -item[1][0])[:WORST]
        return [{"name": name, "error": error, "of": what} for name, (error, what) in ranked]

    def failures(self, bound: float) -> Iterator[str]:
        """Yield a message for each difference that is more than rounding."""
        for step in self.steps:
            yield from step.failures(bound)
        if not self.weight_error <= bound:
            yield f"the weights after the last step are off by {self.weight_error:.2g}"
        if self.drifted:
            yield f"replicas no longer hold the same bits: {first_few(self.drifted, WORST)}"

    def record(self, bound: float) -> dict[str, Any]:
        """Return the part of ``verify.json`` about this mode."""
        return {
            "mode": self.mode,
            "threshold": self.threshold,
            "derived": self.derived,
            "binds": any(step.reference.clipped for step in self.steps),
            "max_rel_error": self.largest,
            "weight_error": self.weight_error,
            "failures": list(self.failures(bound)),
            "worst": self.worst(),
            "steps": [
                {
                    "step": step.step,
                    **step.errors,
                    "loss": {"plugin": loss, "reference": step.loss},
                    "plugin": asdict(step.plugin),
                    "reference": asdict(step.reference),
                    "naive": None if step.naive is None else asdict(step.naive),
                }
                for step, loss in zip(self.steps, self.losses, strict=True)
            ],
        }

    def naive_results(self, bound: float) -> Iterator[Naive]:
        """Yield the naive norms of the steps that begin with equal weights on both sides."""
        for step in self.steps:
            if step.naive is not None:
                yield step.naive
            if not max(step.errors.values()) <= bound:
                return


def outcome(compared: Sequence[Compared], notes: Iterable[str], bound: float) -> dict[str, Any]:
    """Return the part of ``verify.json`` that is about the comparison."""
    modes = [one.record(bound) for one in compared]
    ok = not any(one["failures"] for one in modes)
    naive = [each for one in compared for each in one.naive_results(bound)]
    raised = next((each.raised for each in naive if each.raised is not None), None)
    return {
        "ok": ok,
        "error": None,
        "rank": None,
        "max_rel_error": max(one.largest for one in compared),
        "naive": raised or max((each.error for each in naive), default=None),
        "tolerance": bound,
        "notes": list(notes),
        "causes": [] if ok else list(dict.fromkeys(x for one in compared for x in one.causes)),
        "modes": modes,
    }


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


def _size(tensor: Tensor | None) -> float:
    """Return max|t|: NaN if any element is NaN, 0 for an empty tensor or None."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().abs().amax())


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
    found: dict[str, str] = {}
    for rank, metrics in enumerate(ranks):
        for name, first in vars(ranks[0]).items():
            other = getattr(metrics, name)
            if other != first and not (math.isnan(other) and math.isnan(first)):
                message = f"{name} of step {step} is {other!r} on rank {rank}, {first!r} on rank 0"
                found.setdefault(name, message)
    return list(found.values())


def naive_norm(layout: Layout, norm_type: float) -> Naive | None:
    """Call ``torch.nn.utils.get_total_norm`` on this rank's gradients; a collective.

    None in one process, and where the call would wait for other ranks for ever.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    gradients = [p.param.grad for p in layout.shards if p.param.grad is not None]
    # The ranks of each gradient's mesh: gradients on one mesh are reduced over it.
    meshes = {
        tuple(g.device_mesh.mesh.flatten().tolist()) if isinstance(g, DTensor) else ()
        for g in gradients
    }
    everywhere: list[set[tuple[int, ...]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, meshes)
    if len(meshes) == 1 and not all(everywhere[rank] == meshes for rank in next(iter(meshes))):
        return None
    rank = dist.get_rank()
    try:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Naive(None, type(error).__name__, lines[0] if lines else "", rank=rank)
    return Naive(float(whole), rank=rank)


def worst_naive(outcomes: Sequence[Naive | None], norm: float) -> Naive | None:
    """Return the result with the largest error; one that raised has the largest of all."""
    made = [
        one if one.norm is None else replace(one, error=relative(one.norm, norm))
        for one in outcomes
        if one is not None
    ]
    return max(made, key=lambda one: (one.raised is not None, one.error), default=None)
