"""Logging the norm of each layer costs at most a tenth of a training step."""

import time

import pytest

from runner.bench.loop import trained
from runner.bench.subjects import threads
from runner.bench.telemetry import PER_LAYER, TASKS
from runner.run_folder.rows import JsonlSink
from tests.bench.compared import median_ratio


@pytest.mark.timing
@pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])
def test_layer_norms_cost_at_most_a_tenth_of_a_step(task, tmp_path):
    def side(**options):
        common = {"clock": time.process_time, "criterion": None, "log_flush": 1}
        return lambda: trained(task, [sink], 1, **common, **options)

    with threads(1), JsonlSink(tmp_path / "rows.jsonl") as sink:
        assert median_ratio(side(per_layer=True), side(), 9, PER_LAYER) <= PER_LAYER
