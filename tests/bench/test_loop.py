"""The record costs at most a tenth of a bare loop, on a network so small that everything shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("loop.py")


@pytest.mark.timing
def test_the_loop_costs_at_most_a_tenth_more_than_a_bare_one():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCH.parents[2])}
    words = [sys.executable, str(BENCH), "--pairs", "61", "--limit", "1.10"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
