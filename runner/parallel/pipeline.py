"""Pipeline parallelism by torch's schedules: consecutive layers are on different ranks.

Schedules: GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved 1F1B (Narayanan et al.
2021, arXiv 2104.04473), zero bubble in its V form (Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runner.gradients.shard import local
from runner.parallel.collectives import on_any_rank
from runner.parallel.gradient_sync import written
from runner.parallel.hooks import AfterBatch, Apart, register
from runner.parallel.sharding import reshard
from runner.parallel.stages import SCHEDULES, Stage, stage_to_rank

# Returns the summed loss of some samples, given their outputs and their slice of the batch.
LossOf = Callable[[Tensor, slice], Tensor]

_KEPT = 4  # schedules, one per shape of a batch; each has buffers for its microbatches
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
_SHAPE = 10  # numbers before a tensor outside of a schedule: dtype, dimensions, padding


@dataclass(eq=False)
class Pipeline:
    """The stages of this rank, and the schedules that run them."""

    stages: dict[int, Stage]  # of this rank, by number
    count: int  # of all stages
    schedule: str
    microbatches: int
    group: dist.ProcessGroup
    device: torch.device
    across: dist.ProcessGroup | None = None  # data-parallel ranks that wait in forward passes
    after_batch: AfterBatch = field(default_factory=lambda: AfterBatch(()))  # hooks of the user's

    def __post_init__(self) -> None:
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._loss_of: LossOf | None = None
        self._apart = Apart()
        self._after: tuple[Tensor | None, Any] = (None, 0)
        for stage in self.stages.values():
            for parameter in () if isinstance(stage, FSDPModule) else stage.parameters():
                register(self._apart, parameter)
        self.after_batch.begin()
        if self.last:
            self.stages[self.count - 1].ends = True

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, which has the outputs and the loss."""
        return self.count - 1 in self.stages

    def train(self, inputs: Tensor, loss_of: LossOf, kept: list[Tensor] | None = None) -> Tensor:
        """Run forward and backward passes of a batch, and accumulate gradients.

        Return the summed loss, 0 on all stages but the last, which adds its outputs to ``kept``.
        """
        padded, rows = self._padded(inputs)
        run, before = self._run_of(padded)
        self._apart.seen.clear()
        losses: list[Tensor] = []
        self._loss_of = loss_of
        outputs = run.step(
            *([padded] if 0 in self.stages else []),
            target=rows if self.last else None,
            losses=losses if self.last else None,
            return_outputs=kept is not None,
        )
        self._loss_of = None
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self.after_batch.run()
        self._after = self._last_gradient()
        if kept is not None and outputs is not None:
            kept.append(outputs.detach()[: len(inputs)])
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _last_gradient(self) -> tuple[Tensor | None, Any]:
        parameters = [p for stage in self.stages.values() for p in stage.parameters()]
        with_gradient = [p for p in parameters if p.grad is not None]
        gradient, version = written(with_gradient[-1]) if with_gradient else (None, 0)
        if gradient is None or gradient.is_cuda:  # An accelerator is not waited for.
            return gradient, version
        # Operations on lists of DTensors are no new version.
        return gradient, (version, str(local(gradient).flatten()[:1].tolist()))

    def require_unchanged(self) -> None:
        """Refuse, on all ranks, gradients that were changed in place since the batch.

        Hooks after accumulation that were registered after boost have changed parts of them.
        """
        gradient_after_batch, version_after_batch = self._after
        gradient, version = self._last_gradient()
        self._after = (None, 0)
        was_changed = gradient is gradient_after_batch and version != version_after_batch
        flags = [was_changed, self.after_batch.has_more()]
        changed, has_more_hooks = on_any_rank(flags, self.group)
        if has_more_hooks:
            raise ValueError(
                "a hook of register_post_accumulate_grad_hook was registered after boost, and runs "
                "once for each microbatch of a pipeline: register it on the model before boost"
            )
        if changed:
            raise ValueError(
                "gradients were changed in place after the backward pass, and a rank of a pipeline "
                "has only the gradients of its stages: use optimizer.clip_grad_by_norm, or "
                "register_hook"
            )

    @contextmanager
    def in_eval(self) -> Iterator[None]:
        """Context of forward passes without dropout and without updates of running statistics."""
        modes = {module: module.training for s in self.stages.values() for module in s.modules()}
        try:
            for stage in self.stages.values():
                stage.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs [B, ...] of a batch on the last stage, None on the others."""
        padded, _ = self._padded(inputs)
        passed = self._forward(padded.chunk(self.microbatches))
        if not self.last:
            return None
        return torch.cat([out for _, out in passed[self.count - 1]])[: len(inputs)]

    def _padded(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch padded to whole microbatches, and the sample of each row (-1: padding).

        Their number never changes: data-parallel ranks may communicate in each of them.
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
        samples = int((rows >= 0).sum())
        if samples > 0:
            start = int(rows[0])
            return self._loss_of(outputs[:samples], slice(start, start + samples))
        nothing: Tensor = outputs[:0].sum()  # 0, also where outputs are infinite
        return nothing

    def _run_of(self, inputs: Tensor) -> tuple[Any, list[tuple[nn.Parameter, Tensor]]]:
        """Return the schedule for batches of this shape, and gradients that its first run drops.

        Building one runs the model, in which data-parallel ranks may communicate: all do if any
        needs it.
        """
        key = (tuple(inputs.shape), inputs.dtype)
        before: list[tuple[nn.Parameter, Tensor]] = []
        if any(on_any_rank([key not in self._made], self.across)):
            self._made[key] = self._new_run(inputs)
            for stage in self.stages.values():
                for parameter in stage.parameters() if isinstance(stage, FSDPModule) else ():
                    if parameter.grad is not None:
                        before.append((parameter, parameter.grad))
                        parameter.grad = None
        self._made.move_to_end(key)
        while len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return self._made[key], before

    def _new_run(self, inputs: Tensor) -> Any:
        """Return a schedule, after a forward pass of one microbatch for the shapes of its stages.

        torch would infer shapes from uninitialised inputs, which routers send to other experts.
        """
        # Imported here, because this import takes as long as the rest of this package.
        from torch.distributed import pipelining

        with self.in_eval(), torch.no_grad():
            passed = self._forward([inputs[: len(inputs) // self.microbatches]])
        stages = []
        for number, stage in self.stages.items():
            inputs_of_stage, outputs_of_stage = passed[number][0]
            stages.append(
                pipelining.PipelineStage(
                    stage,
                    number,
                    self.count,
                    self.device,
                    input_args=inputs_of_stage.to("meta").requires_grad_(number > 0),
                    output_args=outputs_of_stage.to("meta").requires_grad_(),
                    group=self.group,
                )
            )
        schedule = SCHEDULES[self.schedule]
        make: Any = getattr(pipelining, schedule.kind)
        return make(
            stages if schedule.stages_per_rank > 1 else stages[0],
            self.microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _forward(self, chunks: Sequence[Tensor]) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """Return input and output of each stage of this rank, for each microbatch, in order."""
        passed: dict[int, list[tuple[Tensor, Tensor]]] = {}
        sent: list[tuple[Tensor, Any]] = []
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
            work.wait()
        # There is no backward pass to reshard parameters before the next batch.
        reshard(self.stages.values())
        return passed

    def _send(self, hidden: Tensor, stage: int) -> list[tuple[Tensor, Any]]:
        home = stage_to_rank(stage, self.group.size(), self.schedule)
        shape = [_DTYPES.index(hidden.dtype), hidden.ndim, *hidden.shape]
        padded = torch.tensor(shape + [0] * (_SHAPE - len(shape)), device=self.device)
        parts = (padded, hidden.contiguous())
        return [(part, dist.isend(part, group=self.group, group_dst=home)) for part in parts]

    def _receive(self, stage: int) -> Tensor:
        home = stage_to_rank(stage, self.group.size(), self.schedule)
        shape = torch.zeros(_SHAPE, dtype=torch.int64, device=self.device)
        dist.recv(shape, group=self.group, group_src=home)
        kind, n, *sizes = shape.tolist()
        hidden = torch.empty(sizes[:n], dtype=_DTYPES[kind], device=self.device)
        dist.recv(hidden, group=self.group, group_src=home)
        return hidden
