"""How many ranks a run has, and how they are divided among the kinds of parallelism.

All arithmetic of ranks is here: the check of a request, the plugins, ``plan`` and the checks before
a run ask this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm, prod
from typing import NamedTuple, Protocol

from runner.config.environment import started_nodes, started_rank
from runner.config.notation import plural
from runner.config.problem import or_list


class Asked(Protocol):
    """The sizes of section ``plugin``."""

    @property
    def name(self) -> str: ...
    @property
    def nproc(self) -> int | None: ...
    @property
    def nnodes(self) -> int | None: ...
    @property
    def dp_size(self) -> int | None: ...
    @property
    def tp_size(self) -> int | None: ...
    @property
    def pp_size(self) -> int | None: ...
    @property
    def ep_size(self) -> int | None: ...


class SizeError(ValueError):
    """Sizes that do not multiply to the number of ranks."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class MeshSizes(NamedTuple):
    """Number of ranks along each axis of the device mesh; dp · tp · pp is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """World size."""
        return self.dp * self.tp * self.pp

    @classmethod
    def of(
        cls,
        ranks: int,
        dp_size: int | None = None,
        tp_size: int | None = 1,
        pp_size: int | None = 1,
        ep_size: int | None = 1,
        *,
        started: bool = True,
        nodes: int = 1,
    ) -> MeshSizes:
        """Divide ``ranks`` among the axes."""
        given = _given(dp_size, tp_size, pp_size)
        rest = _open_size(given)
        product = prod(given.values())
        if rest is None and ranks != product:
            way = _way_out([product], started, nodes)
            raise SizeError("nproc", f"{ranks} ranks are not {_product(given)}: {way}")
        if ranks % product:
            below = ranks - ranks % product
            way = _way_out([below, below + product], started, nodes)
            raise SizeError("nproc", f"{ranks} ranks are no multiple of {_product(given)}: {way}")
        if rest is not None:
            given[rest] = ranks // product
        dp = given.get("dp_size", 1)
        ep = dp if ep_size is None else ep_size
        if dp % ep:
            fitting = [str(size) for size in range(1, dp + 1) if dp % size == 0]
            section = "" if started else "plugin."
            way = f"give {section}ep_size={or_list(fitting)}, or another {section}dp_size"
            message = f"{ep} ranks cannot share the experts of {dp} data-parallel ranks evenly"
            raise SizeError("ep_size", f"{message}: {way}")
        return cls(dp, given.get("tp_size", 1), given.get("pp_size", 1), ep)


def sizes(plugin: Asked, ranks: int, *, started: bool = False) -> MeshSizes:
    """Divide ``ranks`` among the axes as the section ``plugin`` asks."""
    if plugin.name == "single" and ranks != 1:
        message = f"plugin=single is one process, not {ranks} ranks; plugin=ddp spreads over ranks"
        raise SizeError("nproc", message)
    each = (plugin.dp_size, plugin.tp_size, plugin.pp_size, plugin.ep_size)
    nodes = _nodes(plugin, started)
    found = MeshSizes.of(ranks, *each, started=started, nodes=nodes)
    joined = started_rank()
    local = joined.local_world_size if started and joined else ranks // nodes
    if nodes > 1 and local % found.tp:
        fitting = or_list(str(size) for size in range(1, local + 1) if local % size == 0)
        raise SizeError(
            "tp_size",
            f"tensor-parallel ranks stay on one machine, and {found.tp} do not divide the {local} "
            f"ranks of a machine (plugin.nnodes={nodes}): give {fitting}",
        )
    return found


def _nodes(plugin: Asked, started: bool) -> int:
    """Return the number of machines of the run."""
    there, asked = started_nodes() if started else None, plugin.nnodes
    if there is None or asked is None:
        return asked or there or 1
    joined = started_rank()
    if there != asked:
        raise SizeError(
            "nnodes", f"{plural(there, 'machine')} started ranks: give {there}, or leave it out"
        )
    if joined is not None and plugin.nproc not in (None, joined.local_world_size):
        local = joined.local_world_size
        message = f"this machine has {plural(local, 'rank')}: give {local}, or leave it out"
        raise SizeError("nproc", message)
    return asked


def data_parallel_size(plugin: Asked, ranks: int) -> int:
    """Return the data-parallel size on ``ranks`` ranks; all ranks if the sizes do not fit them."""
    try:
        return sizes(plugin, ranks).dp
    except SizeError:
        return ranks


def least_ranks(plugin: Asked) -> int:
    """Return the world size to start: ``nnodes`` x ``nproc``, or the product of the given sizes."""
    nodes = plugin.nnodes or 1
    if plugin.nproc is not None:
        return nodes * plugin.nproc
    experts = (plugin.ep_size or 1) if plugin.dp_size is None else 1
    sized = experts * prod(_given(plugin.dp_size, plugin.tp_size, plugin.pp_size).values())
    return lcm(sized, nodes * (plugin.tp_size or 1)) if nodes > 1 else sized


def may_grow(plugin: Asked) -> bool:
    """Return whether more ranks than `least_ranks` fit: ``nproc`` and one of the sizes are null."""
    given = _given(plugin.dp_size, plugin.tp_size, plugin.pp_size)
    return plugin.name != "single" and plugin.nproc is None and _open_size(given) is not None


def ranks_of(plugin: Asked, gpus: int = 0) -> int:
    """Return the world size of a run that this process starts or belongs to."""
    if (joined := joined_ranks()) is not None:
        return joined
    least, gpus = least_ranks(plugin), gpus * (plugin.nnodes or 1)
    return max(least, gpus - gpus % least) if may_grow(plugin) else least


def joined_ranks() -> int | None:
    """Return the number of ranks that torchrun or Slurm started; None without such a launcher."""
    started = started_rank()
    return None if started is None else started.world_size


def _given(dp_size: int | None, tp_size: int | None, pp_size: int | None) -> dict[str, int]:
    values = {"dp_size": dp_size, "tp_size": tp_size, "pp_size": pp_size}
    return {key: value for key, value in values.items() if value is not None}


def _open_size(given: Mapping[str, int]) -> str | None:
    """Return the size that takes the ranks which the others leave; None if all are given."""
    return next((key for key in ("tp_size", "pp_size", "dp_size") if key not in given), None)


def _way_out(fitting: Sequence[int], started: bool, nodes: int) -> str:
    if started:
        return f"start {or_list(str(many) for many in fitting if many)} ranks by torchrun"
    local = [str(many // nodes) for many in fitting if many and many % nodes == 0]
    if not local:
        return "give another plugin.nnodes"
    return f"give plugin.nproc={or_list(local)}, or leave it out"


def _product(given: Mapping[str, int]) -> str:
    factors = {key: size for key, size in given.items() if size > 1} or given
    text = " x ".join(f"{key} {size}" for key, size in factors.items())
    return text if len(factors) == 1 else f"{text} = {prod(factors.values())}"
