"""Gradient clipping and its record in the Trainer of transformers."""

from typing import Any

from transformers import TrainerCallback

from runner.clip import apply_gradient_clipping
from runner.run_folder import keys
from runner.telemetry.monitor import GradientMonitor, To


class ClippingCallback(TrainerCallback):
    """Clips the gradients of transformers' ``Trainer``, records what clipping did, or both.

    ``TrainingArguments(max_grad_norm=0)`` turns the Trainer's own clipping off, which is on by
    default and would come first.

    Args:
        clipping_type: ``norm``, ``value`` or ``adaptive``; None to record only.
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

    def __init__(
        self,
        clipping_type: str | None = None,
        clipping_threshold: float | None = None,
        *,
        to: To | list[To] | None = None,
        interval: int = 1,
        **options: Any,
    ) -> None:
        if (clipping_type is None) != (clipping_threshold is None):
            raise ValueError("give a clipping type and a threshold, or neither")
        self._clips = clipping_type is not None
        options |= {"clipping_type": clipping_type, "clipping_threshold": clipping_threshold}
        self._options = options
        self._to = [] if to is None else to if isinstance(to, list) else [to]
        self._interval = interval
        self.monitor: GradientMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the Trainer does not clip too, and begin the record."""
        if args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm:g} clips the gradients before this callback "
                "does: set TrainingArguments(max_grad_norm=0)"
            )
        if self._to:
            self.monitor = GradientMonitor(kwargs["model"], *self._to, interval=self._interval)

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
        found = {keys.TRAIN_LOSS: logs["loss"]} if "loss" in logs else {}
        found |= {k.replace("_", "/", 1): v for k, v in logs.items() if k.startswith("eval_")}
        if self.monitor is not None and found:
            self.monitor.log(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last rows."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
