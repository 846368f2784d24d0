"""Where configuration and outputs lie, and what makes a machine unfit to run."""

import tempfile

import pytest

from runner.compose.request import request
from runner.config import scratch
from runner.config.folders import find, outputs


def test_outputs_follow_the_environment_or_lie_in_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (str(tmp_path / "here"), "here"):
        monkeypatch.setenv("RUNNER_OUTPUTS", value)
        assert outputs() == tmp_path / "here"
    monkeypatch.delenv("RUNNER_OUTPUTS")
    assert outputs() == find("conf").parent / "outputs"


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
