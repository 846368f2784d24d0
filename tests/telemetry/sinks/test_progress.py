"""A process that works is waited for, however slowly; one that stands still is given up."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from runner.telemetry.sinks import progress


@pytest.mark.parametrize(
    ("ticks", "ends", "waited"),
    [
        (lambda now: now // 3, 20.0, 20.0),  # a busy machine gives it a tick in three seconds
        (lambda now: None, 20.0, 20.0),  # it waits for a CPU
        (lambda now: 1, 20.0, 4.5),
        (lambda now: now // 3, 100.0, 60.0),
    ],
    ids=["slow", "queued", "still", "too long"],
)
def test_a_process_is_waited_for_as_long_as_it_works(
    ticks: Callable[[float], float | None],
    ends: float,
    waited: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def has_ended(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return now >= ends

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(progress, "cpu_times", lambda process: {process: ticks(now)})
    done = progress.wait_while_working(1, has_ended, stalled=4.0, timeout=60.0)
    assert (done, now) == (ends == waited, waited)


def test_a_process_that_runs_counts_as_one_that_works() -> None:
    assert progress.cpu_times(os.getpid())[os.getpid()] is None
