"""A machine without temporary files or shared memory is named before anything starts."""

import os
import tempfile
from pathlib import Path

import pytest

from runner.compose.request import request
from runner.config import scratch
from tests.process import python

pytestmark = pytest.mark.usefixtures("outputs")


def keys(*words):
    [job] = request(words, writes=False).jobs
    return [problem.key for problem in scratch.missing(job.config)]


def test_a_usual_machine_has_all():
    assert keys("data.num_workers=2", "plugin=ddp", "plugin.nproc=2") == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="not Linux")
@pytest.mark.parametrize("words", [["data.num_workers=2"], ["plugin=ddp", "plugin.nproc=2"], []])
def test_no_shared_memory_is_a_problem_of_several_processes(monkeypatch, tmp_path, words):
    monkeypatch.setattr(scratch, "SHARED", tmp_path / "nowhere")
    assert keys(*words) == [word.partition("=")[0] for word in words[:1]]


def test_a_temporary_folder_too_deep_for_sockets_is_a_problem_of_several_processes(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "d" * scratch.LONGEST)
    assert keys("plugin=ddp", "plugin.nproc=2") == ["TMPDIR"]
    assert keys() == []
    monkeypatch.setattr(tempfile, "tempdir", "/" + "d" * (scratch.LONGEST - 1))
    assert keys("plugin=ddp", "plugin.nproc=2") == []


def test_the_longest_temporary_folder_has_room_for_sockets(environment):
    with tempfile.TemporaryDirectory(prefix="sockets-") as short:
        folder = Path(short) / ("d" * (scratch.LONGEST - len(short) - 1))
        folder.mkdir()
        words = ["-m", "runner", "plugin=ddp", "plugin.nproc=2", "device=cpu", "tracker=none"]
        python(*words, "train.max_duration=2ba", env={**environment, "TMPDIR": str(folder)})


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
    assert "must be a folder that can be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert tempfile.gettempdir()  # in this process all is well
