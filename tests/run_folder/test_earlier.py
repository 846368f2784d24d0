"""A run does not write over the record of another."""

from runner.run_folder.sweep_record import earlier_record


def test_a_record_is_not_written_over(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".run.lock").touch()
    assert earlier_record(tmp_path) is None  # it was killed before its record began
    (tmp_path / ".run.lock").unlink()
    for name in ("status.json", "multirun.yaml"):
        (tmp_path / name).touch()
        assert name in earlier_record(tmp_path)
        assert "is not a folder" in earlier_record(tmp_path / name)
        (tmp_path / name).unlink()
