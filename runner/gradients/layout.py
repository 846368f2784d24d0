"""Where every gradient element of a model lives; modes use nothing else of a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.config.problem import NOTHING
from runner.gradients import transfer
from runner.gradients.account import account
from runner.gradients.shard import (
    ParamShard,
    Whole,
    is_sharded,
    local_gradients,
    placed,
)
from runner.gradients.units import head_weights, owned_parameters, units_of

_STORAGE = attrgetter("layout")


class OptionError(ValueError):
    """An option, such as ``links.0.exclude``, that does not fit the model.

    ``value`` is the wrong value, if the option is inside of another one.
    """

    def __init__(self, option: str, message: str, value: Any = NOTHING) -> None:
        super().__init__(message)
        self.option = option
        self.value = value


class OwnClip(NamedTuple):
    """What a parameter group of an optimizer says of clipping: ``"clip": False`` or a threshold."""

    group: str  # such as ``param_groups.1``
    names: frozenset[str]
    threshold: float | None  # None: the parameters are not clipped


class Layout:
    """All shards on this rank, and the ranks that together hold the whole model.

    Args:
        shards: one shard for each parameter; one that is given twice counts once.
        group: ranks whose values are summed. None if this rank holds the whole model (one process,
            or data-parallel replicas whose gradients were averaged).
        heads: names of the weights of the model's heads, which adaptive clipping leaves out.
        parameters: all parameters of the model by name, also those that lie on other ranks alone,
            in one order for all ranks; by default the parameters of ``shards``.
        elsewhere: device type of the other ranks, for a rank without shards.

    Attributes:
        names: names of all parameters of the model, in one order for all ranks.
        own_clips: what parameter groups of optimizers say of clipping, the same on every rank.
        orthogonalized: names of the matrices of Muon, the same on every rank. Muon divides by the
            norm of a whole matrix: a small coefficient pushes it below the constant in the divisor.
        heads_known: whether ``heads`` has the heads of the whole model. It has not where ranks
            hold different models.

    Raises:
        TypeError: a parameter is complex.
    """

    def __init__(
        self,
        shards: Iterable[ParamShard],
        group: dist.ProcessGroup | None = None,
        heads: Sequence[str] = (),
        parameters: Mapping[str, Whole] | None = None,
        elsewhere: str = "cpu",
    ) -> None:
        by_id: dict[int, ParamShard] = {}
        for shard in shards:
            if shard.param.is_complex():
                raise TypeError(f"{shard.name} is complex: clipping is defined on real parameters")
            by_id.setdefault(id(shard.param), shard)
        self.shards = list(by_id.values())
        self.group = group
        self.heads = tuple(heads)
        self.parameters = parameters or {shard.name: Whole.of(shard) for shard in self.shards}
        self.names = list(self.parameters)
        self.own_clips: tuple[OwnClip, ...] = ()
        self.orthogonalized: frozenset[str] = frozenset()
        self.heads_known = True
        self._elsewhere = elsewhere
        self._constants: dict[str, tuple[list[int], Tensor]] = {}
        self._restricted: dict[frozenset[str], Layout] = {}
        self._common_replicas: int | None = None  # once asked, where all shards have the same
        self._waiting: Tensor | None = None  # what travels with the next ``totals``
        self._arrived: Tensor | None = None  # its sum

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Position of each parameter in ``names``."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def shards_are_parameters(self) -> bool:
        """Whether this rank has a shard of each parameter, in the order of ``names``."""
        return [shard.name for shard in self.shards] == self.names

    def positions_of(self, shards: Sequence[ParamShard]) -> Tensor:
        """Return the position in ``names`` of each of these shards, on the device."""
        return self.constant("positions", shards, lambda shard: self.positions[shard.name]).long()

    def replicas_of(self, shards: Sequence[ParamShard]) -> Tensor:
        """Return ``num_replicas`` of each of these shards, on the device."""
        return self.constant("replicas", shards, lambda shard: shard.num_replicas)

    def common_replicas(self, shards: Sequence[ParamShard]) -> int | None:
        """Return ``num_replicas`` of these shards; None if they do not all have the same."""
        if shards is self.shards and self._common_replicas is not None:
            return self._common_replicas
        numbers = {shard.num_replicas for shard in shards}
        if len(numbers) != 1:
            return None
        replicas = numbers.pop()
        if shards is self.shards:
            self._common_replicas = replicas
        return replicas

    def constant(
        self, name: str, shards: Sequence[ParamShard], value: Callable[[ParamShard], float]
    ) -> Tensor:
        """Return a value of each of these shards, [shards], on the device.

        It is kept under ``name`` until it is asked of other shards, so that a step makes no tensor
        of numbers of the host.
        """
        ids = [id(shard) for shard in shards]
        if name in self._constants:
            of_ids, tensor = self._constants[name]
            if of_ids == ids and self._holds(tensor):
                return tensor
        tensor = transfer.on_device([value(shard) for shard in shards], self.device)
        self._constants[name] = (ids, tensor)
        return tensor

    def number(self, value: float) -> Tensor:
        """Return a number of the host as a 0-dimensional tensor on the device."""
        return transfer.number(value, self.device)

    @property
    def counts_common(self) -> bool:
        """Whether this rank counts what all ranks know: the first rank does."""
        return self.group is None or self.group.rank() == 0

    @classmethod
    def of_model(cls, model: nn.Module) -> Layout:
        """Return the layout of a model that lies on this rank, or is sharded over all ranks."""
        if any(is_sharded(parameter) for parameter in model.parameters()):
            assert dist.group.WORLD is not None
            return cls.of_sharded(model, dist.group.WORLD)
        owned = owned_parameters(model)
        shards = (ParamShard(name, p, units_of(p, module)) for name, p, module in owned)
        return cls(shards, heads=head_weights(model))

    @classmethod
    def of_sharded(
        cls,
        model: nn.Module,
        group: dist.ProcessGroup,
        whole: Mapping[str, int] | None = None,
        ranks: Callable[[str], int] | None = None,
        renamed: Mapping[str, str] | None = None,
        heads: Sequence[str] | None = None,
    ) -> Layout:
        """Return the layout that DTensor placements describe; a plain parameter is whole.

        A few collectives of ``group``, all ranks that hold any part of ``model``: there is a
        ``LayoutError`` if they do not count each of the ``whole`` model's elements, by name, once.
        ``ranks`` of a name are those that hold a shard or a replica, by default all. ``renamed``
        has the name of a tied parameter by the name of its copy.
        """
        by_id: dict[int, ParamShard] = {}
        for name, parameter, module in owned_parameters(model):
            if id(parameter) not in by_id:
                spread = group.size() if ranks is None else ranks(name)
                original = name if renamed is None else renamed.get(name, name)
                by_id[id(parameter)] = placed(original, parameter, module, spread)
        shards = list(by_id.values())
        sizes = {shard.name: shard.param.numel() for shard in shards} if whole is None else whole
        parameters, elsewhere = account(shards, group, sizes)
        if heads is None:
            heads = head_weights(model)
        return cls(shards, group, heads, parameters, elsewhere)

    @classmethod
    def of_parameters(
        cls, parameters: Sequence[Tensor], kind: type[ParamShard] = ParamShard
    ) -> Layout:
        """Return the layout of whole tensors; dimension 0 of each is taken to index outputs."""
        for i, parameter in enumerate(parameters):
            if is_sharded(parameter):
                raise TypeError(f"parameters[{i}] is sharded over ranks: give the whole model")
        return cls(kind(f"parameters[{i}]", p, units_of(p)) for i, p in enumerate(parameters))

    def restricted(self, names: Iterable[str]) -> Layout:
        """Return the layout of some parameters, over the same ranks, which all know ``names``."""
        kept = frozenset(names)
        if kept in self._restricted:
            return self._restricted[kept]
        restricted = Layout(
            [shard for shard in self.shards if shard.name in kept],
            self.group,
            [head for head in self.heads if head in kept],
            {name: whole for name, whole in self.parameters.items() if name in kept},
            self.device.type,
        )
        restricted.heads_known = self.heads_known
        restricted.orthogonalized = self.orthogonalized & kept
        for clip in self.own_clips:
            kept_of_group = clip.names & kept
            if kept_of_group:
                restricted.own_clips += (clip._replace(names=kept_of_group),)
        self._restricted[kept] = restricted
        return restricted

    @property
    def device(self) -> torch.device:
        """Device on which values are summed; its type is the same on all ranks."""
        return self.shards[0].param.device if self.shards else torch.device(self._elsewhere)

    def _holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device of the model, which may have been moved."""
        device = self.device
        return tensor.device.type == device.type and device.index in (None, tensor.device.index)

    def gradients(self) -> tuple[list[ParamShard], list[Tensor]]:
        """Return the shards that have a gradient of at least one element, and these gradients."""
        # Each step reads them twice: loops without bytecode, where every shard has a gradient.
        shards = self.shards
        gradients = local_gradients(shards)
        if NoneType in {*map(type, gradients)} or not all(map(Tensor.numel, gradients)):
            pairs = [
                (shard, gradient)
                for shard, gradient in zip(shards, gradients, strict=True)
                if gradient is not None and gradient.numel() > 0
            ]
            shards = [shard for shard, _ in pairs]
            gradients = [gradient for _, gradient in pairs]
        if {*map(_STORAGE, gradients)} - {torch.strided}:
            for shard, gradient in zip(shards, gradients, strict=True):
                if gradient.layout is not torch.strided:
                    text = f"{shard.name} has a sparse gradient: build the layer with sparse=False"
                    raise TypeError(text)
        return shards, gradients

    @torch.no_grad()
    def separate_gradients(self) -> bool:
        """Give each gradient its own memory, to clip none twice; return whether any shared it.

        Autograd may give two parameters one tensor, as for ``torch.stack([a, b]).sum(0)``.
        """
        seen: set[int] = set()
        shared = False
        for shard in self.shards:
            gradient = shard.gradient
            if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
                continue
            if gradient.data_ptr() in seen and shard.param.grad is not None:
                shard.param.grad = shard.param.grad.clone()
                shared = True
            seen.add(gradient.data_ptr())
        return shared

    def totals(self, sums: Sequence[Tensor] = (), maxima: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return sums over all ranks, then maxima, of 0-dimensional tensors, in one collective.

        For a handful of values: each rank receives values times ranks. Every rank adds the same
        rows in the same order, so that all get the same bits. Vectors over parameters or units
        travel by :meth:`sum` and :meth:`max`. There is no collective where all is on this rank.
        """
        values = [*sums, *maxima]
        if self.group is None:
            return values
        if self._waiting is not None:
            further = self._waiting
            self._waiting = None
            self._arrived, *totals = self.totals([further, *sums], maxima)
            return totals
        rows = transfer.start_gather(torch.stack(values), self.group)()
        summed = rows[:, : len(sums)].sum(0)
        largest = rows[:, len(sums) :].amax(0)
        return [*summed.unbind(), *largest.unbind()]

    def send_along(self, value: Tensor) -> Callable[[], Tensor]:
        """Let a 0-dimensional tensor travel with the next :meth:`totals`; return its sum, later.

        Without any totals until then, it travels alone.
        """
        self._waiting = value

        def wait() -> Tensor:
            if self._waiting is not None:
                self.totals()
            assert self._arrived is not None
            return self._arrived

        return wait

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of the vectors of all ranks, the same bits on every rank."""
        if self.group is None or not vector.numel():
            return vector
        return transfer.sum_over_ranks(vector, self.group)

    def max(self, vector: Tensor) -> Tensor:
        """Return the maximum of the vectors of all ranks, NaN where any rank has NaN."""
        if self.group is None or not vector.numel():
            return vector
        return transfer.max_over_ranks(vector, self.group)
