"""Forward passes through pipeline stages, outside of torch's schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.parallel.sharding import reshard
from runner.parallel.stages import Part, stage_to_rank

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
"""Dtypes of tensors that are sent between stages."""


class Stage(nn.Module):
    """Consecutive parts of a model.

    Args:
        model: model that the parts belong to.
        parts: parts of this stage, in order.

    Attributes:
        dtype: half-precision dtype of autocast, or None.
        ends: whether this is the last stage, whose outputs are in full precision.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = [part.run for part in parts]
        names = [name for part in parts for name in part.modules]
        self.held = nn.ModuleList(model.get_submodule(name) for name in names)
        self.dtype: torch.dtype | None = None
        self.ends = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the stage, given inputs of the model or the output before it."""
        device = hidden.device.type
        with torch.autocast(device, self.dtype) if self.dtype is not None else nullcontext():
            for part in self.parts:
                hidden = part(hidden)
        half = hidden.dtype in (torch.float16, torch.bfloat16)
        return hidden.float() if self.ends and half else hidden


class ForwardPass:
    """Runs microbatches through the stages of all ranks, one stage after the other.

    Args:
        stages: stages of this rank, by number.
        count: number of stages of the pipeline.
        schedule: name of the schedule, which decides which rank holds which stages.
        group: ranks of the pipeline.
        device: device of this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        count: int,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.count = count
        self.schedule = schedule
        self.group = group
        self.device = device

    def __call__(self, chunks: Sequence[Tensor]) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """Return the input and the output of each stage of this rank, for each microbatch.

        Args:
            chunks: microbatches of inputs, equal on all ranks of the pipeline.
        """
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
        # There is no backward pass to reshard parameters before the next batch.
        reshard(self.stages.values())
        return passed

    def _send(self, hidden: Tensor, stage: int) -> list[tuple[Tensor, dist.Work | None]]:
        """Send shape and elements to the rank of ``stage``; return them until they have arrived."""
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
