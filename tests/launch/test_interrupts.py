"""Ctrl-C while a command starts: it ends with exit code 130 and one line, whatever it imports."""

import signal
from pathlib import Path

import pytest

from tests.launch.ends import started
from tests.process import wait_for

WORDS = ["plugin=single", "tracker=none", "train.max_duration=10000000ba"]


def ticks(process):
    """Return the processor time of a process in hundredths of a second, as Linux counts it."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def interrupted(environment, number):
    """Return the exit code and the output of a command that is interrupted while it starts.

    That is after ``number`` hundredths of a second of work since it handles signals. Before that
    Python itself is starting.
    """
    with started(environment, WORDS) as run:
        run.wait_for(run.handles_signals)
        until = ticks(run.process) + number
        wait_for(lambda: ticks(run.process) >= until, pause=0.001)
        run.process.send_signal(signal.SIGINT)
        return run.process.wait(600), run.printed


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "numbers", [(0, 40, 90), pytest.param(range(200), marks=pytest.mark.slow)], ids=["few", "200"]
)
def test_an_interrupt_at_start_up_ends_with_130(environment, numbers):
    ends = {number: interrupted(environment, number) for number in numbers}
    wrong = {
        number: (code, printed)
        for number, (code, printed) in ends.items()
        if code != 130 or "Traceback" in printed or "cannot be run" in printed
    }
    assert not wrong, f"{len(wrong)} of {len(ends)}: {wrong}"
