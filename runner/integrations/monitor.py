"""Record the gradients of a training loop of your own: norms before clipping, and what it did."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.clip import Decision, Norms
from runner.gradients import transfer
from runner.gradients.over_ranks import ProcessGroups, process_groups_of
from runner.gradients.shard import is_dtensor
from runner.integrations.clipping import (
    PlainClipper,
    clipper_of,
    plain_clipper,
    warn_without_gradients,
)
from runner.run_folder import keys
from runner.run_folder.strict_json import cut
from runner.telemetry.dominant import Dominant
from runner.telemetry.gauges import Gauges
from runner.telemetry.meter import Meter
from runner.telemetry.sinks.destination import To, file_of, sink_of
from runner.telemetry.step import Numbers, StepMetrics


class GradientMonitor:
    """Records ‖G‖ and what clipping did, in any training loop and without waiting for the GPU.

    Clip by :func:`runner.apply_gradient_clipping`, by ``torch.nn.utils`` or not at all. Rows have
    the keys that a run of this project has. On several ranks all of them make a monitor and call
    its methods; the first one writes. The loss is averaged over the ranks.

    Args:
        model: the model that is trained, as ``DistributedDataParallel``, ``fully_shard``, Fabric's
            ``setup`` or Accelerate's ``prepare`` returned it.
        to: where rows go: the path of a file, which they are appended to, functions of one row
            such as ``accelerator.log``, ``fabric.log_dict`` or ``wandb.log``, and sinks.
        interval: steps between rows. Means, maxima, ratios and times cover all steps in between.
        flush: steps between transfers to the host; by default 1 on the CPU of a single rank, or 50.
        what_if: thresholds of which the share of steps that they would have clipped is logged.
        per_layer: also log the norm of each parameter's gradient.
        top: parameters that make most of ‖G‖², named in the row of each step that was clipped; 0
            for none. These two cost a further read of the gradients, unless
            ``apply_gradient_clipping`` was called with the same ``model`` and ``norm_type=2``.
            After any other call they are known for clipping by the norm alone.
        groups: process groups over which parameters are distinct, for gradients that are measured
            here; see :func:`runner.apply_gradient_clipping`.

    Attributes:
        steps: number of the last step.

    Example:
        >>> monitor = GradientMonitor(model, "runs/mine/metrics.jsonl")
        >>> decision = apply_gradient_clipping(model, "norm", 0.25)  # after backward
        >>> monitor.step(decision, loss=loss)  # before optimizer.step()
        >>> monitor.close()
    """

    def __init__(
        self,
        model: nn.Module,
        *to: To,
        interval: int = 1,
        flush: int | None = None,
        what_if: Sequence[float] = (),
        per_layer: bool = False,
        top: int = 0,
        groups: ProcessGroups | None = None,
    ) -> None:
        self._model = model
        self._process_groups = process_groups_of(groups)
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        writes = self._world == 1 or dist.get_rank() == 0
        self._device = next(model.parameters()).device
        if flush is None:
            flush = 1 if self._world == 1 and transfer.can_read(self._device) else 50
        destinations = to if writes else ()
        self._files = [file_of(path) for path in destinations if isinstance(path, str | Path)]
        sinks = [sink_of(destination) for destination in destinations]
        self._meter = Meter(sinks, interval, flush, what_if=what_if)
        self.steps = 0
        self._samples: int | None = None
        self._tokens: int | None = None
        self._per_layer = per_layer
        self._top = top
        if per_layer or top:
            self._begin_gauges()
        self._before = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last rows and close files. Ranks that break off do not wait for the others."""
        if kind is not None:
            self._meter.flush(together=False)
        self.close(0 if kind is None else 1)

    @torch.no_grad()
    def step(
        self,
        clipped: Decision | Tensor | float | None = None,
        *,
        threshold: float | None = None,
        loss: Tensor | float | None = None,
        lr: float | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        number: int | None = None,
    ) -> None:
        """Record one optimizer step, after clipping and before ``zero_grad``.

        Args:
            clipped: what ``apply_gradient_clipping`` returned; or the norm before clipping, which
                ``torch.nn.utils.clip_grad_norm_`` and the methods of Fabric and Accelerate return.
                Without it the gradients are measured here, and count as not clipped.
            threshold: the largest norm that was given to ``clip_grad_norm_``.
            loss: loss of this rank's samples.
            lr: learning rate.
            samples: number of samples over all ranks.
            tokens: number of tokens over all ranks.
            number: the number of the step; without it, one more than the last.

        Raises:
            ValueError: a norm without its threshold.
        """
        self.steps = self.steps + 1 if number is None else number
        if samples is not None:
            self._samples = (self._samples or 0) + samples
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens
        if loss is not None and self._world > 1:
            self._meter.mean_over_data = self._mean
        decision = self._decision(clipped, threshold)
        seconds = time.perf_counter()
        numbers: Numbers = {
            keys.LOCAL_LOSS: _number(loss) if isinstance(loss, Tensor) else loss,
            keys.TRAIN_LR: lr,
            keys.TRAIN_SAMPLES: self._samples,
            keys.TRAIN_TOKENS: self._tokens or None,
            keys.TIME_STEP: seconds - self._before,
        }
        metrics = StepMetrics(self.steps, decision, numbers)
        if self._per_layer or self._top:
            self._measure(metrics)
        self._before = seconds
        self._meter.push(metrics)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the last step, such as ``{"eval/loss": 0.3}``; every rank calls it."""
        self._meter.flush()
        self._meter.write({keys.TRAIN_STEP: self.steps}, metrics)

    def summary(self) -> dict[str, Any]:
        """Return what all steps so far came to, such as percentiles of ‖G‖; every rank calls it."""
        self._meter.flush()
        return self._meter.summary()

    def close(self, exit_code: int = 0) -> dict[str, Any]:
        """Write the last rows, close files and sinks, return the summary; every rank calls it."""
        summary = self.summary()
        for sink in self._meter.sinks:
            sink.close(summary, exit_code)
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Return what later rows depend on, after the same step on every rank."""
        counts = {"steps": self.steps, "samples": self._samples, "tokens": self._tokens}
        return {**counts, "meter": self._meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned.

        Files that are named by a path lose the rows of later steps, which are taken again.
        """
        self.steps = state["steps"]
        self._samples = state["samples"]
        self._tokens = state["tokens"]
        self._meter.load_state_dict(state["meter"])
        self.remove_rows_after(self.steps)

    def remove_rows_after(self, step: int) -> None:
        """Remove the rows of steps after ``step`` from files that are named by a path."""
        for path in self._files:
            cut(path, step)

    def _decision(
        self, clipped: Decision | Tensor | float | None, threshold: float | None
    ) -> Decision:
        if isinstance(clipped, Decision):
            return clipped
        if clipped is not None:
            if threshold is None:
                raise ValueError("give the threshold too: monitor.step(norm, threshold=max_norm)")
            before = _number(clipped)
            coef = threshold / (before + 1e-6)  # as ``torch.nn.utils.clip_grad_norm_`` computes it
            return Decision(before, torch.full_like(before, threshold), factor=coef.clamp(max=1.0))
        layout = plain_clipper(self._model, self._process_groups).layout
        norm = Norms.of(layout).total
        warn_without_gradients(self._model, layout, norm, stacklevel=5)
        return Decision.untouched(norm, threshold)

    def _begin_gauges(self) -> Any:
        """Return what clips the model, and let it measure the share of each gradient."""
        clipper = clipper_of(self._model, self._process_groups)
        if isinstance(clipper, PlainClipper):
            clipper.each = True
        meter = self._meter
        measured = meter.layers or meter.dominant
        if measured is None or measured.layout is not clipper.layout:
            meter.flush()
            if self._per_layer:
                meter.layers = Gauges(clipper.layout, 2.0, per_layer=True, updates=False)
            if self._top:
                meter.dominant = Dominant(clipper.layout, 2.0, self._top)
        return clipper

    def _measure(self, metrics: StepMetrics) -> None:
        """Add the norm of each parameter's gradient before clipping."""
        clipper = self._begin_gauges()
        norms: Norms | None = clipper.norms if clipper.decision is metrics.decision else None
        if norms is None or norms.shares is None or norms.norm_type != 2.0:
            norms = Norms.of(clipper.layout, each=True)
            assert norms.shares is not None
            scaled = metrics.decision.norm.to(norms.total) / norms.total
            norms.shares = norms.shares * scaled.nan_to_num(nan=1.0) ** 2
        if self._meter.layers is not None and self._meter.row_due(metrics.step):
            metrics.layers = self._meter.layers.begin(norms)()
        if self._meter.dominant is not None:
            metrics.powers = self._meter.dominant.of_step(norms)

    def _mean(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=transfer.widest(self._device), device=self._device)
        dist.all_reduce(total)
        return list((total / self._world).tolist())


def _number(value: Tensor | float) -> Tensor:
    """Return a 0-dimensional tensor; the host does not wait."""
    if not isinstance(value, Tensor):
        return transfer.number(value, torch.device("cpu"))
    whole = value.full_tensor() if is_dtensor(value) else value
    return whole.detach().reshape(()).to(transfer.widest(whole.device))
