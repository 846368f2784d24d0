"""Two processes never write to the folder of one run at the same time."""

import signal
import subprocess
import sys

import pytest

from runner.config.problem import RequestError
from runner.run_folder import status as claim
from tests.process import ROOT

HOLD = """
import sys
from pathlib import Path
from runner.run_folder.status import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # until the test closes it
"""


def test_the_second_is_refused_until_the_first_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "RELEASED", 0.1)
    command, pipes = [sys.executable, "-c", HOLD, str(tmp_path)], {"stdin": -1, "stdout": -1}
    holder = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match="another run is using"), claim.claimed(tmp_path):
            raise AssertionError
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with claim.claimed(tmp_path):
        pass
