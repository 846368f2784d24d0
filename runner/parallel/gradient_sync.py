"""Make gradients final once per step: sum or average what the ranks that share a parameter have.

Not in each backward pass: gradients of tied copies, and partial gradients, would then be added to
sums that already contain them. :class:`Averaging` begins in the last one of a window, as in DDP (Li
et al. 2020, arXiv 2006.15704, section 3.2), but nothing is final before :meth:`Averaging.finish`:
if a later backward pass wrote to a gradient whose bucket was sent, or the window was dropped, all
are averaged again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.gradients.shard import local
from runner.parallel.bucket import Bucket, divided
from runner.parallel.collectives import all_reduce, broadcast, on_any_rank
from runner.parallel.hooks import register
from runner.parallel.mesh import Axes, split_parameters


class Replicas(NamedTuple):
    """Parameters that the ranks of a group hold copies of, and train on different samples."""

    parameters: Sequence[nn.Parameter]  # in the same order on every rank of the group
    group: dist.ProcessGroup | None  # None if their gradients are already summed
    # The data-parallel size, also for experts, whose gradients are summed over their group already
    divisor: int


def replicas_of(
    model: nn.Module, axes: Axes, experts: frozenset[str], *, sharded: bool
) -> list[Replicas]:
    """Return the parameters whose gradients are averaged, with the ranks that hold copies.

    Args:
        model: this rank's part of the model.
        axes: the axes of the device mesh.
        experts: names of the parameters of experts.
        sharded: whether ``fully_shard`` has averaged the gradients.
    """
    shared, expert = split_parameters(model, experts)
    if sharded:
        # fully_shard divides by the ranks that hold the same expert: ``ep`` times too few.
        return [Replicas(list(expert.values()), None, axes.ep.size())] if experts else []
    data = Replicas(list(shared.values()), axes.dp.get_group(), axes.dp.size())
    if not experts:
        return [data]
    return [data, Replicas(list(expert.values()), axes.edp.get_group(), axes.dp.size())]


@torch.no_grad()
def average(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, divisor: int
) -> None:
    """Average gradients in place; where only some ranks have one, it is zero on the others."""
    trained = [p for p in parameters if p.requires_grad]
    if group is None or group.size() == 1:
        gradients = [local(p.grad) for p in trained if p.grad is not None]
        if gradients and divisor != 1:
            torch._foreach_mul_(gradients, 1.0 / divisor)
        return
    if not trained:
        return
    has_gradient = on_any_rank([p.grad is not None for p in trained], group)
    used = [p for p, by_any in zip(trained, has_gradient, strict=True) if by_any]
    all_reduce([_gradient_or_zeros(parameter) for parameter in used], group, divisor)


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return the local gradient; without one, zeros become the gradient."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


class _Use(NamedTuple):
    """The last user of a group, and what it has sent and not finished."""

    user: ReferenceType[Any]
    sent: list[Any]


_groups: dict[Any, dict[Any, _Use]] = {}  # by world and ranks


def own_group(user: object, sends: list[Any], shared: Any) -> Any:
    """Return a group of the ranks of ``shared`` for ``user`` alone, an old one if one is free.

    Ranks that use different parameters send at different places, and a group keeps threads.
    """
    world = dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(shared))
    uses = _groups.setdefault((world, ranks), {})
    # All ranks of the world decide alike: torch numbers groups by counting them.
    taken = on_any_rank([use.user() is not None or bool(use.sent) for use in uses.values()], world)
    free = [group for group, is_taken in zip(uses, taken, strict=True) if not is_taken]
    group = free[0] if free else dist.new_group(ranks, use_local_synchronization=True)
    uses[group] = _Use(ref(user), sends)
    return group


class Averaging:
    """Averages the gradients of replicas, bucket by bucket from the backward pass on.

    Every rank sends the same buckets in the same order: one is sent early when its gradients are
    complete and all buckets before it are sent, in a group of its own. :meth:`finish` sends the
    others. On a CPU the last one is small, and carries what ranks agree on.

    Args:
        replicas: the parameters, and the ranks that hold copies of them.
        backwards: number of backward passes of a window, outside of ``no_sync``, that accumulate
            the gradient of a parameter, by its id; 1 by default.
        waiting: ids of parameters whose gradients are averaged in :meth:`finish` alone.
    """

    held = False  # whether backward passes run under ``no_sync`` now, and send nothing

    def __init__(
        self, replicas: Replicas, backwards: Mapping[int, int], waiting: Collection[int]
    ) -> None:
        self._shared = replicas.group
        self._divisor = replicas.divisor
        self._sent: list[Bucket] = []
        self._group = None
        self._late = list(replicas.parameters)
        self._parameters: list[nn.Parameter] = []
        if self._shared is not None and self._shared.size() > 1:
            self._group = own_group(self, self._sent, self._shared)
            self._late = [p for p in replicas.parameters if id(p) in waiting]
            self._parameters = [p for p in replicas.parameters if id(p) not in waiting]
        self._backwards = backwards
        self._carries = any(p.device.type == "cpu" for p in self._parameters)
        self._trained: list[bool] | None = None
        self._begin()
        reference = ref(self)  # A hook lives as long as its parameter.

        def note(parameter: Tensor) -> None:
            averaging = reference()
            if averaging is not None:
                averaging._note(parameter)

        for parameter in self._parameters:
            register(note, parameter, after=True)

    def _begin(self) -> None:
        """Begin a step: no gradient is complete, and no bucket sent."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:
            self._trained = trained
            self._divide()
        for bucket in self._buckets:
            bucket.open = len(bucket.parameters)
        self._passes_left = dict(self._passes)
        self._sent.clear()
        self._written: dict[int, tuple[Tensor | None, int]] = {}  # what autograd wrote last

    def _divide(self) -> None:
        """Divide the trained parameters into buckets, in the order of the backward pass."""
        order = [p for p in reversed(self._parameters) if p.requires_grad]
        runs = divided(order)
        if self._carries and not runs:
            runs = [[]]
        self._buckets = [Bucket(run) for run in runs]
        if self._carries:
            # changed in place, and written to after it was sent; which parameters have a gradient
            self._buckets[-1] = Bucket(runs[-1], flags=2 + len(self._parameters))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._passes = {id(p): self._backwards.get(id(p), 1) for p in order}

    def _note(self, parameter: Tensor) -> None:
        key = id(parameter)
        self._written[key] = written(parameter)
        if self.held or key not in self._passes_left:
            return  # Or it was frozen when the step began.
        self._passes_left[key] -= 1
        if self._passes_left[key] == 0:
            self._bucket_of[key].open -= 1
            early = len(self._buckets) - self._carries
            while len(self._sent) < early and self._buckets[len(self._sent)].open == 0:
                self._send()

    @torch.no_grad()
    def _send(self, flags: Sequence[bool] = ()) -> None:
        """Send the next bucket; the last one with ``flags``."""
        bucket = self._buckets[len(self._sent)]
        last = self._carries and bucket is self._buckets[-1]
        group = self._shared if last else self._group  # sent at the same place by all ranks
        assert group is not None
        bucket.send(group, self._divisor, flags if last else ())
        self._sent.append(bucket)

    @torch.no_grad()
    def finish(self) -> None:
        """Average all gradients over ranks, as :func:`average`; every rank calls it once a step."""
        changed, wrote = self._changes()
        flags = [changed, wrote, *(p.grad is not None for p in self._parameters)]
        if self._parameters and not self._carries:  # on the host: no accelerator is waited for
            flags = on_any_rank(flags, self._shared)
        while len(self._sent) < len(self._buckets):
            self._send(flags)
        # The last one first: it has the time limit of the shared group.
        carried = [bucket.wait() for bucket in reversed(self._sent)]
        if self._carries:
            flags = carried[0]
        if flags[1]:
            raise ValueError(
                "gradients were changed in place before they were averaged over ranks: call "
                "optimizer.unscale() first, or clip by optimizer.clip_grad_by_norm"
            )
        if not flags[0]:
            used = {id(p) for p, by_any in zip(self._parameters, flags[2:], strict=True) if by_any}
            for bucket in self._buckets:
                bucket.hand_out(used)
        self._begin()
        if flags[0]:
            average(self._parameters, self._shared, self._divisor)
        average(self._late, self._shared, self._divisor)

    def _changes(self) -> tuple[bool, bool]:
        """Return whether what was sent is no longer what there is, and whether it was written to.

        Only the second answer waits for an accelerator, where a gradient was written to: zeros are
        what ``zero_grad`` has left of a window.
        """
        changed = [p.requires_grad for p in self._parameters] != self._trained
        changed |= min(self._passes_left.values(), default=0) < 0
        wrote = False
        for parameter in self._parameters:
            if id(parameter) not in self._written:
                continue
            last_gradient, last_version = self._written[id(parameter)]
            gradient, version = written(parameter)
            if gradient is not last_gradient:
                changed = True
            elif version != last_version:
                changed = True
                wrote |= gradient is not None and bool(local(gradient).any())
        return changed, wrote


def written(parameter: Tensor) -> tuple[Tensor | None, int]:
    """Return the gradient of a parameter, and a number that changes when it is written in place."""
    gradient = parameter.grad
    if gradient is None:
        return None, 0
    version = gradient._version
    if type(gradient) is not Tensor:  # a DTensor and its shard count by themselves
        version += local(gradient)._version
    return gradient, version


@torch.no_grad()
def sum_partial(parameters: Iterable[DTensor], group: dist.ProcessGroup) -> None:
    """Sum partial gradients over tensor ranks, such as gradients of norms along the sequence."""
    partial = [parameter for parameter in parameters if _has_partial_gradient(parameter)]
    parts = [cast(DTensor, parameter.grad).to_local() for parameter in partial]
    all_reduce(parts, group)
    for parameter, summed in zip(partial, parts, strict=True):
        parameter.grad = DTensor.from_local(
            summed,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _has_partial_gradient(parameter: DTensor) -> bool:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return False
    return any(placement.is_partial() for placement in gradient.placements)


def tied_copies(
    model: nn.Module, copies: Mapping[str, Sequence[int]], renamed: Mapping[str, str], axes: Axes
) -> list[Callable[[], None]]:
    """Return what sums the gradients of each parameter that several stages use, see ``OwnStages``.

    Every rank has to call this, because torch numbers process groups by counting them.
    """
    sums: list[Callable[[], None]] = []
    pipelines = axes.dp.size() * axes.tp.size()
    for name, where in copies.items():
        ranks = sorted(set(where))
        group: Any = None  # all copies are on one rank
        if len(ranks) == axes.pp.size():
            group = axes.pp.get_group()
        elif len(ranks) > 1:
            group, _ = dist.new_subgroups_by_enumeration(
                [[rank * pipelines + i for rank in ranks] for i in range(pipelines)]
            )
        on_rank = [p for path, p in model.named_parameters() if renamed.get(path, path) == name]
        if on_rank:
            sums.append(_summing(name, on_rank, group))
    return sums


def _summing(
    name: str, copies: Sequence[nn.Parameter], group: dist.ProcessGroup | None
) -> Callable[[], None]:
    return lambda: sum_copies(name, copies, group)


@torch.no_grad()
def sum_copies(name: str, copies: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of the copies of a tied parameter, on this rank and in ``group``."""
    trains = [parameter.requires_grad for parameter in copies]
    has_gradient = [parameter.grad is not None for parameter in copies]
    flags = [any(trains), not all(trains), any(has_gradient)]
    trained, frozen, used = on_any_rank(flags, group)
    if trained and frozen:
        raise ValueError(
            f"{name} is tied across pipeline stages, and frozen on some of them alone: call "
            "requires_grad_ on each module that uses it, on every rank"
        )
    if frozen or not used:
        return
    gradients = [_gradient_or_zeros(parameter) for parameter in copies]
    summed = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0].contiguous()
    if group is not None:
        dist.all_reduce(summed, group=group)
    for gradient in gradients:
        gradient.copy_(summed)


def broadcast_buffers(model: nn.Module, axes: Axes, experts: frozenset[str]) -> Callable[[], None]:
    """Return a function that gives all ranks the statistics that the first one has updated."""
    # By module and key, because a forward pass may replace a buffer by a new tensor.
    shared: list[tuple[nn.Module, str]] = []
    of_experts: list[tuple[nn.Module, str]] = []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                places = of_experts if f"{prefix}.{key}".lstrip(".") in experts else shared
                places.append((module, key))

    def broadcast_all() -> None:
        _broadcast_buffers(shared, axes.dp.get_group())
        _broadcast_buffers(of_experts, axes.edp.get_group())

    return broadcast_all


def _broadcast_buffers(places: Iterable[tuple[nn.Module, str]], group: Any) -> None:
    buffers = [module._buffers[key] for module, key in places]
    broadcast([buffer for buffer in buffers if buffer is not None], group)


class Partition:
    """ZeRO stage 1: each rank steps some of the parameters (ids: ``mine``), and broadcasts them.

    Rajbhandari et al. 2020 (arXiv 1910.02054, section 5.1). Whole parameters are assigned to ranks,
    largest first, each to the rank with the fewest elements. So any optimizer works: it sees whole
    tensors, and has the state of the assigned parameters alone.
    """

    def __init__(self, replicas: Sequence[Replicas]) -> None:
        self._shares: list[tuple[dist.ProcessGroup, list[list[nn.Parameter]]]] = []
        mine: set[int] = set()
        for copies in replicas:
            group = copies.group
            assert group is not None
            shares: list[list[nn.Parameter]] = [[] for _ in range(group.size())]
            loads = [0] * len(shares)
            for parameter in sorted(copies.parameters, key=lambda p: -p.numel()):
                least = loads.index(min(loads))
                shares[least].append(parameter)
                loads[least] += parameter.numel()
            mine.update(id(parameter) for parameter in shares[group.rank()])
            self._shares.append((group, shares))
        self.mine = frozenset(mine)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Send each parameter from the rank that has stepped it; a collective."""
        for group, shares in self._shares:
            for owner, parameters in enumerate(shares):
                stepped = [local(p).detach() for p in parameters if p.requires_grad]
                broadcast(stepped, group, owner)


def nothing() -> None:
    """Do nothing."""


@torch.no_grad()
def in_turn(calls: Iterable[Callable[[], None]]) -> None:
    """Call functions one after the other, on every rank in the same order."""
    for call in calls:
        call()
