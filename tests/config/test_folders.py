"""Where configuration and outputs lie, and what makes a machine unfit to run."""

import tempfile
from pathlib import Path

import pytest

from runner.compose.request import request
from runner.config import folders, scratch
from runner.config.folders import find, obstacle, outputs
from tests.process import python


def test_a_wheel_carries_its_own_configuration_and_writes_to_the_working_directory(
    tmp_path, monkeypatch
):
    package = tmp_path / "site" / "runner"
    (package / "_conf").mkdir(parents=True)
    monkeypatch.setattr(folders, "_PACKAGE", package)
    monkeypatch.delenv("RUNNER_OUTPUTS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find("conf") == package / "_conf"
    assert outputs() == tmp_path / "outputs"


def test_outputs_follow_the_environment_or_lie_in_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (str(tmp_path / "here"), "here"):
        monkeypatch.setenv("RUNNER_OUTPUTS", value)
        assert outputs() == tmp_path / "here"
    monkeypatch.delenv("RUNNER_OUTPUTS")
    assert outputs() == find("conf").parent / "outputs"


def test_what_keeps_a_folder_from_being_made(tmp_path):
    assert obstacle(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "file is not a folder" in obstacle(tmp_path / "file" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is not a folder" in obstacle(tmp_path / "link" / "a")
    assert "/proc" in obstacle(Path("/proc/self/runs/a"))  # an administrator cannot write there


RANKS = ["plugin=ddp", "plugin.nproc=2"]


@pytest.mark.usefixtures("outputs")
def test_no_shared_memory_or_too_long_a_temporary_folder_is_a_problem_of_several_processes(
    monkeypatch, tmp_path
):
    def keys(*words):
        [job] = request(words, writes=False).jobs
        return [problem.key for problem in scratch.missing(job.config)]

    assert keys("data.num_workers=2", *RANKS) == []
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "d" * scratch.LONGEST)
    assert keys(*RANKS) == ["TMPDIR"]
    assert keys() == []
    monkeypatch.setattr(tempfile, "tempdir", "/" + "d" * (scratch.LONGEST - 1))
    assert keys(*RANKS) == []
    monkeypatch.setattr(scratch, "SHARED", tmp_path / "nowhere")
    for words in (["data.num_workers=2"], RANKS, []):
        assert keys(*words) == [word.partition("=")[0] for word in words[:1]]


def test_no_folder_for_temporary_files_is_one_message(tmp_path, environment):
    code = """
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/dev/null/tmp"]
from runner.cli.main import main
code = main(["clip=norm", "tracker=none"])
assert "torch" not in sys.modules
raise SystemExit(code)
"""
    done = python("-c", code, code=2, env=environment, cwd=tmp_path)
    assert "TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr
