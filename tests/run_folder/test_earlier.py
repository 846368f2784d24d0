"""A run does not write over the record of another, or where something is in its way."""

import pytest

from runner.run_folder.earlier import earlier_record


def test_a_record_is_not_written_over(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".run.lock").touch()
    assert earlier_record(tmp_path) is None  # it was killed before its record began
    (tmp_path / ".run.lock").unlink()
    for name in ("status.json", "multirun.yaml"):
        (tmp_path / name).touch()
        assert name in earlier_record(tmp_path)
        (tmp_path / name).unlink()


RUN = ["config.yaml", "status.json", "metrics.jsonl", "summary.json", "report.html", "runner.log"]
SWEEP = ["sweep.json", "multirun.yaml", "report.html", ".sweep.lock", ".sweep.json.lock"]


@pytest.mark.parametrize(
    ("kind", "names", "request_hash"),
    [
        ("file", RUN, None),
        ("file", SWEEP, "0123"),
        ("folder", [".hydra", "checkpoints", "wandb"], None),
        ("folder", ["earlier"], "0123"),
    ],
)
def test_what_is_in_the_way_is_named(tmp_path, kind, names, request_hash):
    for name in names:
        file = tmp_path / name
        file.touch() if kind == "folder" else file.mkdir()
        assert f"{file} is not a {kind}" in earlier_record(tmp_path, request_hash)
        file.unlink() if kind == "folder" else file.rmdir()
