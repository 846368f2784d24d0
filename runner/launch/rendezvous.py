"""Where the ranks of one machine meet."""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)


class OneMachine(RendezvousHandler):
    """Gives the ranks of this machine a store and a port of their own in each attempt.

    The handler ``c10d`` of torch, for many nodes, inspects all modules each time that it records
    an event, which takes a second.
    """

    def __init__(self, asked: RendezvousParameters) -> None:
        self._run_id = asked.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "127.0.0.1"))

    def get_backend(self) -> str:
        return "one machine"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
