"""Joining and leaving the ranks that somebody else started."""

import atexit
import sys
import threading
from types import SimpleNamespace

import pytest

from runner import launch_from_torch
from runner.launch import process_group
from runner.launch.rank import join


def test_threads_that_wait_for_the_interpreter_run_before_it_ends(monkeypatch):
    """Otherwise one rank in twenty aborts: "terminate called without an active exception"."""
    around = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in around.items():
        monkeypatch.setenv(name, str(value))
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    launch_from_torch(backend="gloo", verbose=False)
    process_group.leave()
    collective, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: ran.append(collective.wait()))
    thread.start()
    # However busy the machine is, the pause is long enough.
    pause = SimpleNamespace(sleep=lambda seconds: thread.join(120))
    monkeypatch.setattr(process_group, "time", pause)
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
