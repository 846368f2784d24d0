"""Find out which rank of torchrun or Slurm failed or hangs, through the store of the ranks.

No process of this program watches such ranks, which may be on several machines. So each one that
fails tells how, and those that only lost a connection look for what the others told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, is_initialized  # type: ignore[attr-defined]

from runner.config.environment import StartedRank, node_name, restarts
from runner.config.notation import plural
from runner.launch.failure import RankFailed, described, may_be_lost_peer, stopped_by
from runner.run_folder import files

PATIENCE = 3.0
"""Seconds in which the ranks tell how they ended, after one of them lost a connection."""

ENDING = 8.0
"""Seconds in which the first rank records how the run ended, if it still can."""

_LOST, _STOPPED = "lost", "stopped"

_nodes: list[str] = []
"""Machine of each rank."""

_failures: list[int] = []
"""Failures before this attempt that torchrun counted for each rank: those on its machine."""


class NotShared(Exception):
    """Some machines do not see the folder of the run."""


def meet(folder: Path) -> None:
    """Learn on which machine each rank is, and check that all machines see the folder of the
    run.
    """
    here = node_name(), restarts(), (folder / files.STATUS).exists()
    there: list[tuple[str, int, bool]] = [here] * dist.get_world_size()
    dist.all_gather_object(there, here)
    _nodes[:] = [name for name, *_ in there]
    _failures[:] = [count for _, count, _ in there]
    blind = sorted({name for name, _, sees in there if not sees})
    if there[0][2] and blind:
        raise NotShared(
            f"{plural(len(blind), 'machine')} of this run ({', '.join(blind)}) cannot see its "
            f"folder {folder}: choose one on a disk that all machines share (RUNNER_OUTPUTS, or "
            "hydra.run.dir)"
        )


def node_of(rank: int) -> str | None:
    """Return the machine of a rank; None if the run has one machine."""
    return _nodes[rank] if len(set(_nodes)) > 1 else None


def tell(error: BaseException, rank: StartedRank) -> None:
    """Tell the other ranks how this one ended, if it found them."""
    if not is_initialized():
        return
    why = described(error)
    if may_be_lost_peer(error):
        why = _LOST
    elif stopped_by(error):
        why = _STOPPED
    with suppress(RuntimeError):  # the store is gone, with the rank or the machine that had it
        _store().set(str(rank.rank), why)


def find(size: int, timeout: float) -> RankFailed | None:
    """Return the rank for which this one lost a connection, and how it ended."""
    if not is_initialized():
        return None
    told: dict[int, str] = {}
    until = time.monotonic() + PATIENCE
    with suppress(RuntimeError):  # the store is gone, with the machine of the first rank
        store = _store()
        while len(told) < size and time.monotonic() < until:
            for rank in set(range(size)) - set(told):
                if store.check([str(rank)]):
                    told[rank] = store.get(str(rank)).decode(errors="replace")
            if failed := {rank: why for rank, why in told.items() if why not in (_LOST, _STOPPED)}:
                rank, why = min(failed.items())
                return RankFailed(rank, why, node_of(rank))
            time.sleep(0.1)
        silent = sorted(set(range(size)) - set(told))
        if silent and _STOPPED not in told.values():
            return _silent(silent, timeout)
        return None
    return None if dist.get_rank() == 0 else _silent([0], timeout)


def _silent(ranks: Sequence[int], timeout: float) -> RankFailed:
    """Return the failure of ranks that do not say how they ended."""
    first, node = ranks[0], node_of(ranks[0])
    where = f" on {node}" if node else ""
    more = f" (ranks {', '.join(map(str, ranks))} do not answer)" if ranks[1:] else ""
    error = (
        f"rank {first}{where} hangs or was killed: the others lost the connection, or waited for "
        f"more than launch.timeout={timeout:g} s{more}"
    )
    return RankFailed(first, error, node)


def _store() -> Store:
    """Connect to the store by which the ranks found each other."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=5),
        wait_for_workers=False,
    )
    return PrefixStore(f"clip-runner/ended/{sum(_failures)}", store)
