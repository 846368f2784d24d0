"""End a training whose metric does not improve any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner.config.notation import plural
from runner.config.objective import higher_is_better
from runner.config.problem import or_list
from runner.run_folder import keys
from runner.train.callbacks import Callback

if TYPE_CHECKING:
    from runner.train.trainer import Trainer


class EarlyStopping(Callback):
    """A callback that ends the training after evaluations without an improvement."""

    def __init__(
        self,
        patience: int,
        metric: str = keys.EVAL_LOSS,
        min_delta: float = 0.0,
        direction: str | None = None,
    ) -> None:
        if patience < 1 or not min_delta >= 0:
            raise ValueError(
                f"patience must be at least 1, not {patience}, and min_delta at least 0, not "
                f"{min_delta}"
            )
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self._higher = direction == "maximize" if direction else higher_is_better(metric)
        self.best, self.best_step, self.waited = math.nan, 0, 0

    def on_start(self, trainer: Trainer) -> None:
        """End a run at once that continues after it was to end."""
        self._end_if_due(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare the metric with its best value."""
        if self.metric not in metrics:
            raise ValueError(f"there is no {self.metric}; evaluations have {or_list(metrics)}")
        value = metrics[self.metric]
        gain = value - self.best if self._higher else self.best - value
        better = math.isnan(self.best) or (gain > 0 and gain >= self.min_delta)
        if math.isfinite(value) and better:
            self.best, self.best_step, self.waited = value, trainer.state.progress.step, 0
        else:
            self.waited += 1
        self._end_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and how many evaluations came since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited = state["waited"]

    def _end_if_due(self, trainer: Trainer) -> None:
        if self.waited >= self.patience:
            more = f" by {self.min_delta:g}" if self.min_delta else ""
            trainer.end_early(
                f"{self.metric} did not improve{more} in {plural(self.waited, 'evaluation')} "
                f"(best {self.best:.6g} at step {self.best_step})"
            )
