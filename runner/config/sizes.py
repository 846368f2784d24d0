"""How many ranks a run has, and how they are divided among the kinds of parallelism.

All arithmetic of ranks is here: the check of a request, the plugins, ``plan`` and the checks before
a run ask this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm, prod
from typing import Annotated, NamedTuple

from runner.config.environment import started_nodes, started_rank
from runner.config.notation import plural
from runner.config.section import Count, Section, key, option_of


class SizeError(ValueError):
    """Sizes that do not multiply to the number of ranks; ``key`` is the one to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Sizes(Section):
    name: Annotated[str, option_of("plugin")] = key("choose the plugin")
    nproc: Count | None = key("start so many ranks on each machine; null: the product of the sizes")
    nnodes: Count | None = key("train on so many machines; null: as many as were started", None)
    dp_size: Count | None = key("data-parallel size; null: world size / other sizes")
    tp_size: Count | None = key("split each weight over so many ranks; null: world size / dp_size")
    pp_size: Count | None = key("split the layers over so many ranks; null: world size / dp_size")
    ep_size: Count | None = key("spread the experts over so many data-parallel ranks; null: all")


class MeshSizes(NamedTuple):
    """Number of ranks along each axis of the device mesh; dp · tp · pp is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(
        cls,
        ranks: int,
        dp_size: int | None = None,
        tp_size: int | None = 1,
        pp_size: int | None = 1,
        ep_size: int | None = 1,
    ) -> MeshSizes:
        given = _given(dp_size, tp_size, pp_size)
        rest, product = _open_size(given), prod(given.values())
        if ranks % product or (rest is None and ranks != product):
            factors = [f"{name} {size}" for name, size in given.items() if size > 1]
            text = f"{' x '.join(factors) or 'one process'} = {product}"
            many = "" if rest is None else "a multiple of "
            raise SizeError("nproc", f"{plural(ranks, 'rank')} cannot be {many}{text}")
        if rest is not None:
            given[rest] = ranks // product
        dp = given.get("dp_size", 1)
        ep = dp if ep_size is None else ep_size
        if dp % ep:
            message = f"{ep} ranks cannot share the experts of {dp} data-parallel ranks evenly"
            raise SizeError("ep_size", message)
        return cls(dp, given.get("tp_size", 1), given.get("pp_size", 1), ep)


def sizes(plugin: Sizes, ranks: int, *, started: bool = False) -> MeshSizes:
    """Divide ``ranks`` among the axes as the section ``plugin`` asks."""
    if plugin.name == "single" and ranks != 1:
        message = f"plugin=single is one process, not {ranks} ranks; plugin=ddp spreads over ranks"
        raise SizeError("nproc", message)
    found = MeshSizes.of(ranks, plugin.dp_size, plugin.tp_size, plugin.pp_size, plugin.ep_size)
    nodes, joined = plugin.nnodes or 1, started_rank()
    local = ranks // nodes
    if started and joined is not None:
        nodes, local = started_nodes() or nodes, joined.local_world_size
        if plugin.nnodes not in (None, nodes):
            raise SizeError("nnodes", f"{plural(nodes, 'machine')} started ranks: leave it out")
        if plugin.nnodes is not None and plugin.nproc not in (None, local):
            raise SizeError("nproc", f"this machine has {plural(local, 'rank')}: leave it out")
    if nodes > 1 and local % found.tp:
        message = (
            f"tensor-parallel ranks stay on one machine, and {found.tp} do not divide the {local} "
            f"ranks of a machine (plugin.nnodes={nodes})"
        )
        raise SizeError("tp_size", message)
    return found


def data_parallel_size(plugin: Sizes, ranks: int) -> int:
    """Return the data-parallel size on ``ranks`` ranks; all ranks if the sizes do not fit them."""
    try:
        return sizes(plugin, ranks).dp
    except SizeError:
        return ranks


def least_ranks(plugin: Sizes) -> int:
    """Return the world size to start: ``nnodes`` x ``nproc``, or the product of the given sizes."""
    nodes = plugin.nnodes or 1
    if plugin.nproc is not None:
        return nodes * plugin.nproc
    experts = (plugin.ep_size or 1) if plugin.dp_size is None else 1
    sized = experts * prod(_given(plugin.dp_size, plugin.tp_size, plugin.pp_size).values())
    return lcm(sized, nodes * (plugin.tp_size or 1)) if nodes > 1 else sized


def may_grow(plugin: Sizes) -> bool:
    """Return whether more ranks than `least_ranks` fit: ``nproc`` and one of the sizes are null."""
    given = _given(plugin.dp_size, plugin.tp_size, plugin.pp_size)
    return plugin.name != "single" and plugin.nproc is None and _open_size(given) is not None


def ranks_of(plugin: Sizes, gpus: int = 0) -> int:
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
