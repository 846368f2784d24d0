"""A run does not write over the record of another."""

import pytest

from runner.run_folder.earlier import earlier_record


@pytest.mark.parametrize("name", ["status.json", "multirun.yaml", ".hydra"])
def test_a_record_is_not_written_over(tmp_path, name):
    assert earlier_record(tmp_path) is None
    (tmp_path / name).touch()
    assert name in earlier_record(tmp_path)


def test_a_run_that_was_killed_before_its_record_began_left_nothing(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".run.lock").touch()
    assert earlier_record(tmp_path) is None
