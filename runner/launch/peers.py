"""Find out which rank of torchrun or Slurm failed or hangs, through the store of the ranks.

No process of this program watches such ranks, which may be on several machines. So each one that
fails tells how, and those that only lost a connection look for what the others told.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore, is_initialized  # type: ignore[attr-defined]

from runner.config.environment import StartedRank
from runner.launch.failure import RankFailed, described, may_be_lost_peer, stopped_by

PATIENCE = 3.0
"""Seconds in which the ranks tell how they ended, after one of them lost a connection."""

_LOST, _STOPPED = "lost", "stopped"


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
    """Return the rank for which this one lost a connection, and how it ended.

    None if that is not known, or if a rank was asked to stop.

    Args:
        size: number of all ranks.
        timeout: maximum duration of a collective, in seconds.
    """
    if not is_initialized():
        return None
    told: dict[int, str] = {}
    until = time.monotonic() + PATIENCE
    with suppress(RuntimeError):
        store = _store()
        while len(told) < size and time.monotonic() < until:
            for rank in set(range(size)) - set(told):
                if store.check([str(rank)]):
                    told[rank] = store.get(str(rank)).decode(errors="replace")
            if failed := {rank: why for rank, why in told.items() if why not in (_LOST, _STOPPED)}:
                return RankFailed(*min(failed.items()))
            time.sleep(0.1)
        silent = sorted(set(range(size)) - set(told))
        if silent and _STOPPED not in told.values():
            more = f" (ranks {', '.join(map(str, silent))} do not answer)" if silent[1:] else ""
            return RankFailed(
                silent[0],
                f"rank {silent[0]} hangs or was killed: the others lost the connection, or waited "
                f"for more than launch.timeout={timeout:g} s{more}",
            )
    return None


def _store() -> Store:
    """Connect to the store by which the ranks found each other."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=5),
        wait_for_workers=False,
    )
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"clip-runner/ended/{again}", store)
