"""Two processes never write to the folder of one run at the same time."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from runner.config.problem import RequestError
from runner.run_folder import claim
from runner.run_folder.claim import claimed
from tests.process import ROOT, wait_for

HOLD = """
import sys
from pathlib import Path
from runner.run_folder.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # until the test closes it
"""


def started(script, folder):
    """Start a process, and wait until it holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder."""
    process = started(HOLD, tmp_path)
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_refused_at_once_and_told_who_holds_the_folder(holder, tmp_path):
    who = f"process {holder.pid} on {socket.gethostname()}"
    with pytest.raises(RequestError, match=who), claimed(tmp_path):
        raise AssertionError


def test_a_process_that_was_killed_holds_nothing(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with claimed(tmp_path):
        held = json.loads((tmp_path / ".run.json").read_text())
        assert held == {"pid": os.getpid(), "host": socket.gethostname()}
    assert not (tmp_path / ".run.json").exists()


def test_children_of_a_killed_process_may_hold_it_a_little_longer(tmp_path, monkeypatch):
    with claimed(tmp_path):
        lock = claim.read_object(tmp_path / ".run.json")
    (tmp_path / ".run.json").write_text(json.dumps({**lock, "pid": 2**22 + 1}))
    script = HOLD.replace("with claimed(Path(sys.argv[1])):", "if True:").replace(
        "    print",
        "    import fcntl\n    file = open(sys.argv[1] + '/.run.lock', 'w')\n"
        "    fcntl.flock(file, fcntl.LOCK_EX)\n    print",
    )
    child = started(script, tmp_path)
    is_here = claim._is_here

    def ends(holder):
        """The child ends once the lock was found taken."""
        child.stdin.close()
        return is_here(holder)

    monkeypatch.setattr(claim, "_is_here", ends)
    monkeypatch.setattr(claim, "RELEASED", 120.0)
    with claimed(tmp_path):
        assert child.wait(120) == 0
    child.stdout.close()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """What a process of another host left, whose lock this host does not see."""
    monkeypatch.setattr(claim, "BEAT", 0.05)
    monkeypatch.setattr(claim, "SILENCE", 120.0)
    file = tmp_path / ".run.json"
    file.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    return file


def test_a_living_process_of_another_host_is_noticed(tmp_path, elsewhere):
    ended = threading.Event()

    def beat():
        while not ended.wait(0.02):
            os.utime(elsewhere)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RequestError, match="process 1 on elsewhere"), claimed(tmp_path):
            raise AssertionError
    finally:
        ended.set()
        thread.join()


def test_a_process_of_another_host_that_is_gone_holds_nothing(tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(claim, "SILENCE", 0.1)
    with claimed(tmp_path):
        assert json.loads(elsewhere.read_text())["pid"] == os.getpid()


def test_the_holder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "BEAT", 0.02)
    with claimed(tmp_path):
        file = tmp_path / ".run.json"
        os.utime(file, (0, 0))
        wait_for(lambda: file.stat().st_mtime > 1)
    wait_for(lambda: "claim" not in [thread.name for thread in threading.enumerate()])
