"""What many steps come to besides sums: runs of clipped steps, spikes, the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.noise_scale import NoiseScale, NoiseShare
from runner.telemetry.options import Measurements
from runner.telemetry.spike_score import SpikeScore
from runner.telemetry.step import StepValues


class Statistics:
    """Follows every step of a run on the host."""

    def __init__(self, options: Measurements) -> None:
        self.longest = self._streak = 0
        scored = (keys.LOSS_SPIKES, keys.NORM_SPIKES) if options.spike_score else ()
        self._scores = {
            key: SpikeScore(options.spike_sigma, options.spike_window) for key in scored
        }
        self._noise = NoiseScale() if options.noise_scale else None

    def count(
        self,
        values: StepValues,
        loss: float | None,
        noise: Sequence[float] | None = None,
    ) -> None:
        """Take the next step."""
        self._streak = self._streak + 1 if values.clipped else 0
        self.longest = max(self.longest, self._streak)
        if self._scores:
            self._scores[keys.LOSS_SPIKES].add(math.nan if loss is None else loss)
            self._scores[keys.NORM_SPIKES].add(values.norm)
        if self._noise is not None and noise is not None:
            known = NoiseShare._make(noise)
            if math.isnan(known.whole):
                known = known._replace(whole=values.norm**2)
            self._noise.add([float(each) for each in known])

    def row(self) -> Row:
        """Return the metrics of a row."""
        row = {key: score.score for key, score in self._scores.items()}
        return row if self._noise is None else row | self._noise.row()

    def summary(self) -> dict[str, Any]:
        """Return what all steps came to."""
        noise = {} if self._noise is None else self._noise.summary()
        scores = {key: score.score for key, score in self._scores.items()}
        return {keys.CLIP_STREAK: self.longest, **scores, **noise}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later rows and the summary depend on."""
        return {
            "streak": [self._streak, self.longest],
            "scores": {key: score.state_dict() for key, score in self._scores.items()},
            "noise": None if self._noise is None else self._noise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; what it does not hold, because it was not measured, begins now."""
        self._streak, self.longest = state["streak"]
        for key, score in self._scores.items():
            if key in state["scores"]:
                score.load_state_dict(state["scores"][key])
        if self._noise is not None and state["noise"] is not None:
            self._noise.load_state_dict(state["noise"])
