"""Options of the :class:`runner.Trainer`, grouped by what they are about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.clip import ClipMode, GradientClipping
from runner.config.duration import Duration
from runner.telemetry.sinks.sink import Sink


@dataclass(frozen=True)
class Measurements:
    """Optional measurements; none by default. The values are those of rows (``log.interval``).

    Attributes:
        update_ratio: log ‖ΔW‖ ÷ ‖W‖, with W the weights before a step and ΔW what the step added.
            Where layer norms are logged, that of each parameter too. Takes a copy of the weights.
    """

    update_ratio: bool = False


@dataclass(frozen=True)
class Log:
    """What a :class:`Trainer` records, and where.

    Args:
        sinks: where rows go. Give them on the first rank only.
        interval: steps between rows.
        flush: steps between transfers of metrics to the host.
        what_if: thresholds for which ``clip/what_if/<λ>`` is logged: the share of the steps so far
            that each would have clipped, in the units of the clipping mode.
        per_layer: also log each parameter's gradient norm.
        measurements: what else is measured, see :class:`runner.Measurements`.
    """

    sinks: Sequence[Sink] = ()
    interval: int = 1
    flush: int = 50
    what_if: Sequence[float] = ()
    per_layer: bool = False
    measurements: Measurements = field(default_factory=Measurements)


@dataclass(frozen=True)
class InBackward:
    """Clip each gradient in the backward pass, as soon as it is final.

    Args:
        algorithm: what clips, see :meth:`runner.booster.OptimizerWrapper.clip_in_backward`.
        step: whether the optimizer steps there too, and frees each gradient.
    """

    algorithm: GradientClipping | ClipMode
    step: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Held-out data of a :class:`runner.Trainer`, and how it is evaluated.

    Args:
        dataloader: the held-out data, see ``train_dataloader`` of the Trainer; None for none.
        metrics: further metrics, see :mod:`runner.train.evaluation`: ``["f1"]``, or mappings with a
            ``_target_``.
        interval: a duration between evaluations; there is always one at the end.
    """

    dataloader: Iterable[Any] | None
    metrics: Sequence[str | Mapping[str, Any]] = ()
    interval: str | Duration = "1ep"


Algorithm = GradientClipping | ClipMode | InBackward
