"""Check at boost that the shards of all ranks add up to the whole model.

What each rank receives grows with the parameters, not with parameters times ranks: counts are
summed, and hashes of the tables of names are compared. Where the tables differ, as between
pipeline stages, each parameter is described by the first rank that holds it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runner.gradients.objects import broadcast_object, device_of_messages, gather_objects
from runner.gradients.shard import LayoutError, ParamShard, Whole


class Described:
    """What one rank knows: of each parameter that it holds a :class:`Whole`, and its elements."""

    def __init__(self, shards: Sequence[ParamShard]) -> None:
        self.device_type = shards[0].param.device.type if shards else None
        self.elements: defaultdict[str, float] = defaultdict(float)
        self.table: dict[str, Whole] = {}
        for shard in shards:
            self.elements[shard.name] += shard.weight.numel() / shard.num_replicas
            self.table.setdefault(shard.name, Whole.of(shard))


def account(
    shards: Sequence[ParamShard], group: dist.ProcessGroup, whole: Mapping[str, int]
) -> tuple[dict[str, Whole], str]:
    """Check that the shards of all ranks of ``group`` add up to ``whole``; every rank calls this.

    Args:
        shards: the shards of this rank.
        whole: number of elements of each parameter of the whole model, in the same order on all
            ranks.

    Returns:
        all parameters in one order for all ranks, and the device type of the shards.

    Raises:
        LayoutError: an element is missing or counts twice, or a name is unknown. On every rank.
    """
    described = Described(shards)
    device = device_of_messages(group)
    names_hash = _hash(whole.items())
    table_hash = _hash(described.table.items())
    hashes = [names_hash, -names_hash, table_hash, -table_hash]
    largest = torch.tensor(hashes, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    most_names, least_names, most_tables, least_tables = largest.tolist()
    if most_names != -least_names:  # ranks hold different models
        return _compared(described, group, whole)
    sums = torch.zeros(len(whole) + 1, dtype=torch.float64)
    sums[-1] = len(described.table.keys() - whole.keys())
    for position, name in enumerate(whole):
        sums[position] = described.elements.get(name, 0.0)
    sums = sums.to(device)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    *accounted, unknown = sums.tolist()
    if unknown:
        return _compared(described, group, whole)
    _require_every_element(dict(zip(whole, accounted, strict=True)), whole)
    if most_tables == -least_tables:
        return described.table, described.device_type or "cpu"
    return described_once(described, group, whole, device)


def described_once(
    described: Described, group: dist.ProcessGroup, whole: Mapping[str, int], device: torch.device
) -> tuple[dict[str, Whole], str]:
    """Return all parameters: the first rank that holds one describes it to the others."""
    this_rank = group.rank()
    holders = [this_rank if name in described.table else group.size() for name in whole]
    first_holders = torch.tensor(holders, dtype=torch.int64, device=device)
    dist.all_reduce(first_holders, op=dist.ReduceOp.MIN, group=group)
    first: dict[str, int] = dict(zip(whole, first_holders.tolist(), strict=True))
    parameters: dict[str, Whole] = {}
    device_type = described.device_type
    for rank in sorted({*first.values()} - {group.size()}):
        described_here: dict[str, Whole] = {}
        if rank == this_rank:
            names = [name for name in described.table if first[name] == rank]
            described_here = {name: described.table[name] for name in names}
        sent = (described.device_type, described_here)
        device_type_there, table = broadcast_object(sent, group, rank)
        parameters.update(table)
        device_type = device_type or device_type_there
    return parameters, device_type or "cpu"


def _compared(
    described: Described, group: dist.ProcessGroup, whole: Mapping[str, int]
) -> tuple[dict[str, Whole], str]:
    """Gather the tables of all ranks, of models that differ, to name the parameter that does."""
    mine = (described.device_type, dict(described.elements), described.table)
    everywhere = gather_objects(mine, group)
    accounted: defaultdict[str, float] = defaultdict(float)
    parameters: dict[str, Whole] = {}
    device_types = []
    for device_type, elements, table in everywhere:
        for name, share in elements.items():
            accounted[name] += share
            parameters.setdefault(name, table[name])
        if device_type is not None:
            device_types.append(device_type)
    unknown = sorted(accounted.keys() - whole.keys())
    if unknown:
        raise LayoutError(
            f"{', '.join(unknown)}: no such parameter in the whole model (a weight is tied no "
            "longer, or ranks hold different models)"
        )
    _require_every_element(accounted, whole)
    return parameters, device_types[0] if device_types else "cpu"


def _require_every_element(accounted: Mapping[str, float], whole: Mapping[str, int]) -> None:
    for name, elements in whole.items():
        counted = accounted.get(name, 0.0)
        if abs(counted - elements) > 1e-6 * max(elements, 1):
            text = f"{name} has {elements} elements, but the ranks account for {counted:g}"
            raise LayoutError(text)


def _hash(items: Iterable[tuple[str, Any]]) -> int:
    """Return a hash that is the same in all processes, and fits int64 with either sign."""
    digest = hashlib.blake2b(digest_size=7)
    for name, value in items:
        digest.update(repr((name, value)).encode())
    return int.from_bytes(digest.digest(), "big")
