"""Pipeline parallelism: runs of layers on different ranks, by torch's schedules.

How a model is cut: :mod:`runner.parallel.stages`.

Schedules: GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved 1F1B (Narayanan et al.
2021, arXiv 2104.04473), zero bubble in its V form (Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runner.config.schedules import SCHEDULES
from runner.parallel.sharding import reshard
from runner.parallel.stages import Part, stage_to_rank

LossOf = Callable[[Tensor, slice], Tensor]
"""The summed loss of some samples: given their outputs, and where they lie in the batch."""

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleZBVZeroBubble",
}
_KEPT = 4
"""Shapes of batches that the schedules are kept of; each has buffers for all its microbatches."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
"""Of what travels between stages."""


class Stage(nn.Module):
    """Some parts of a model, run one after the other.

    Args:
        model: whose parts they are.
        parts: of this stage.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = [part.run for part in parts]
        names = [name for part in parts for name in part.modules]
        self.held = nn.ModuleList(model.get_submodule(name) for name in names)
        self.dtype: torch.dtype | None = None
        self.ends = False

    def forward(self, hidden: Tensor) -> Tensor:
        """What the first stage gets of the batch, or the stage before put out, to this one's."""
        on = hidden.device.type
        with torch.autocast(on, self.dtype) if self.dtype is not None else nullcontext():
            for part in self.parts:
                hidden = part(hidden)
        half = hidden.dtype in (torch.float16, torch.bfloat16)
        return hidden.float() if self.ends and half else hidden


class Pipeline:
    """The stages on this rank, and the schedules that run them.

    Args:
        stages: by their number.
        count: stages in all.
        schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``.
        microbatches: parts that a batch is split into.
        group: the ranks of the pipeline.
        device: of this rank.
        across: the data-parallel ranks, where they wait for each other in forward passes.
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
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._loss_of: LossOf | None = None
        if self.last:
            stages[count - 1].ends = True

    @property
    def first(self) -> bool:
        """Whether batches enter here."""
        return 0 in self.stages

    @property
    def last(self) -> bool:
        """Whether outputs come out here."""
        return self.count - 1 in self.stages

    def autocast(self, dtype: torch.dtype | None) -> None:
        """Run all stages here in half precision ``dtype``; None: as they are."""
        for stage in self.stages.values():
            stage.dtype = dtype

    def train(self, inputs: Tensor, loss_of: LossOf) -> Tensor:
        """Forward and backward passes of a batch; gradients are added up.

        Args:
            inputs: [B, ...], the same on all ranks of the pipeline.
            loss_of: what the backward pass starts from, a sum over samples.

        Returns:
            The sum of what ``loss_of`` returned on the last stage; 0 on the others.
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
        """Outputs [B, ...] of a batch on the last stage, None on the others.

        Args:
            inputs: [B, ...], the same on all ranks of the pipeline.
        """
        padded, _ = self._padded(inputs)
        # In training mode batch norm would count these samples twice in its running statistics.
        before = [
            (module._buffers, name, buffer, None if buffer is None else buffer.clone())
            for stage in self.stages.values()
            if stage.training
            for module in stage.modules()
            for name, buffer in module._buffers.items()
        ]
        try:
            passed = self._walk(padded.chunk(self.microbatches))
        finally:
            for held, name, buffer, value in before:
                held[name] = buffer  # A forward pass may have put another tensor there.
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        if not self.last:
            return None
        return torch.cat([out for _, out in passed[self.count - 1]])[: len(inputs)]

    def _walk(self, chunks: Sequence[Tensor]) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """Forward passes of ``chunks``: what each of them was before and after each stage here."""
        passed: dict[int, list[tuple[Tensor, Tensor]]] = {}
        sent: list[tuple[Tensor, dist.Work | None]] = []
        for number in sorted(self.stages):
            if number == 0:
                arriving: Iterable[Tensor] = chunks
            elif number - 1 in self.stages:
                arriving = [out for _, out in passed[number - 1]]
            else:
                arriving = (self._receive(number - 1) for _ in chunks)
            passed[number] = []
            for hidden in arriving:
                out = self.stages[number](hidden)
                passed[number].append((hidden, out))
                if number + 1 < self.count and number + 1 not in self.stages:
                    sent += self._send(out, number + 1)
        for _, work in sent:
            if work is not None:
                work.wait()
        # No backward pass does it, and the next batch would begin with what is gathered now.
        reshard(self.stages.values())
        return passed

    def _send(self, hidden: Tensor, stage: int) -> list[tuple[Tensor, dist.Work | None]]:
        """Shape and elements to the rank of ``stage``; both are kept until they have left."""
        home = stage_to_rank(stage, self.group.size(), self.schedule)
        shape = torch.zeros(10, dtype=torch.int64)
        shape[0], shape[1] = _DTYPES.index(hidden.dtype), hidden.ndim
        shape[2 : 2 + hidden.ndim] = torch.tensor(hidden.shape)
        parts = (shape.to(self.device), hidden.contiguous())
        return [(part, dist.isend(part, group=self.group, group_dst=home)) for part in parts]

    def _receive(self, stage: int) -> Tensor:
        home = stage_to_rank(stage, self.group.size(), self.schedule)
        shape = torch.zeros(10, dtype=torch.int64, device=self.device)
        dist.recv(shape, group=self.group, group_src=home)
        kind, n, *sizes = shape.tolist()
        hidden = torch.empty(sizes[:n], dtype=_DTYPES[kind], device=self.device)
        dist.recv(hidden, group=self.group, group_src=home)
        return hidden

    def _padded(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """A batch that splits evenly, and the sample each row is, on the host; -1 where none.

        Never in fewer microbatches: data-parallel ranks may wait for each other in each of them.
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
        """The schedule for batches of this shape, and gradients to be added to those it makes.

        torch's stages know one shape each. One that runs for the first time drops the gradients
        that sharded parameters have.
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
        """Whether one of the data-parallel ranks that wait for each other needs a new schedule.

        It runs the model once more to make it, and gathers sharded parameters anew: so all of them
        make one. Told on the host, so that no accelerator is waited for.
        """
        if self.across is None or self.across.size() == 1:
            return new
        told = torch.tensor([new], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.across)
        return bool(told)

    def _new_run(self, inputs: Tensor) -> Any:
        # Imported where it is used: it takes as long as the rest of this package.
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
        """What goes into and comes out of each stage here, as tensors without elements.

        By a forward pass of one microbatch. torch would find out by itself, but with arbitrary
        numbers, which differ between ranks: a router would send them different ways.
        """
        modes = {module: module.training for s in self.stages.values() for module in s.modules()}
        try:
            for stage in self.stages.values():
                stage.eval()  # Draws no dropout and moves no running statistics.
            with torch.no_grad():
                passed = self._walk([inputs[: len(inputs) // self.microbatches]])
        finally:
            for module, training in modes.items():
                module.training = training
        shapes = []
        for number in self.stages:
            before, after = (half.to("meta") for half in passed[number][0])
            shapes.append((before.requires_grad_(number > 0), after.requires_grad_()))
        return shapes
