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


def test_the_second_is_told_who_holds_the_folder_until_that_one_is_killed(tmp_path):
    command, pipes = [sys.executable, "-c", HOLD, str(tmp_path)], {"stdin": -1, "stdout": -1}
    holder = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    try:
        assert holder.stdout.readline() == "held\n"
        who = f"process {holder.pid} on {socket.gethostname()}"
        with pytest.raises(RequestError, match=who), claimed(tmp_path):
            raise AssertionError
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with claimed(tmp_path):
        held = json.loads((tmp_path / ".run.json").read_text())
        assert held == {"pid": os.getpid(), "host": socket.gethostname()}
    assert not (tmp_path / ".run.json").exists()


def test_a_process_of_another_host_holds_a_folder_while_it_lives(tmp_path, monkeypatch):
    """This host does not see its lock, but its signs of life."""
    monkeypatch.setattr(claim, "BEAT", 0.02)
    monkeypatch.setattr(claim, "SILENCE", 120.0)
    file, ended = tmp_path / ".run.json", threading.Event()
    file.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))

    def beat():
        while not ended.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RequestError, match="process 1 on elsewhere"), claimed(tmp_path):
            raise AssertionError
    finally:
        ended.set()
        thread.join()
    monkeypatch.setattr(claim, "SILENCE", 0.1)
    with claimed(tmp_path):  # it is gone; this process gives signs of life in its place
        assert json.loads(file.read_text())["pid"] == os.getpid()
        os.utime(file, (0, 0))
        wait_for(lambda: file.stat().st_mtime > 1)
    wait_for(lambda: "claim" not in [thread.name for thread in threading.enumerate()])
