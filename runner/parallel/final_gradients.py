"""Tell when gradients become final in a backward pass, before the pass is over.

In one process a gradient is final when autograd has accumulated it, under DDP when its bucket was
averaged over the ranks, and under ``fully_shard`` when the reduce-scatter of its block has run.
Under the last two, backward passes inside ``no_sync`` tell nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.parallel.collectives import on_any_rank
from runner.parallel.hooks import Usage, register_post_accumulate

# This module has no `from __future__ import annotations`: DDP reads those of a communication hook.

Final = Callable[[Sequence[Tensor]], None]
"""Called with parameters whose ``.grad`` is final."""


def watch_parameters(model: nn.Module, final: Final) -> None:
    """Call ``final`` with each parameter of a model that is whole in this process.

    A gradient that shares memory with another one, or with a tensor that the backward pass still
    needs, is copied before, so that it can be changed.
    """
    usual: list[int] = []  # of a gradient that shares its memory with no other
    single = nn.Parameter(torch.ones(2))
    register_post_accumulate(lambda p: usual.append(_uses(p.grad)), single)
    with torch.enable_grad():
        (single * 2.0).sum().backward()  # type: ignore[no-untyped-call]

    def note(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            if _uses(gradient) > usual[0]:
                parameter.grad = gradient.clone()
            del gradient
        final([parameter])

    for parameter in model.parameters():
        register_post_accumulate(note, parameter)


def _uses(tensor: Any) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Buckets:
    def __init__(self, model: DistributedDataParallel, final: Final) -> None:
        self._group: dist.ProcessGroup = model.process_group
        self._final = final
        # Buckets whose all-reduce was started: parameters, their gradients (views of the buffer),
        # the buffer, the all-reduce, and the future that DDP waits for at the end of the pass.
        self._waiting: deque[tuple[list[Tensor], list[Tensor], Tensor, Any, Any]] = deque()
        self._used: set[int] | None = None  # parameters used since the last bucket with them
        # The first backward pass of a static graph reduces all buckets at its end, and waits there.
        self._first, self._began = bool(model.static_graph), False
        if model.find_unused_parameters or model.static_graph:
            self._used = set()
            for parameter in model.parameters():
                register_post_accumulate(self._note, parameter)

    def _note(self, parameter: Tensor) -> None:
        assert self._used is not None
        self._first = self._first and not self._began
        self._used.add(id(parameter))

    def reduce(self, bucket: Any) -> Any:
        buffer, done = bucket.buffer(), torch.futures.Future()  # type: ignore[var-annotated]
        buffer.mul_(1.0 / self._group.size())  # as DDP does it, so that sums have the same bits
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._began = True
        if not (self._waiting or self._first):
            # DDP itself queues what ends its backward pass after the last bucket, so after this.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_all)
        self._waiting.append((bucket.parameters(), bucket.gradients(), buffer, work, done))
        if self._first or len(self._waiting) > 1:
            self._finish()
        return done

    def _finish_all(self) -> None:
        while self._waiting:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the oldest bucket, and make its gradients those of the parameters."""
        parameters, gradients, buffer, work, done = self._waiting.popleft()
        work.wait()
        used = [True] * len(parameters)
        if self._used is not None:
            used = on_any_rank([id(p) in self._used for p in parameters], self._group)
            self._used.difference_update(map(id, parameters))
        final = []
        for parameter, gradient, by_any in zip(parameters, gradients, used, strict=True):
            if by_any:
                # Further microbatches may be added to the first gradient of a static graph.
                parameter.grad = gradient.clone() if self._first else gradient
                final.append(parameter)
        self._final(final)
        done.set_result(buffer)


def watch_buckets(model: DistributedDataParallel, final: Final) -> None:
    """Call ``final`` with the parameters of each bucket of DDP.

    A gradient is a view of its bucket then, and stays one, as with ``gradient_as_bucket_view``.
    With ``find_unused_parameters`` there is one collective of host memory for each bucket: which of
    its parameters any rank has used.
    """
    buckets = _Buckets(model, final)
    model.register_comm_hook(buckets, lambda state, bucket: state.reduce(bucket))
    # Otherwise DDP would copy the buckets to `.grad` at the end of the backward pass.
    model.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]


def watch_blocks(model: nn.Module, usage: Usage, group: dist.ProcessGroup, final: Final) -> None:
    """Call ``final`` with the parameters of each block that ``fully_shard`` reduces together.

    One collective of host memory for each block: which of its parameters any rank has used.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def watch(named: dict[str, nn.Parameter]) -> None:
        seen: set[int] = set()

        def note(parameter: Tensor) -> None:
            if id(parameter) in seen:
                seen.clear()  # not all of them had a gradient in the last backward pass
            seen.add(id(parameter))
            trained = {name: p for name, p in named.items() if p.requires_grad}
            if seen.issuperset(map(id, trained.values())):
                seen.clear()
                usage.drop_unused(trained, group)
                final([p for p in trained.values() if p.grad is not None])

        for parameter in named.values():
            register_post_accumulate(note, parameter)

    for block in usage.blocks:
        watch({names[id(parameter)]: parameter for parameter in block})
