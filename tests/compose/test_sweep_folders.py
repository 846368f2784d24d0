"""The folder of a sweep follows from its jobs, and holds no other sweep."""

from dataclasses import replace

import pytest

from runner.cli import arguments
from runner.config.problem import RequestError
from runner.request.request import request
from runner.run_folder.status import Entry, SweepRecord

pytestmark = pytest.mark.usefixtures("outputs")
TWO = ["clip.threshold=0.1,0.25", "seed=1,2"]


def sweep(*words):
    return arguments.checked(arguments.read(["-m", *words]))


def test_the_same_jobs_have_the_same_folder_however_they_are_typed(outputs, tmp_path, monkeypatch):
    first = sweep(*TWO)
    assert first.folder == outputs / "sweeps" / first.sweep
    assert first.sweep.startswith("clip.threshold-seed-")
    again = sweep("clip=norm", "clip.threshold=0.25,0.1", "seed=2,1", "tracker=none")
    assert again.folder == first.folder
    for words in (["seed=3,4"], ["seed=1,2,3"], ["seed=1,2", "optimizer.lr=0.3"]):
        changed = sweep(TWO[0], *words)
        assert (changed.folder != first.folder, changed.identity != first.identity) == (True, True)
    odd = tmp_path / "it's (a) = b,c"
    monkeypatch.setenv("RUNNER_OUTPUTS", str(odd))
    assert sweep("seed=1,2").folder.parent == odd / "sweeps"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_OUTPUTS", "~nobody-here")  # a folder, as in a shell
    assert sweep("seed=1,2").folder.parent == tmp_path / "~nobody-here" / "sweeps"


@pytest.fixture
def finished(outputs):
    """The folder of a sweep of two runs that have finished."""
    planned = request(["sweep.name=mine", "seed=1,2"], multirun=True)
    planned.folder.mkdir(parents=True)
    runs = [Entry(n, str(n), [], [], job.hash, "finished") for n, job in enumerate(planned.jobs)]
    words = ["-m", "seed=1,2"]
    record = SweepRecord("mine", words, planned.identity, "eval/loss", False, None, ["seed"], 2)
    replace(record, entries=runs).write(planned.folder)
    return planned.folder


@pytest.mark.parametrize("words", ["seed=1,2", "seed=1,2,3", "seed=3,2,1 clip.threshold=0.1,1.0"])
def test_a_sweep_takes_further_runs(finished, words):
    assert sweep("sweep.name=mine", *words.split()).folder == finished


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("words", ["seed=1,3", "seed=1,2,3 optimizer.lr=0.3"])
def test_a_sweep_that_lacks_a_run_of_its_folder_is_refused(words):
    with pytest.raises(RequestError, match=r"holds another request \(-m seed=1,2"):
        sweep("sweep.name=mine", *words.split())


@pytest.mark.parametrize(
    ("name", "message"),
    [("multirun.yaml", "no sweep"), (".hydra/x", "no sweep"), ("sweep.json", "no record")],
)
def test_a_folder_that_holds_no_sweep_is_refused(outputs, name, message):
    file = outputs / "sweeps" / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"request": "')
    with pytest.raises(RequestError, match=message):
        sweep("sweep.name=mine", "seed=1,2")
