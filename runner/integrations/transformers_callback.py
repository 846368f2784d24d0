"""Gradient clipping and its record in the Trainer of transformers."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from runner.integrations.trainer_clipping import TrainerClipping
from runner.run_folder import keys
from runner.telemetry.sinks.destination import To

_REMADE = "remade_from_a_checkpoint"


class ClippingCallback(TrainerCallback, ExportableState):
    """Clips the gradients of transformers' ``Trainer``, records what clipping did, or both.

    ``TrainingArguments(max_grad_norm=0)`` turns the Trainer's own clipping off, which is on by
    default and would come first.

    The Trainer saves the history of the mode and the totals of the record in its checkpoints, in
    ``trainer_state.json``. A training that resumes from one goes on with both, and files that are
    named by a path lose the rows of later steps. Each other training begins both anew.

    Args:
        clipping_type: ``norm``, ``value``, ``adaptive`` or another mode; None to record only.
        clipping_threshold: λ, above 0.
        to: where rows go, see :class:`GradientMonitor`; None to clip only. A list for several.
        interval: steps between rows.
        options: options of the mode, see :func:`runner.apply_gradient_clipping`.

    Raises:
        ValueError: the Trainer clips too (``max_grad_norm``), or there is a type without a
            threshold.

    Example:
        >>> clipping = ClippingCallback("adaptive", 0.01, to="metrics.jsonl")
        >>> arguments = TrainingArguments("output", max_grad_norm=0)
        >>> Trainer(model, arguments, train_dataset=data, callbacks=[clipping]).train()
    """

    _living: ClassVar[WeakSet[ClippingCallback]] = WeakSet()

    def __init__(
        self,
        clipping_type: str | None = None,
        clipping_threshold: float | None = None,
        *,
        to: To | list[To] | None = None,
        interval: int = 1,
        **options: Any,
    ) -> None:
        if options.pop(_REMADE, False):
            self._take_the_place_of_another()
            return
        self._clipping = TrainerClipping(clipping_type, clipping_threshold, to, interval, options)
        self._living.add(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the Trainer does not clip too, and begin or continue the record."""
        if args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm:g} clips the gradients before this callback "
                "does: set TrainingArguments(max_grad_norm=0)"
            )
        self._clipping.begin(kwargs["model"], state.global_step, self._saved(state))
        # A checkpoint of another callback has no place for this one, where the Trainer wants it.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip the gradients, which the Trainer has synchronised and unscaled, and record it."""
        self._clipping.step(kwargs["optimizer"], state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the losses that the Trainer logs, every ``logging_steps``, and its evaluations."""
        logs = kwargs["logs"]
        metrics = {}
        if "loss" in logs:
            metrics[keys.TRAIN_LOSS] = logs["loss"]
        for name, value in logs.items():
            if name.startswith("eval_"):
                metrics[name.replace("_", "/", 1)] = value
        monitor = self._clipping.monitor
        if monitor is not None and metrics:
            monitor.log(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last rows."""
        self._clipping.end()

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves in a checkpoint, on the first rank."""
        buffer = io.BytesIO()
        torch.save(
            self._clipping.state_dict(), buffer
        )  # exact, where JSON would need a text for each number
        attributes = {
            "saved_type": self._clipping.clipping_type,
            "saved_state": base64.b64encode(buffer.getvalue()).decode(),
        }
        return {"args": {_REMADE: True}, "attributes": attributes}

    def _saved(self, state: Any) -> dict[str, Any]:
        """Return what a checkpoint holds of this callback; nothing where a training begins."""
        if not state.global_step:
            return {}
        stored = state.stateful_callbacks.get(type(self).__name__, [])
        states = stored if isinstance(stored, list) else [stored]
        # The Trainer appends the states of several callbacks at each checkpoint.
        for callback_state in reversed(states):
            attributes = callback_state["attributes"]
            if attributes.get("saved_type") == self._clipping.clipping_type:
                buffer = io.BytesIO(base64.b64decode(attributes["saved_state"]))
                saved: dict[str, Any] = torch.load(buffer, map_location="cpu", weights_only=True)
                return saved
        warnings.warn(
            "the checkpoint has no state of this ClippingCallback: its history and its totals "
            f"begin anew at step {state.global_step}",
            stacklevel=2,
        )
        return {}

    def _take_the_place_of_another(self) -> None:
        """Go on with what the callback has that the Trainer replaces by this one."""
        if len(self._living) != 1:
            raise ValueError(
                "TrainingArguments(restore_callback_states_from_checkpoint=True) makes callbacks "
                "anew, and does not say from which of several ClippingCallbacks: set it to False, "
                "a ClippingCallback continues without it"
            )
        [replaced] = self._living
        self._clipping = replaced._clipping
        self._replaced = replaced  # which stays the only one
