"""Rows of many trainings in one record of wandb."""

from runner.bench.loop import INTERVAL, Continued


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
