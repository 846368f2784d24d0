"""Sends a workspace to wandb, within a bounded time whatever the server does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

SAVE_SECONDS = 8.0
"""How long a server may take; with the start of Python before it, ten seconds for the command."""

_REQUEST_SECONDS = 6
"""One request to the server; shorter than the whole, so that wandb says itself what went wrong."""


@dataclass(frozen=True)
class WorkspaceRequest:
    """The arguments of :func:`runner.dashboard.workspace.build`.

    Attributes:
        entity: None for the one that the key belongs to.
        project: whose runs are shown.
        name: of the workspace.
        group: None for all runs.
    """

    entity: str | None
    project: str
    name: str
    group: str | None


class NotSavedError(Exception):
    """The server did not take the workspace; the text says why, in one line."""


def save(request: WorkspaceRequest, seconds: float = SAVE_SECONDS) -> str:
    """Save the workspace as a new view of its project, and return its address.

    A process of its own does it: wandb's client retries for minutes, and only a process can be
    given up.

    Args:
        request: what to save.
        seconds: longest time that this takes.

    Raises:
        NotSavedError: the server refuses, is not there, or does not answer in time.
    """
    until = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_save, args=(request, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(max(until - time.monotonic(), 0.0)):
            raise NotSavedError(f"no answer within {seconds:g} seconds")
        saved, said = receiver.recv()
    except EOFError:
        raise NotSavedError("wandb's process broke off") from None
    finally:
        process.kill()  # wandb's client sees the end of its process, and ends as well
        process.join()
        receiver.close()
    if not saved:
        raise NotSavedError(said)
    return str(said)


def _save(request: WorkspaceRequest, sender: Connection) -> None:
    """Runs in the process: answers with whether it is saved, and its address or the reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the one who waits
    _silence()
    os.environ["WANDB_HTTP_TIMEOUT"] = str(_REQUEST_SECONDS)
    try:
        import wandb

        from runner.dashboard import workspace

        entity = request.entity or wandb.Api().default_entity
        if not entity:
            sender.send((False, "the server knows no entity for this key; name one by --entity"))
            return
        built = workspace.build(entity, request.project, request.name, request.group)
        sender.send((True, built.save().url))  # type: ignore[no-untyped-call]
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        with contextlib.suppress(OSError):
            sender.send((False, lines[0]))


def _silence() -> None:
    """Nothing of wandb's own words reaches the terminal: one message is enough."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
