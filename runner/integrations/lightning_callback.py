"""Gradient clipping and its record in the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from runner.integrations.trainer_clipping import TrainerClipping
from runner.telemetry.sinks.destination import To


class LightningClipping(Callback):
    """Clips the gradients of Lightning's ``Trainer``, records what clipping did, or both.

    It stands in the place of ``Trainer(gradient_clip_val=...)`` and of the hook
    ``configure_gradient_clipping``: after gradients were averaged and unscaled, before the step.
    The norm is taken over the whole model, under ``ModelParallelStrategy`` too. Checkpoints hold
    the history of the mode and the totals of the record, and ``fit(ckpt_path=...)`` goes on with
    both; files that are named by a path lose the rows of later steps.

    Args:
        clipping_type: ``norm``, ``value``, ``adaptive`` or another mode; None to record only.
        clipping_threshold: λ, above 0.
        to: where rows go, see :class:`GradientMonitor`; None to clip only. A list for several.
        interval: steps between rows.
        options: options of the mode, see :func:`runner.apply_gradient_clipping`.

    Raises:
        ValueError: Lightning clips too, or there is a type without a threshold.
        NotImplementedError: manual optimization, DeepSpeed, float16 with a fused optimizer.

    Example:
        >>> clipping = LightningClipping("adaptive", 0.01, to="metrics.jsonl")
        >>> Trainer(callbacks=[clipping]).fit(module, loader)
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
        self._clipping = TrainerClipping(clipping_type, clipping_threshold, to, interval, options)
        self._loss: Tensor | None = None  # of the microbatches of this step so far
        self._saved: dict[str, Any] = {}  # where no training runs, what the next one goes on from

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what clips besides, or leaves no place to clip."""
        if self._clipping.clipping_type is None:
            return
        if trainer.gradient_clip_val:
            raise ValueError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val:g}) clips after this "
                "callback does: leave it out"
            )
        if type(pl_module).configure_gradient_clipping is not _hook_of_lightning(pl_module):
            raise ValueError(
                f"{type(pl_module).__name__}.configure_gradient_clipping clips after this "
                "callback does: leave one of them out"
            )
        if not pl_module.automatic_optimization:
            raise NotImplementedError(
                "with manual optimization, call runner.apply_gradient_clipping(self, ...) in "
                "training_step, after manual_backward"
            )
        if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
            raise NotImplementedError(
                "DeepSpeed clips in its own step: set gradient_clipping of DeepSpeedStrategy"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin or continue the history and the record."""
        self._loss = None
        saved = self._saved if trainer.global_step else {}
        self._clipping.begin(trainer.model, trainer.global_step, saved)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Note the loss, which Lightning has divided by the microbatches of a step."""
        loss = loss.detach()
        if trainer.scaler is not None:
            loss = loss / trainer.scaler.get_scale()
        self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Clip the gradients, which Lightning has averaged and unscaled, and record it."""
        clips = self._clipping.clipping_type is not None
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        if clips and trainer.scaler is not None and unscales:
            raise NotImplementedError(
                "a fused optimizer unscales float16 gradients inside its step, after clipping: "
                "give it fused=False"
            )
        self._clipping.step(optimizer, trainer.global_step + 1, loss=self._loss)
        self._loss = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the last rows, and keep the state for ``trainer.save_checkpoint``."""
        self._saved = self.state_dict()
        self._clipping.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the rows of this rank, without waiting for others."""
        monitor = self._clipping.monitor
        if monitor is not None:
            monitor.__exit__(type(exception), exception, None)
            self._clipping.monitor = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this callback; every rank calls it."""
        if self._clipping.model is None:
            return self._saved
        return self._clipping.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the training starts."""
        self._saved = dict(state_dict)


def _hook_of_lightning(module: Any) -> Any:
    """Return the hook of ``LightningModule`` itself, which does what the Trainer was asked for."""
    bases: list[Any] = [kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"]
    return bases[-1].configure_gradient_clipping
