"""Average gradients over data-parallel ranks while the backward pass goes on.

As in DDP (Li et al. 2020, arXiv 2006.15704, section 3.2): parameters are divided into buckets in
reverse order, and the all-reduce of a bucket starts when autograd has accumulated its last
gradient. Unlike in DDP, nothing is final before :meth:`Averaging.finish`: if a gradient was written
to after its bucket was sent (by a second backward pass, or by the user), all are averaged again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip.shard import local
from runner.parallel.buckets import buckets, flat_of, on_any_rank
from runner.parallel.gradient_sync import Replicas, average
from runner.parallel.hooks import register_post_accumulate
from runner.parallel.mesh import twin

GIVE_UP = 3
"""Steps in a row whose gradients changed after they were sent, after which none are sent early."""


class _Sent(NamedTuple):
    """A bucket on its way.

    Attributes:
        gradients: each gradient when the bucket was sent, with how many times it had been written
            to; None where there was none.
        flat: the bucket.
        work: its all-reduce.
    """

    gradients: Sequence[tuple[Tensor, int] | None]
    flat: Tensor
    work: dist.Work


class Averaging:
    """Averages the gradients of replicas, bucket by bucket from the backward pass on.

    Every rank sends the same buckets in the same order: one is sent early when its gradients and
    those of all buckets before it are complete; :meth:`finish` sends the others. Buckets have a
    process group of their own, because ranks that use different parameters send them at different
    places among their other collectives.

    Attributes:
        held: whether backward passes run under ``no_sync`` now, and send nothing.
    """

    def __init__(self, replicas: Replicas, backwards: Mapping[int, int]) -> None:
        assert replicas.group is not None
        self.held = False
        self._replicas = replicas
        self._group = twin(replicas.group)
        self._backwards = [backwards.get(id(p), 1) for p in replicas.parameters]
        self._changed = 0  # steps in a row whose gradients changed after they were sent
        self._trained: list[bool] | None = None
        self._sent: dict[int, _Sent] = {}
        weak = ref(self)  # A hook lives as long as its parameter.
        for number, parameter in enumerate(replicas.parameters):
            register_post_accumulate(partial(_note, weak, number), parameter)

    def note(self, number: int) -> None:
        """Note that autograd has accumulated the gradient of parameter ``number``."""
        if self.held or self._changed >= GIVE_UP:
            return
        if self._trained is None:
            self._begin()
        if number not in self._left:
            return  # It was frozen when the step began.
        self._left[number] -= 1
        if self._left[number] == 0:
            self._open[self._bucket_of[number]] -= 1
            while len(self._sent) < len(self._open) and self._open[len(self._sent)] == 0:
                self._send(len(self._sent))

    @torch.no_grad()
    def finish(self) -> None:
        """Average all gradients over ranks; every rank calls this once a step.

        A gradient that no rank has stays None. One that only some ranks have is zero on the others.
        """
        if self._trained is None:
            self._begin()
        parameters, numbers = self._replicas.parameters, [*self._bucket_of]
        flags = [
            self._has_changed(),
            *(at in self._sent for at in range(len(self._buckets))),
            *(parameters[n].grad is not None for n in numbers),
        ]
        changed, *others = on_any_rank(flags, self._replicas.group)
        sent, present = others[: len(self._buckets)], others[len(self._buckets) :]
        used = {n for n, by_any in zip(numbers, present, strict=True) if by_any}
        for at, members in enumerate(self._buckets):
            if at not in self._sent and (sent[at] or (not changed and used.intersection(members))):
                self._send(at)
        for each in self._sent.values():
            each.work.wait()
        if changed:
            average(self._replicas)
        else:
            self._write(used)
        if self._changed < GIVE_UP:
            self._changed = self._changed + 1 if changed else 0
        self._trained, self._sent = None, {}

    def _begin(self) -> None:
        """Begin a step: divide the trained parameters into buckets, none of which is sent."""
        parameters = self._replicas.parameters
        self._trained = [parameter.requires_grad for parameter in parameters]
        order = [n for n in reversed(range(len(parameters))) if self._trained[n]]
        runs = [len(run) for run in buckets([local(parameters[n]) for n in order])]
        ends = accumulate(runs)
        self._buckets = [order[end - n : end] for n, end in zip(runs, ends, strict=True)]
        self._bucket_of = {n: at for at, members in enumerate(self._buckets) for n in members}
        self._left = {n: self._backwards[n] for n in self._bucket_of}
        self._open = [len(members) for members in self._buckets]

    @torch.no_grad()
    def _send(self, at: int) -> None:
        """Send bucket ``at``; a gradient that this rank does not have is zero."""
        parts: list[Tensor] = []
        gradients: list[tuple[Tensor, int] | None] = []
        for n in self._buckets[at]:
            parameter = self._replicas.parameters[n]
            if parameter.grad is None:
                parts.append(torch.zeros_like(local(parameter)))
                gradients.append(None)
            else:
                parts.append(local(parameter.grad))
                gradients.append((parameter.grad, parts[-1]._version))
        flat = flat_of(parts)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._sent[at] = _Sent(gradients, flat, work)

    def _has_changed(self) -> bool:
        """Return whether a gradient is not the one that was sent, or other parameters are trained.

        After such a step all gradients are averaged once more.
        """
        parameters = self._replicas.parameters
        if [parameter.requires_grad for parameter in parameters] != self._trained:
            return True
        for at, sent in self._sent.items():
            for n, before in zip(self._buckets[at], sent.gradients, strict=True):
                now = parameters[n].grad
                if before is None:
                    if now is not None:
                        return True
                elif now is not before[0] or local(now)._version != before[1]:
                    return True
        return False

    def _write(self, used: Collection[int]) -> None:
        """Write the averages to the gradients of the parameters ``used`` on any rank."""
        scale = 1.0 / self._replicas.divisor
        for at, sent in self._sent.items():
            members = [self._replicas.parameters[n] for n in self._buckets[at]]
            parts = torch.split(sent.flat, [local(parameter).numel() for parameter in members])
            for n, parameter, part in zip(self._buckets[at], members, parts, strict=True):
                if n not in used:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                gradient = local(parameter.grad)
                torch.mul(part.view_as(gradient), scale, out=gradient)


def averagings(
    replicas: Sequence[Replicas], backwards: Mapping[int, int], waiting: Collection[int]
) -> tuple[list[Averaging], list[Replicas]]:
    """Divide replicas into those averaged from the backward pass on, and those averaged after
    it.
    """
    early, late = [], []
    for each in replicas:
        if each.group is None or each.group.size() == 1:
            late.append(each)
            continue
        rest = [parameter for parameter in each.parameters if id(parameter) not in waiting]
        early.append(Averaging(replace(each, parameters=rest), backwards))
        if len(rest) < len(each.parameters):
            apart = [parameter for parameter in each.parameters if id(parameter) in waiting]
            late.append(replace(each, parameters=apart))
    return early, late


def _note(averaging: ReferenceType[Averaging], number: int, parameter: Tensor) -> None:
    found = averaging()
    if found is not None:
        found.note(number)


@contextmanager
def holding(averagings: Sequence[Averaging]) -> Iterator[None]:
    """Send nothing in backward passes inside: their gradients are not complete."""
    for each in averagings:
        each.held = True
    try:
        yield
    finally:
        for each in averagings:
            each.held = False
