"""A run does not write over the record of another."""

import pytest

from runner.run_folder.earlier import earlier_record


@pytest.mark.parametrize("name", ["status.json", "multirun.yaml"])
def test_a_record_is_not_written_over(tmp_path, name):
    assert earlier_record(tmp_path) is None
    (tmp_path / name).touch()
    assert name in earlier_record(tmp_path)


def test_a_run_that_was_killed_before_its_record_began_left_nothing(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".run.lock").touch()
    assert earlier_record(tmp_path) is None


RUN = ["config.yaml", "status.json", "metrics.jsonl", "summary.json", "report.html", "runner.log"]
SWEEP = ["sweep.json", "multirun.yaml", "report.html", ".sweep.lock", ".sweep.json.lock"]


@pytest.mark.parametrize(
    ("name", "sweep"), [(name, False) for name in RUN] + [(name, True) for name in SWEEP]
)
def test_a_folder_where_a_file_is_written_is_named(tmp_path, name, sweep):
    (tmp_path / name).mkdir()
    message = earlier_record(tmp_path, "0123" if sweep else None)
    assert message == f"{tmp_path / name} is not a file, and one is written there; remove it"


@pytest.mark.parametrize(
    ("name", "sweep"),
    [(".hydra", False), ("checkpoints", False), ("wandb", False), ("earlier", True)],
)
def test_a_file_where_a_folder_is_made_is_named(tmp_path, name, sweep):
    (tmp_path / name).touch()
    message = earlier_record(tmp_path, "0123" if sweep else None)
    assert message == f"{tmp_path / name} is not a folder, and one is made there; remove it"
