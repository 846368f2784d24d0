"""What the live table of a sweep says, and which run is the best."""

import math

import pytest

from runner.run_folder.status import objective_of
from runner.run_folder.sweep_record import Entry, SweepRecord
from runner.sweep import live


def entry(number, state="finished", objective=None, seconds=10.0):
    label = f"clip.threshold={number}"
    made = Entry(number, str(number), [label], [label], str(number), state)
    made.objective, made.seconds = objective, seconds
    return made


@pytest.mark.parametrize(("maximizes", "best"), [(False, "0.25 (clip.threshold=1)"), (True, "0.5")])
def test_a_run_begins_with_the_best_so_far_and_the_time_left(maximizes, best):
    """The best is finite, and of a run that finished."""
    entries = [entry(0, objective=0.5, seconds=8.0), entry(1, objective=0.25, seconds=16.0)]
    entries += [entry(2, "failed", 0.1), entry(3, objective=math.nan), entry(4, "running")]
    about = {"name": "mine", "words": [], "request": "", "keys": [], "total": 6}
    about |= {"objective": "eval/loss", "max_failures": None}
    made = SweepRecord(**about, maximizes=maximizes, entries=entries)
    said = live.beginning(made, made.of(4))
    assert said.startswith(f"run 4 (5 of 6): clip.threshold=4   best so far {best}")
    assert "left" in said
    assert [live.clock(seconds) for seconds in (83.6, 3700)] == ["1:24", "1:01:40"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("eval/loss", 0.2), ("grad/norm", 3.0), ("steps", 9.0), ("nothing", None), ("lost", math.inf)],
)
def test_an_objective_is_the_best_where_there_is_one(key, value):
    final = {"eval/loss": 0.4, "grad/norm": 3.0, "lost": "Infinity"}
    assert objective_of({"best": {"eval/loss": 0.2}, "final": final, "steps": 9}, key) == value
