"""What a run measures besides the usual metrics, for people who look for the cause of a spike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from runner.config.telemetry_section import Telemetry


@dataclass(frozen=True)
class Measurements:
    """Optional measurements; none by default. The values are those of rows (``log.interval``).

    Attributes:
        worst_layers: log the share of ‖G‖² of so many parameters, those with the largest. The
            summary lists the parameters that had the largest shares over the run.
        update_ratio: log ‖ΔW‖ ÷ ‖W‖, with W the weights before a step and ΔW what the step added.
            Where layer norms are logged, that of each parameter too. Takes a copy of the weights.
        clip_cosine: log the cosine of the angle between the gradient before and after clipping. A
            mode that clips elements or units takes a copy of the gradient for it.
        noise_scale: estimate the gradient noise scale, see :mod:`runner.telemetry.noise_scale`.
        spike_score: log the share of the steps so far whose loss, and gradient norm, is a spike,
            see :mod:`runner.telemetry.spike_score`. Every step counts.
        spike_sigma: number of standard deviations from the mean beyond which a value is a spike.
        spike_window: number of values that the mean is over.
    """

    worst_layers: int = 0
    update_ratio: bool = False
    clip_cosine: bool = False
    noise_scale: bool = False
    spike_score: bool = False
    spike_sigma: float = 6.0
    spike_window: int = 128

    @classmethod
    def of(cls, section: Telemetry) -> Self:
        """Return what the section ``telemetry`` of a configuration asks for."""
        return cls(**{one.name: getattr(section, one.name) for one in fields(cls)})
