"""What the callbacks for trainers of other libraries have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from runner.clip import Decision
from runner.gradients.over_ranks import are_process_groups
from runner.integrations.clipping import (
    apply_gradient_clipping,
    clipping_state_dict,
    load_clipping_state_dict,
)
from runner.integrations.monitor import GradientMonitor
from runner.telemetry.sinks.destination import To


class TrainerClipping:
    """Clips the gradients of a trainer that calls a callback, records what clipping did, or both.

    Args:
        clipping_type: ``norm``, ``value``, ``adaptive`` or another mode; None to record only.
        clipping_threshold: λ, above 0.
        to: where rows go, see :class:`GradientMonitor`; None to clip only. A list for several.
        interval: steps between rows.
        options: options of the mode, see :func:`runner.apply_gradient_clipping`.

    Attributes:
        clipping_type: the mode; None where nothing is clipped.
        model: the model of the training that runs; None between trainings.
        monitor: what records the training that runs, if anything does.

    Raises:
        ValueError: a type without a threshold, or a threshold without a type.
    """

    def __init__(
        self,
        clipping_type: str | None,
        clipping_threshold: float | None,
        to: To | list[To] | None,
        interval: int,
        options: Mapping[str, Any],
    ) -> None:
        takes_threshold = clipping_type not in (None, "chain", "groups")
        if takes_threshold != (clipping_threshold is not None):
            raise ValueError("give a clipping type and a threshold, or neither")
        self.clipping_type = clipping_type
        self.model: nn.Module | None = None
        self.monitor: GradientMonitor | None = None
        self._threshold = clipping_threshold
        self._options = dict(options)
        groups = options.get("process_groups", options.get("groups"))
        self._groups: Any = groups if are_process_groups(groups) else None
        if to is None:
            self._to = []
        elif isinstance(to, list):
            self._to = to
        else:
            self._to = [to]
        self._interval = interval

    def begin(self, model: nn.Module, step: int, saved: Mapping[str, Any]) -> None:
        """Begin the history of the mode and the record, or continue both after ``step`` steps.

        Args:
            model: the model that is trained.
            step: steps that were taken before.
            saved: what :meth:`state_dict` returned then; empty if there is none.
        """
        self.model = model
        if self._to:
            self.monitor = GradientMonitor(
                model, *self._to, interval=self._interval, groups=self._groups
            )
        load_clipping_state_dict(model, saved.get("history", {}))
        if self.monitor is not None and step:
            if "monitor" in saved:
                self.monitor.load_state_dict(saved["monitor"])
            self.monitor.remove_rows_after(step)

    def step(self, optimizer: Any, number: int, loss: Tensor | None = None) -> None:
        """Clip the final gradients of step ``number``, and record it."""
        decision: Decision | None = None
        if self.clipping_type is not None:
            assert self.model is not None
            decision = apply_gradient_clipping(
                self.model, self.clipping_type, self._threshold, **self._options
            )
        if self.monitor is not None:
            lr = optimizer.param_groups[0]["lr"]
            self.monitor.step(decision, loss=loss, lr=lr, number=number)

    def end(self) -> None:
        """Write the last rows of the training."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        self.model = None

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the totals of the training that runs, for a checkpoint."""
        saved: dict[str, Any] = {}
        if self.model is not None:
            saved["history"] = clipping_state_dict(self.model)
        if self.monitor is not None:
            saved["monitor"] = self.monitor.state_dict()
        return saved
