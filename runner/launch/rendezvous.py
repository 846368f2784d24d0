"""Where the ranks of one machine meet."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

HOST = "127.0.0.1"


def served_store() -> TCPStore:
    """Return a store of this process that other processes of this machine alone can reach."""
    # Given a host alone, the store would listen on all interfaces.
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class OneMachine(RendezvousHandler):
    """Gives the ranks of this machine a store of their own in each attempt.

    The handler ``c10d`` of torch, for many nodes, inspects all modules each time that it records
    an event, which takes a second.
    """

    def __init__(self, asked: RendezvousParameters) -> None:
        self._run_id = asked.run_id

    @property
    def use_agent_store(self) -> bool:
        """Let ranks meet at this store: a free port for rank 0 may be taken before it listens."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = served_store()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HOST, store.port))

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
