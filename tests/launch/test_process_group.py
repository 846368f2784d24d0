"""Joining and leaving the ranks that somebody else started."""

import atexit
import socket
import sys
import threading

import pytest

from runner import launch_from_torch
from runner.launch.process_group import leave
from runner.launch.rank import join


def test_threads_that_wait_for_the_interpreter_run_before_it_ends(monkeypatch):
    """Otherwise one rank in twenty aborts: "terminate called without an active exception"."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    around = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in around.items():
        monkeypatch.setenv(name, str(value))
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    launch_from_torch(backend="gloo", verbose=False)
    leave()
    collective, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: ran.append(collective.wait()))
    thread.start()
    often = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nothing but a pause lets the thread run
    try:
        collective.set()
        assert not ran
        for function in reversed(at_exit):
            function()
        assert ran
    finally:
        sys.setswitchinterval(often)
        thread.join()


def test_a_rank_that_cannot_find_the_others(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert join() == 1
    told = capsys.readouterr().err
    assert told.count("Traceback") == 1
    assert "(MASTER_ADDR, MASTER_PORT not set)" in told


def test_an_environment_without_ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"RANK.* not set.*torchrun"):
        launch_from_torch()
