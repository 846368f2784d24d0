"""Prepare for a training: import torch, and start the server that ranks are forked from."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from runner.config.schema import RunConfig
from runner.launch import signals


@contextmanager
def importing_torch() -> Iterator[None]:
    """Look for no garbage while torch is imported for the first time, nor later among its objects.

    There are 400,000 of them: each search would take as long as many steps of a small model.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        with signals.deferred():
            import torch  # noqa: F401
        yield
    finally:
        gc.freeze()
        gc.enable()


def prepare(*configs: RunConfig) -> None:
    """Start the fork server in the background, if one of these runs has ranks of its own."""
    if any(config.plugin.least_ranks > 1 or config.launch.max_restarts for config in configs):
        ensure_fork_server()


def ensure_fork_server() -> None:
    """Start the fork server, if it does not run, and wait until it does."""
    multiprocessing.set_forkserver_preload(["runner.launch.preloaded"])
    resource_tracker.ensure_running()  # started later, it would unblock some of these signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKING)  # children unblock them
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
