"""Pipeline parallelism by torch's schedules: consecutive layers are on different ranks.

:mod:`runner.parallel.stages` splits the model.

Schedules: GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved 1F1B (Narayanan et al.
2021, arXiv 2104.04473), zero bubble in its V form (Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runner.config.schedules import SCHEDULES
from runner.parallel.forward_pass import ForwardPass, Stage

LossOf = Callable[[Tensor, slice], Tensor]
"""Returns the summed loss of some samples, given their outputs and their slice of the batch."""

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleZBVZeroBubble",
}
_KEPT = 4
"""Number of cached schedules, one per shape of a batch. Each has buffers for its microbatches."""


class Pipeline:
    """The stages of this rank, and the schedules that run them.

    Args:
        stages: stages of this rank, by number.
        count: number of stages of the pipeline.
        schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``.
        microbatches: number of microbatches of a batch.
        group: ranks of the pipeline.
        device: device of this rank.
        across: data-parallel ranks, if they communicate in forward passes.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        count: int,
        schedule: str,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        across: dist.ProcessGroup | None = None,
    ) -> None:
        self.stages = stages
        self.count = count
        self.schedule = schedule
        self.microbatches = microbatches
        self.group = group
        self.device = device
        self.across = across
        self._forward_pass = ForwardPass(stages, count, schedule, group, device)
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._loss_of: LossOf | None = None
        if self.last:
            stages[count - 1].ends = True

    @property
    def first(self) -> bool:
        """Whether the first stage is on this rank."""
        return 0 in self.stages

    @property
    def last(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.count - 1 in self.stages

    def autocast(self, dtype: torch.dtype | None) -> None:
        """Run the stages of this rank under autocast to ``dtype``; None for full precision."""
        for stage in self.stages.values():
            stage.dtype = dtype

    def train(self, inputs: Tensor, loss_of: LossOf) -> Tensor:
        """Run forward and backward passes of a batch, and accumulate gradients.

        Args:
            inputs: [B, ...], equal on all ranks of the pipeline.
            loss_of: function that returns the summed loss of samples.

        Returns:
            The summed loss of the batch on the last stage; 0 on the others.
        """
        padded, rows = self._padded(inputs)
        run, before = self._run_of(padded)
        losses: list[Tensor] = []
        self._loss_of = loss_of
        try:
            run.step(
                *([padded] if self.first else []),
                target=rows if self.last else None,
                losses=losses if self.last else None,
                return_outputs=False,
            )
        finally:
            self._loss_of = None
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs [B, ...] of a batch on the last stage, None on the others.

        Args:
            inputs: [B, ...], equal on all ranks of the pipeline.
        """
        padded, _ = self._padded(inputs)
        # In training mode, batch norm would count these samples twice in its running statistics.
        before = [
            (module._buffers, name, buffer, None if buffer is None else buffer.clone())
            for stage in self.stages.values()
            if stage.training
            for module in stage.modules()
            for name, buffer in module._buffers.items()
        ]
        try:
            passed = self._forward_pass(padded.chunk(self.microbatches))
        finally:
            for held, name, buffer, value in before:
                held[name] = buffer  # A forward pass may have replaced the buffer.
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        if not self.last:
            return None
        return torch.cat([out for _, out in passed[self.count - 1]])[: len(inputs)]

    def _padded(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch padded to whole microbatches, and the sample of each row (-1: padding).

        The number of microbatches never changes, because data-parallel ranks may communicate in
        each of them.
        """
        n = len(inputs)
        size = max(1, -(-n // self.microbatches)) * self.microbatches
        rows = torch.arange(size)
        rows[n:] = -1
        if size == n:
            return inputs, rows
        sample = inputs[:1] if n else inputs.new_zeros(1, *inputs.shape[1:])
        return torch.cat([inputs, sample.expand(size - n, *inputs.shape[1:])]), rows

    def _loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        assert self._loss_of is not None
        real = int((rows >= 0).sum())
        if real == 0:
            nothing: Tensor = outputs.sum() * 0.0
            return nothing
        start = int(rows[0])
        return self._loss_of(outputs[:real], slice(start, start + real))

    def _run_of(self, inputs: Tensor) -> tuple[Any, list[tuple[nn.Parameter, Tensor]]]:
        """Return the schedule for batches of this shape, and earlier gradients to add to its own.

        Stages of torch take one shape each. In its first run a stage drops the gradients of
        sharded parameters.
        """
        key = (tuple(inputs.shape), inputs.dtype)
        before: list[tuple[nn.Parameter, Tensor]] = []
        if self._on_any(key not in self._made):
            self._made[key] = self._new_run(inputs)
            sharded = [s for s in self.stages.values() if isinstance(s, FSDPModule)]
            for parameter in (p for stage in sharded for p in stage.parameters()):
                if parameter.grad is not None:
                    before.append((parameter, parameter.grad))
                    parameter.grad = None
        self._made.move_to_end(key)
        while len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return self._made[key], before

    def _on_any(self, new: bool) -> bool:
        """Return whether a data-parallel rank needs a new schedule.

        Building one runs the model, in which data-parallel ranks communicate, so all of them build
        one. On the host, so that no accelerator is waited for.
        """
        if self.across is None or self.across.size() == 1:
            return new
        on_any = torch.tensor([new], dtype=torch.int32)
        dist.all_reduce(on_any, dist.ReduceOp.MAX, group=self.across)
        return bool(on_any)

    def _new_run(self, inputs: Tensor) -> Any:
        # Imported here, because the import takes as long as that of the rest of this package.
        from torch.distributed import pipelining

        stages = [
            pipelining.PipelineStage(
                stage,
                number,
                self.count,
                self.device,
                input_args=before,
                output_args=after,
                group=self.group,
            )
            for (number, stage), (before, after) in zip(
                self.stages.items(), self._shapes(inputs), strict=True
            )
        ]
        kind: Any = getattr(pipelining, _SCHEDULES[self.schedule])
        several = SCHEDULES[self.schedule].stages_per_rank > 1
        return kind(
            stages if several else stages[0],
            self.microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _shapes(self, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return meta tensors like the input and the output of each stage of this rank.

        By a forward pass of one microbatch. torch would infer shapes from uninitialised inputs,
        which differ between ranks, so that routers would send tokens to different experts.
        """
        modes = {module: module.training for s in self.stages.values() for module in s.modules()}
        try:
            for stage in self.stages.values():
                stage.eval()  # Without dropout, and without updates of running statistics.
            with torch.no_grad():
                passed = self._forward_pass([inputs[: len(inputs) // self.microbatches]])
        finally:
            for module, training in modes.items():
                module.training = training
        shapes = []
        for number in self.stages:
            before, after = (half.to("meta") for half in passed[number][0])
            shapes.append((before.requires_grad_(number > 0), after.requires_grad_()))
        return shapes
