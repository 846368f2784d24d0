"""Send a workspace to wandb within a bounded time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

SAVE_SECONDS = 8.0
"""Seconds that a server may take; with the start of Python the command takes ten."""

_REQUEST_SECONDS = 6
"""Seconds for one request; fewer than `SAVE_SECONDS`, so that wandb reports the error itself."""


@dataclass(frozen=True)
class WorkspaceRequest:
    """A workspace to save."""

    entity: str | None
    project: str
    name: str
    group: str | None


class NotSavedError(Exception):
    """The workspace could not be saved; the message is one line."""


def save(request: WorkspaceRequest, seconds: float = SAVE_SECONDS) -> str:
    """Save the workspace as a new view of its project, and return its URL."""
    until = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_save, args=(request, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(max(until - time.monotonic(), 0.0)):
            raise NotSavedError(f"no answer within {seconds:g} seconds")
        saved, text = receiver.recv()
    except EOFError:
        raise NotSavedError("wandb's process ended unexpectedly") from None
    finally:
        process.kill()  # wandb's client ends with its process
        process.join()
        receiver.close()
    if not saved:
        raise NotSavedError(text)
    return str(text)


def _save(request: WorkspaceRequest, sender: Connection) -> None:
    """Send, from the process, whether the workspace was saved, and its URL or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the interrupt
    _silence()
    os.environ["WANDB_HTTP_TIMEOUT"] = str(_REQUEST_SECONDS)
    try:
        import wandb

        from runner.dashboard import workspace

        entity = request.entity or wandb.Api().default_entity
        if not entity:
            sender.send((False, "the server knows no entity for this key; name one by --entity"))
            return
        built = workspace.build(replace(request, entity=entity))
        sender.send((True, built.save().url))  # type: ignore[no-untyped-call]
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        with contextlib.suppress(OSError):
            sender.send((False, lines[0]))


def _silence() -> None:
    """Keep the output of wandb off the terminal: the command prints one message."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
