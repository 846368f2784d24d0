import math

import pytest

from runner.run_folder.status import objective_of
from runner.run_folder.sweep_record import Entry, SweepRecord, best
from runner.sweep import live


def entry(number, state="finished", objective=None, seconds=10.0, error=None):
    label = f"clip.threshold={number}"
    made = Entry(number, str(number), [label], [label], str(number), state)
    made.objective, made.seconds, made.error = objective, seconds, error
    return made


def record(*entries):
    about = {"name": "mine", "words": [], "request": "", "keys": [], "total": 4}
    about |= {"objective": "eval/loss", "maximizes": False, "max_failures": None}
    return SweepRecord(**about, entries=list(entries))


def test_a_run_begins_with_the_best_so_far_and_the_time_left():
    done = entry(0, objective=0.5, seconds=8.0), entry(1, objective=0.25, seconds=16.0)
    made = record(*done, entry(2, "running"), entry(3, "waiting"))
    assert live.beginning(made, made.of(2)) == (
        "run 2 (3 of 4): clip.threshold=2   best so far 0.25 (clip.threshold=1)   about 0:24 left"
    )
    assert live.beginning(record(), entry(0, "running")) == "run 0 (1 of 4): clip.threshold=0"
    assert [live.clock(seconds) for seconds in (83.6, 3700)] == ["1:24", "1:01:40"]


def test_the_table_names_the_best_and_every_error():
    failed = entry(1, "failed", error="RuntimeError: no")
    lines = live.table(record(entry(0, objective=0.5), failed, entry(2, "waiting"))).splitlines()
    assert lines[0].split() == ["run", "state", "eval/loss", "seconds", "error"]
    assert lines[1].split() == ["0", "clip.threshold=0", "finished", "0.5", "(best)", "10.0"]
    assert lines[2].endswith("RuntimeError: no")


def test_the_best_is_finite_and_of_a_run_that_finished():
    runs = [entry(0, objective=math.nan), entry(1, "failed", 0.1), entry(2, objective=0.3)]
    runs += [entry(3, objective=0.2)]
    assert best(runs, maximizes=False).number == 3
    assert best(runs, maximizes=True).number == 2
    assert best(runs[:2], maximizes=False) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("eval/loss", 0.2), ("grad/norm", 3.0), ("steps", 9.0), ("nothing", None), ("lost", math.inf)],
)
def test_an_objective_is_the_best_where_there_is_one(key, value):
    final = {"eval/loss": 0.4, "grad/norm": 3.0, "lost": "Infinity"}
    assert objective_of({"best": {"eval/loss": 0.2}, "final": final, "steps": 9}, key) == value
