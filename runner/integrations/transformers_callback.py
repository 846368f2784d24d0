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

from runner.gradients.over_ranks import are_process_groups
from runner.integrations.clipping import (
    apply_gradient_clipping,
    clipping_state_dict,
    load_clipping_state_dict,
)
from runner.integrations.monitor import GradientMonitor
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
        self.monitor: GradientMonitor | None = None
        self._model: Any = None  # of the training that runs
        if options.pop(_REMADE, False):
            self._copy_arguments()
            return
        takes_threshold = clipping_type not in (None, "chain", "groups")
        if takes_threshold != (clipping_threshold is not None):
            raise ValueError("give a clipping type and a threshold, or neither")
        self._clips = clipping_type is not None
        groups = options.get("process_groups", options.get("groups"))
        self._groups = groups if are_process_groups(groups) else None
        options |= {"clipping_type": clipping_type, "clipping_threshold": clipping_threshold}
        self._options = options
        self._to = [] if to is None else to if isinstance(to, list) else [to]
        self._interval = interval
        self._living.add(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the Trainer does not clip too, and begin or continue the record."""
        if args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm:g} clips the gradients before this callback "
                "does: set TrainingArguments(max_grad_norm=0)"
            )
        self._model = kwargs["model"]
        if self._to:
            self.monitor = GradientMonitor(
                self._model, *self._to, interval=self._interval, groups=self._groups
            )
        saved = self._saved(state)
        load_clipping_state_dict(self._model, saved.get("history", {}))
        if self.monitor is not None and state.global_step:
            if "monitor" in saved:
                self.monitor.load_state_dict(saved["monitor"])
            self.monitor.remove_rows_after(state.global_step)
        # A checkpoint of another callback has no place for this one, where the Trainer wants it.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip the gradients, which the Trainer has synchronised and unscaled, and record it."""
        decision = None
        if self._clips:
            decision = apply_gradient_clipping(kwargs["model"], **self._options)
        if self.monitor is not None:
            lr = kwargs["optimizer"].param_groups[0]["lr"]
            self.monitor.step(decision, lr=lr, number=state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the losses that the Trainer logs, every ``logging_steps``, and its evaluations."""
        logs = kwargs["logs"]
        metrics = {}
        if "loss" in logs:
            metrics[keys.TRAIN_LOSS] = logs["loss"]
        for name, value in logs.items():
            if name.startswith("eval_"):
                metrics[name.replace("_", "/", 1)] = value
        if self.monitor is not None and metrics:
            self.monitor.log(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last rows."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        self._model = None

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves in a checkpoint, on the first rank."""
        saved: dict[str, Any] = {}
        if self._model is not None:
            saved["history"] = clipping_state_dict(self._model)
        if self.monitor is not None:
            saved["monitor"] = self.monitor.state_dict()
        buffer = io.BytesIO()
        torch.save(saved, buffer)  # exact, where JSON would need a text for each number
        attributes = {
            "saved_type": self._options["clipping_type"],
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
            if attributes.get("saved_type") == self._options["clipping_type"]:
                buffer = io.BytesIO(base64.b64decode(attributes["saved_state"]))
                saved: dict[str, Any] = torch.load(buffer, map_location="cpu", weights_only=True)
                return saved
        warnings.warn(
            "the checkpoint has no state of this ClippingCallback: its history and its totals "
            f"begin anew at step {state.global_step}",
            stacklevel=2,
        )
        return {}

    def _copy_arguments(self) -> None:
        """Take the arguments of the callback that the Trainer replaces by this one."""
        if len(self._living) != 1:
            raise ValueError(
                "TrainingArguments(restore_callback_states_from_checkpoint=True) makes callbacks "
                "anew, and does not say from which of several ClippingCallbacks: set it to False, "
                "a ClippingCallback continues without it"
            )
        [replaced] = self._living
        self._clips = replaced._clips
        self._options = replaced._options
        self._to = replaced._to
        self._interval = replaced._interval
        self._groups = replaced._groups
        self._replaced = replaced  # which stays the only one
