"""The device mesh: which ranks share pipelines, data, experts and weights.

Rank r of ``pp × dp × tp`` ranks has pipeline rank ``r // (dp·tp)``, data-parallel rank
``r // tp % dp`` and tensor-parallel rank ``r % tp``, so ranks that communicate most (tensor) are
neighbours. ``ep`` neighbouring data-parallel ranks share one set of experts.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.config.sizes import MeshSizes

_grids: dict[tuple[str, tuple[int, ...], tuple[str, ...]], tuple[Any, DeviceMesh]] = {}


def grid(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a device mesh of all ranks, the same object for the same arguments.

    Each process group has its own threads and sockets, which torch keeps as long as a part of the
    model lives. A process that trains many models in turn would collect them.

    Args:
        device_type: device type of the tensors.
        shape: number of ranks along each axis; the product is the world size.
        names: names of the axes.
    """
    asked, world = (device_type, shape, names), dist.group.WORLD
    made_in, mesh = _grids.get(asked, (None, None))
    if mesh is None or made_in is not world:
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        _grids[asked] = world, mesh
    return mesh


class Axes:
    """The device mesh of a plugin, and its slices.

    Args:
        device_type: device type of the tensors.
        sizes: size of each axis.

    Attributes:
        dp: data-parallel ranks.
    """

    def __init__(self, device_type: str, sizes: MeshSizes) -> None:
        self.sizes = sizes
        shape = (sizes.pp, sizes.dp // sizes.ep, sizes.ep, sizes.tp)
        self._mesh = grid(device_type, shape, ("pp", "edp", "ep", "tp"))
        self.dp = self._mesh["edp", "ep"]._flatten("dp")

    @property
    def tp(self) -> DeviceMesh:
        """Ranks that hold shards of the same weights."""
        return self._mesh["tp"]

    @property
    def pp(self) -> DeviceMesh:
        """Ranks that hold the stages of one pipeline."""
        return self._mesh["pp"]

    @property
    def ep(self) -> DeviceMesh:
        """Data-parallel ranks that share one set of experts."""
        return self._mesh["ep"]

    @property
    def edp(self) -> DeviceMesh:
        """Data-parallel ranks that hold the same experts."""
        return self._mesh["edp"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks along ``axis`` to which this rank belongs."""
        mesh: DeviceMesh = getattr(self, axis)
        return mesh.get_group()


def position(rank: int, sizes: MeshSizes) -> tuple[int, int, int]:
    """Return the pipeline, data-parallel and tensor-parallel rank of ``rank``."""
    return rank // (sizes.dp * sizes.tp), rank // sizes.tp % sizes.dp, rank % sizes.tp
