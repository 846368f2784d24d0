"""The record costs at most a tenth of a bare loop, on a network so small that everything shows."""

from functools import partial

import pytest

from runner.bench.loop import INTERVAL, TINY, Continued, bare, trained
from runner.bench.subjects import threads
from runner.run_folder.rows import JsonlSink
from tests.bench.compared import median_ratio


@pytest.mark.timing
def test_the_loop_costs_at_most_a_tenth_more_than_a_bare_one(tmp_path):
    with threads(1), JsonlSink(tmp_path / "rows.jsonl") as sink:
        ours = partial(trained, TINY, [sink], 1)
        assert median_ratio(ours, partial(bare, TINY), 61, 1.10) <= 1.10


def test_rows_of_many_trainings_go_to_wandb_with_steps_that_go_on(tmp_path):
    rows = []

    class Kept:
        def write(self, row):
            rows.append(row["train/step"])

        def close(self, summary, exit_code):
            pass

    continued = Continued(Kept())
    for _ in range(2):
        for step in (INTERVAL, 2 * INTERVAL):
            continued.write({"train/step": step})
    assert rows == [50, 100, 150, 200]
