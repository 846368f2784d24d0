"""A run does not take more and more memory or open files; ``tests/long_run.py`` runs a long one."""

import sys

import pytest

from tests.long_run import growth, watched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def grown(tmp_path, steps, *words):
    samples = watched(tmp_path / "run", steps, ["log.flush=5", *words], timeout=200)
    return growth(samples, steps, warm_up=steps // 2)


@pytest.mark.slow
def test_memory_and_open_files_stay(tmp_path):
    often = ["eval.interval=50ba", "checkpoint.interval=50ba"]
    found = grown(tmp_path, 1500, *often)
    assert {"command", "wandb recorder", "wandb client"} <= found.memory.keys()
    assert found.problems == []


@pytest.mark.slow
def test_a_run_that_takes_more_is_noticed(tmp_path):
    found = grown(tmp_path, 1000, "model._target_=tests.leaking.Leaking")
    assert [said.partition(":")[0] for said in found.problems] == [
        f"memory grew by {found.share:.1%}",
        "open files of command",
    ]
