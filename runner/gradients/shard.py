"""The part of one parameter that lies on this rank, and what DTensor placements say of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from runner.gradients.units import Units, units_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class LayoutError(ValueError):
    """A layout that does not account for every element of a model exactly once."""


@dataclass(frozen=True, slots=True, eq=False)
class ParamShard:
    """The part of one parameter that lies on this rank.

    Attributes:
        name: the parameter's qualified name in the user's model, or another one that tells apart
            parameters of the same name on different ranks.
        param: the parameter; only the local shard of a DTensor is used.
        units: how the local shard is divided into units.
        num_replicas: ranks of the layout's group that hold these same elements (replicas).
        shard_groups: groups of ranks over which each unit is split, one for each mesh axis that
            splits units. All ranks of these groups see the same number of units.
        base: the qualified name in the user's model, where ``name`` is another one.
    """

    name: str
    param: Tensor
    units: Units
    num_replicas: int = 1
    shard_groups: tuple[dist.ProcessGroup, ...] = ()
    base: str = ""

    @property
    def weight(self) -> Tensor:
        """Local shard of the weight, a plain tensor without autograd history."""
        return local(self.param) if is_dtensor(self.param) else self.param.detach()

    @property
    def gradient(self) -> Tensor | None:
        """Local shard of the gradient, a plain tensor; None if there is no gradient."""
        gradient = self.param.grad
        return None if gradient is None else local(gradient)

    def with_units(self, units: Units) -> ParamShard:
        """Return the same shard with other units, and the shard groups that follow from them."""
        groups = _cut(self.param, units) if is_dtensor(self.param) else self.shard_groups
        return replace(self, units=units, shard_groups=groups)


class WeakShard(ParamShard):
    """A shard that does not keep its parameter alive: its user does."""

    __slots__ = ("_reference",)
    _reference: TensorWeakRef

    @property
    def param(self) -> Any:
        """The parameter; None once it is gone."""
        return self._reference()

    @param.setter
    def param(self, parameter: Tensor) -> None:
        # The class of shards is frozen.
        object.__setattr__(self, "_reference", TensorWeakRef(parameter))


def is_dtensor(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor, without importing DTensor where there are none."""
    imported = sys.modules.get("torch.distributed.tensor")
    return imported is not None and isinstance(tensor, imported.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and any other tensor as it is."""
    # `to_local()` would add a node to the graph, or a view.
    return getattr(tensor, "_local_tensor", tensor)


def local_gradients(shards: Sequence[ParamShard]) -> list[Any]:
    """Return the local shard of each gradient, None where there is none."""
    gradients: list[Any] = [shard.param.grad for shard in shards]
    if not {type(gradient) for gradient in gradients} - {Tensor, NoneType}:
        return gradients  # the usual case, in a tenth of the time
    for number, (shard, gradient) in enumerate(zip(shards, gradients, strict=True)):
        if hasattr(gradient, "_local_tensor"):
            gradients[number] = gradient._local_tensor
            placements = gradient.placements
            if placements == getattr(shard.param, "placements", None):
                continue  # a parameter has no partial placement
            if any(placement.is_partial() for placement in placements):
                raise TypeError(f"{shard.name} has a gradient that its ranks have not added up yet")
    return gradients


def add_up_gradient(parameter: Tensor) -> None:
    """Give a DTensor a gradient of its own placements, if its ranks have only partial sums.

    Such is the gradient of a norm under sequence parallelism, each rank of which has its part of
    the sequence. Then this is a collective of the parameter's mesh.
    """
    gradient = parameter.grad
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return
    if any(placement.is_partial() for placement in gradient.placements):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor that is not a replica on all mesh axes."""
    return is_dtensor(tensor) and not all(p.is_replicate() for p in tensor.placements)


class Whole(NamedTuple):
    """What every rank knows of a parameter, whichever ranks hold it; see :class:`ParamShard`."""

    shape: tuple[int, ...]
    known: bool
    base: str = ""

    @classmethod
    def of(cls, shard: ParamShard) -> Whole:
        shape = tuple(shard.param.shape)
        return cls(shape, shard.units.known, shard.base)


def placed(name: str, parameter: Tensor, module: nn.Module, ranks: int) -> ParamShard:
    """Return the shard of ``parameter`` on this rank, if ``ranks`` ranks hold the parameter."""
    units = units_of(parameter, module)
    if not is_dtensor(parameter):
        return ParamShard(name, parameter, units, num_replicas=ranks)
    parts = 1
    for axis, placement in _shards(parameter):
        if not hasattr(placement, "dim"):
            raise TypeError(f"{name} is placed {placement}: neither a replica nor a shard")
        if units.groups and placement.dim == 0:
            raise TypeError(
                f"{name} is of a transposed convolution with groups: shard it along dimension 1"
            )
        parts *= parameter.device_mesh.size(axis)
    if ranks % parts:
        raise LayoutError(f"{name} is split in {parts}, which does not divide its {ranks} ranks")
    return ParamShard(name, parameter, units, ranks // parts, _cut(parameter, units))


def position_of(parameter: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the place of this rank along the mesh axes that split ``parameter``, and its parts.

    Ranks that hold the same elements have the same place. A whole parameter has the place ``()``.
    """
    position: list[int] = []
    parts = 1
    if is_dtensor(parameter):
        for axis, _ in _shards(parameter):
            position.append(parameter.device_mesh.get_local_rank(axis))
            parts *= parameter.device_mesh.size(axis)
    return tuple(position), parts


def _shards(parameter: DTensor) -> Iterator[tuple[int, Any]]:
    """Yield the mesh axes of several ranks along which ``parameter`` is not a replica."""
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
            yield axis, placement


def _cut(parameter: DTensor, units: Units) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks that share units: one for each mesh axis that cuts units."""
    return tuple(
        parameter.device_mesh.get_group(axis)
        for axis, placement in _shards(parameter)
        if placement.dim + bool(units.groups) in units.dims
    )
