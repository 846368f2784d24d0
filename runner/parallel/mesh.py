"""The named axes along which ranks are laid out: stages, data, experts, tensor.

Rank r of ``pp × dp × tp`` ranks lies at pipeline stage ``r // (dp·tp)``, data part ``r // tp % dp``
and tensor part ``r % tp``: ranks that exchange most (tensor) are neighbours. Experts are spread
over ``ep`` neighbouring data parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis; their product is the number of ranks.

    Attributes:
        dp: data parts.
        tp: parts of each split weight.
        pp: ranks that pipeline stages are dealt to.
        ep: of the data parts, how many share one set of experts; it divides ``dp``.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(
        cls, ranks: int, dp: int | None = None, tp: int = 1, pp: int = 1, ep: int = 1
    ) -> MeshSizes:
        """The sizes on ``ranks`` ranks; data parts are what is left of them.

        Raises:
            ValueError: the sizes do not multiply to the ranks; the message has the numbers.
        """
        asked = dp or max(1, ranks // (tp * pp))
        product = asked * tp * pp
        if product != ranks:
            raise ValueError(
                f"dp_size {asked} x tp_size {tp} x pp_size {pp} = {product} ranks, but there are "
                f"{ranks}"
            )
        if asked % ep:
            raise ValueError(f"ep_size {ep} does not divide the {asked} data-parallel ranks")
        return cls(asked, tp, pp, ep)


_grids: dict[tuple[str, tuple[int, ...], tuple[str, ...]], tuple[Any, DeviceMesh]] = {}


def grid(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a grid. One that was made before is handed out again.

    Each group of ranks has threads and sockets of its own, which torch keeps as long as something
    of the model lives: a process that trains many models, one after the other, would gather them.

    Args:
        device_type: of the tensors that travel.
        shape: ranks along each axis; their product is the number of ranks.
        names: of the axes.
    """
    asked, world = (device_type, shape, names), dist.group.WORLD
    made_in, mesh = _grids.get(asked, (None, None))
    if mesh is None or made_in is not world:
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        _grids[asked] = world, mesh
    return mesh


class Axes:
    """The axes as one device mesh, and where this rank lies on them.

    Args:
        device_type: of the tensors that travel.
        sizes: of the axes.
    """

    def __init__(self, device_type: str, sizes: MeshSizes) -> None:
        self.sizes = sizes
        shape = (sizes.pp, sizes.dp // sizes.ep, sizes.ep, sizes.tp)
        self._mesh = grid(device_type, shape, ("pp", "edp", "ep", "tp"))
        self.dp = self._mesh["edp", "ep"]._flatten("dp")

    @property
    def tp(self) -> DeviceMesh:
        """Ranks that hold parts of the same weights."""
        return self._mesh["tp"]

    @property
    def pp(self) -> DeviceMesh:
        """Ranks that hold the stages of one pipeline."""
        return self._mesh["pp"]

    @property
    def ep(self) -> DeviceMesh:
        """Data parts that share one set of experts."""
        return self._mesh["ep"]

    @property
    def edp(self) -> DeviceMesh:
        """Data parts that hold the same experts."""
        return self._mesh["edp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along ``axis`` that this rank is one of."""
        mesh: DeviceMesh = getattr(self, axis)
        return mesh.get_group()


def position(rank: int, sizes: MeshSizes) -> tuple[int, int, int]:
    """Where ``rank`` lies: pipeline rank, data part, tensor part."""
    return rank // (sizes.dp * sizes.tp), rank // sizes.tp % sizes.dp, rank % sizes.tp
