"""Average gradients over data-parallel ranks while the backward pass goes on.

As in DDP (Li et al. 2020, arXiv 2006.15704, section 3.2): the all-reduce of a bucket starts when
autograd has accumulated its last gradient. Unlike in DDP, nothing is final before
:meth:`Averaging.finish`: if a gradient was written to after its bucket was sent (by a second
backward pass, or by the user), all are averaged again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.clip.shard import local
from runner.parallel.collectives import buckets, flat_of, on_any_rank
from runner.parallel.gradient_sync import Replicas, average
from runner.parallel.hooks import register_post_accumulate
from runner.parallel.mesh import twin


class Averaging:
    """Averages the gradients of replicas, bucket by bucket from the backward pass on.

    Every rank sends the same buckets in the same order: one is sent early when its gradients and
    those of all buckets before it are complete; :meth:`finish` sends the others. Buckets have a
    process group of their own, because ranks that use different parameters send them at different
    places among their other collectives. A backward pass accumulates a gradient as often as
    ``backwards`` says (1 if not given); those ``waiting`` are complete only after it. Both by ids.
    """

    held = False  # whether backward passes run under ``no_sync`` now, and send nothing

    def __init__(
        self, replicas: Replicas, backwards: Mapping[int, int], waiting: Collection[int]
    ) -> None:
        alone = replicas.group is None or replicas.group.size() == 1
        late = [p for p in replicas.parameters if alone or id(p) in waiting]
        self._late = replace(replicas, parameters=late)
        self._parameters = [p for p in replicas.parameters if not (alone or id(p) in waiting)]
        self._early = replace(replicas, parameters=self._parameters)
        self._group = None if alone or replicas.group is None else twin(replicas.group)
        self._backwards = backwards
        self._begin()
        weak = ref(self)  # A hook lives as long as its parameter.

        def note(parameter: Tensor) -> None:
            if (averaging := weak()) is not None and not averaging.held:
                averaging._note(id(parameter))

        for parameter in self._parameters:
            register_post_accumulate(note, parameter)

    def _begin(self) -> None:
        """Begin a step: divide the trained parameters into buckets, none of which is sent."""
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        order = [p for p in reversed(self._parameters) if p.requires_grad]
        self._open = [len(bucket) for bucket in buckets([local(p) for p in order])]
        rest = iter(order)
        self._buckets = [list(islice(rest, length)) for length in self._open]
        self._bucket_of = {id(p): at for at, bucket in enumerate(self._buckets) for p in bucket}
        self._left = {id(p): self._backwards.get(id(p), 1) for p in order}
        self._sent: list[tuple[list[Any], Tensor, dist.Work]] = []

    def _note(self, key: int) -> None:
        if key not in self._left:
            return  # It was frozen when the step began.
        self._left[key] -= 1
        if self._left[key] == 0:
            self._open[self._bucket_of[key]] -= 1
            while len(self._sent) < len(self._open) and self._open[len(self._sent)] == 0:
                self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Send the next bucket; a gradient that this rank does not have is zero."""
        bucket = self._buckets[len(self._sent)]
        flat = flat_of([local(torch.zeros_like(p) if p.grad is None else p.grad) for p in bucket])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._sent.append(([_written(p) for p in bucket], flat, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Average all gradients over ranks, as :func:`average`; every rank calls it once a step."""
        changed = [p.requires_grad for p in self._parameters] != self._trained or any(
            now[0] is not then[0] or now[1] != then[1]
            for bucket, (before, *_) in zip(self._buckets, self._sent, strict=False)
            for now, then in zip(map(_written, bucket), before, strict=True)
        )
        # Ranks agree on the host, so that no accelerator is waited for.
        flags = [changed, *(p.grad is not None for p in self._parameters)]
        if self._parameters:
            flags = on_any_rank(flags, self._early.group)
        used = {id(p) for p, by_any in zip(self._parameters, flags[1:], strict=True) if by_any}
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (_, flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            parts = torch.split(flat, [local(p).numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                if id(parameter) in used and not flags[0]:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    gradient = local(parameter.grad)
                    torch.mul(part.view_as(gradient), 1.0 / self._early.divisor, out=gradient)
        self._begin()
        if flags[0]:
            average(self._early)
        average(self._late)


def _written(parameter: nn.Parameter) -> tuple[Tensor | None, int]:
    return parameter.grad, 0 if parameter.grad is None else local(parameter.grad)._version
