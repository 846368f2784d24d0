"""What the fork server of local ranks imports: the rank, and what to do at its own end."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from runner.launch import rank

__all__ = ["rank"]


def _remove_socket(server: int) -> None:
    """Remove the server's socket and its folder, which a launcher that was killed has left."""
    address = getattr(forkserver, "_forkserver")._forkserver_address  # noqa: B009
    if os.getpid() == server and address:
        with suppress(OSError):
            os.unlink(address)
            Path(address).parent.rmdir()


atexit.register(_remove_socket, os.getpid())
