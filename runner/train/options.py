"""What a :class:`runner.Trainer` is told in groups, and the summary that it returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.booster import OptimizerWrapper
from runner.clip import ClipMode, build
from runner.config.notation import Duration, percent, rounded
from runner.run_folder import keys
from runner.telemetry.profile import Profile
from runner.telemetry.sinks.destination import To

NO_UPDATE_RATIO = "copies the weights before a step: use clip.step_in_backward=false"


@dataclass(frozen=True)
class GradientClipping:
    """Clipping as an algorithm of a :class:`runner.Trainer`.

    Example:
        ``Trainer(model=..., algorithms=[GradientClipping("norm", 0.1)])``

    Args:
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0.
        units: option ``units`` of ``adaptive``, see :func:`apply_gradient_clipping`.
        scales: ``"all"`` to multiply the matrices of Muon by the coefficient too.
    """

    clipping_type: str
    clipping_threshold: float
    units: Mapping[str, int | Sequence[int]] | None = None
    scales: Literal["auto", "all"] = "auto"

    def mode(self) -> ClipMode:
        """Make the clipping mode that this describes."""
        options: dict[str, Any] = {} if self.units is None else {"units": self.units}
        options |= {"threshold": self.clipping_threshold, "scales": self.scales}
        return build(self.clipping_type, **options)


@dataclass(frozen=True)
class Measurements:
    """Optional measurements, taken in the steps that have a row (``log.interval``).

    Attributes:
        update_ratio: log ‖ΔW‖ ÷ ‖W‖, with W the weights before a step and ΔW what the step added;
            with layer norms also of each parameter. Takes a copy of the weights.
        noise_scale: log ``noise/scale``, tr(Σ) ÷ ‖G‖² over the last 100 rows: the samples of a step
            up to which accumulating more pays. Needs microbatches, under SinglePlugin or DDP.
        zeros: log ``grad/zeros``, the share of the elements of all gradients that are 0.
    """

    update_ratio: bool = False
    noise_scale: bool = False
    zeros: bool = False


@dataclass(frozen=True)
class Log:
    """What a :class:`Trainer` records, and where.

    Args:
        sinks: where rows go: the path of a file, which they are appended to, a sink, a function of
            one row, or a list of these. Give sinks and functions on the first rank only. A training
            that continues takes the rows of later steps back from a file.
        interval: steps between rows.
        flush: steps between transfers of metrics to the host.
        what_if: thresholds of which the share of steps that they would have clipped is logged.
        per_layer: also log each parameter's gradient norm.
        top: parameters that make most of ‖G‖^p, named in the row of each step that was clipped or
            skipped as a spike; 0 for none. A run of the command names three.
        measurements: what else is measured, see :class:`runner.Measurements`.
        bar: whether :meth:`Trainer.fit` shows a bar on standard error, or lines if that is no
            terminal.
        profile: what profiles some of the steps; give it on one rank only.
    """

    sinks: To | Sequence[To] = ()
    interval: int = 1
    flush: int = 50
    what_if: Sequence[float] = ()
    per_layer: bool = False
    top: int = 0
    measurements: Measurements = field(default_factory=Measurements)
    bar: bool = True
    profile: Profile | None = None


@dataclass(frozen=True)
class InBackward:
    """Clip each gradient in the backward pass, as soon as it is final.

    Args:
        algorithm: what clips, see :meth:`runner.booster.OptimizerWrapper.clip_in_backward`.
        step: whether the optimizer steps there too, and frees each gradient.
    """

    algorithm: GradientClipping | ClipMode
    step: bool = False


Algorithm = GradientClipping | ClipMode | InBackward


def bind(
    algorithms: Sequence[Algorithm] | Algorithm, optimizer: OptimizerWrapper, log: Log
) -> ClipMode:
    """Bind the clipping algorithm of a training to its optimizers, and return its mode.

    Raises:
        ValueError: there are several algorithms, or the update ratio cannot be measured with this.
    """
    if isinstance(algorithms, GradientClipping | ClipMode | InBackward):
        algorithms = [algorithms]
    if len(algorithms) > 1:
        raise ValueError(f"one clipping algorithm at most, not {len(algorithms)}")
    algorithm = algorithms[0] if algorithms else build("none")
    clipping = algorithm.algorithm if isinstance(algorithm, InBackward) else algorithm
    mode = clipping.mode() if isinstance(clipping, GradientClipping) else clipping
    if not isinstance(algorithm, InBackward):
        optimizer.bind(mode)
        return mode
    if algorithm.step and log.measurements.update_ratio:
        raise ValueError(f"update_ratio {NO_UPDATE_RATIO}")
    optimizer.clip_in_backward(mode, step=algorithm.step, each=log.per_layer or log.top > 0)
    return mode


@dataclass(frozen=True)
class Evaluate:
    """Held-out data of a :class:`runner.Trainer`, and how it is evaluated.

    Args:
        dataloader: the held-out data, see ``train_dataloader`` of the Trainer; None for none.
        metrics: further metrics, see :class:`runner.train.metrics.EvalMetrics`: ``["f1"]``.
        interval: a duration between evaluations; there is always one at the end.
    """

    dataloader: Iterable[Any] | None
    metrics: Sequence[str | Mapping[str, Any]] = ()
    interval: str | Duration = "1ep"


class Summary(dict[str, Any]):
    """What :meth:`runner.Trainer.fit` returns: the content of ``summary.json``, shown in a line."""

    def __repr__(self) -> str:
        """Return the number of steps, the last metrics, and the share of steps clipped."""
        facts = {"steps": self.get("steps")}
        for key in (keys.TRAIN_LOSS, keys.EVAL_LOSS, keys.EVAL_ACCURACY):
            if key in self.get("final", {}):
                facts[key] = rounded(self["final"][key])
        facts["grad/norm p50"] = rounded(self.get(keys.GRAD_NORM, {}).get("p50", math.nan))
        facts["clipped"] = percent(self.get(keys.CLIP_RATIO_TOTAL, math.nan))
        shown = ", ".join(f"{name} {value}" for name, value in facts.items())
        return f"<Summary: {shown}; a dict of {', '.join(self)}>"
