"""Where the units of all shards of a rank lie in one vector, and what of them the rank counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from runner.gradients import transfer
from runner.gradients.kernels import kernels_of
from runner.gradients.plain import TensorUnits
from runner.gradients.shard import ParamShard


@dataclass(slots=True)
class Place:
    """Where the units of one shard lie in the vector."""

    number: int  # of the shard in the layout
    shard: ParamShard
    present: bool  # this rank has a gradient
    left_out: bool  # measured as one unit, which is not clipped
    of_tensor: TensorUnits
    start: int = 0

    @classmethod
    def of_shard(cls, number: int, shard: ParamShard, present: bool, left_out: bool) -> Place:
        shape = shard.units.first(shard.weight).shape
        kept = 0 if left_out else len(shape) - len(shard.units.dims)
        of_tensor = TensorUnits(
            kept=kept,
            units=prod(shape[:kept]),
            length=prod(shape[kept:]),
            dtype=shard.weight.dtype,
            packs=present and not left_out,
        )
        return cls(number, shard, present, left_out, of_tensor)

    @property
    def order(self) -> tuple[bool, str, int, int, int]:
        """Those left out come last, and units of one type and length are side by side."""
        units = self.of_tensor
        return self.left_out, str(units.dtype), units.length, units.units, self.number

    @property
    def weight(self) -> float:
        """1 ÷ the ranks that count each unit; 0 where nothing is clipped."""
        sharing = prod(group.size() for group in self.shard.shard_groups)
        return 0.0 if self.left_out else 1.0 / (self.shard.num_replicas * sharing)

    @property
    def stop(self) -> int:
        return self.start + self.of_tensor.units

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Return a view of the tensor of this shard with the dimensions that index units first."""
        tensor = tensors[self.number]
        if tensor is None or not self.of_tensor.kept:
            return tensor
        return self.shard.units.first(tensor)


class UnitIndex:
    """The order of all units of this rank; the first ``units`` are clipped.

    Shards that are left out come last, each as one unit, because the total norm needs them. A shard
    without a gradient takes part where other ranks may have one.

    Args:
        shards: all shards on this rank.
        present: whether this rank has a gradient of each.
        left_out: whether each is left out.
    """

    def __init__(
        self, shards: Sequence[ParamShard], present: Sequence[bool], left_out: Sequence[bool]
    ) -> None:
        self.present = list(present)
        self._device = shards[0].param.device if shards else torch.device("cpu")
        places = []
        for number, shard in enumerate(shards):
            if present[number] or (shard.shard_groups and not left_out[number]):
                places.append(Place.of_shard(number, shard, present[number], left_out[number]))
        self._places = sorted(places, key=lambda place: place.order)
        start = 0
        for place in self._places:
            place.start = start
            start = place.stop
        self._clipped = [place for place in self._places if not place.left_out]
        self.units = self._clipped[-1].stop if self._clipped else 0
        self.weights = {place.weight for place in self._clipped}
        self._share = self._each_unit(lambda place: 1.0 / place.shard.num_replicas)
        self._weights = self._each_unit(lambda place: place.weight)[: self.units]
        has_gradient = self._each_unit(lambda place: float(place.present))
        self._present = has_gradient[: self.units] > 0
        is_cut = self._each_unit(lambda place: float(bool(place.shard.shard_groups)))
        self._cut = is_cut[: self.units] > 0
        self._cuts = self._positions_by_group()
        kernel = kernels_of(self._device).UnitKernel
        self._all = kernel([place.of_tensor for place in self._places], self._device)
        self._of_clipped = kernel([place.of_tensor for place in self._clipped], self._device)

    def _positions_by_group(self) -> list[tuple[dist.ProcessGroup, Tensor]]:
        """Return the groups that share units, each with the positions of its units."""
        by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        positions = torch.arange(self.units, device=self._device)
        # Ranks that share units have them in the order of the layout.
        for place in sorted(self._clipped, key=lambda place: place.number):
            for group in place.shard.shard_groups:
                by_group.setdefault(group, []).append(positions[place.start : place.stop])
        return [(group, torch.cat(parts)) for group, parts in by_group.items()]

    def _each_unit(self, value: Callable[[Place], float]) -> Tensor:
        """Return the value of its place for each unit."""
        units = [place.of_tensor.units for place in self._places]
        sizes = transfer.on_device(units, self._device).long()
        values = transfer.on_device([value(place) for place in self._places], self._device)
        # Told the size of the result, an accelerator is not waited for.
        size = self._places[-1].stop if self._places else 0
        return torch.repeat_interleave(values, sizes, output_size=size)

    def norms(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """Return the norms of all units, given the tensor of each shard; see the kernel."""
        return self._all.norms([place.of(tensors) for place in self._places], dtype)

    def norms_of_clipped(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """Return the norms of the units that are clipped, [units]."""
        return self._of_clipped.norms([place.of(tensors) for place in self._clipped], dtype)

    def scale(self, tensors: Sequence[Tensor | None], coefs: Tensor, dtype: torch.dtype) -> None:
        """Multiply the units that are clipped by their coefficients, [units], in place."""
        of_clipped = [place.of(tensors) for place in self._clipped]
        self._of_clipped.scale(of_clipped, coefs, dtype)

    def power(self, norms: Tensor) -> Tensor:
        """Return this rank's share of ‖G‖², given the norms of all units."""
        return torch.dot(norms.square(), self._share)

    def counted(self, gradients: Tensor) -> Tensor:
        """Return the share of each clipped unit that this rank counts, given gradients' norms."""
        # A unit without a gradient here counts where another rank has one.
        return self._weights.where(self._present | (gradients > 0), 0.0)

    def complete(self, norms: Tensor) -> Tensor:
        """Complete the norms [2, units] of units that a shard boundary cuts: one buffer a group.

        Collectives run whether or not this rank has a gradient: an absent one adds zeros.
        """
        if not self._cuts:
            return norms
        powers = norms.square()
        for group, positions in self._cuts:
            part = powers[:, positions]
            dist.all_reduce(part, group=group)
            powers[:, positions] = part
        return powers.sqrt().where(self._cut, norms)
