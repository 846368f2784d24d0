"""The folder of a sweep follows from its jobs, and holds no other sweep."""

import json

import pytest

from runner.cli import arguments
from runner.config.problem import RequestError
from runner.config.request import request

pytestmark = pytest.mark.usefixtures("outputs")
TWO = ["clip.threshold=0.1,0.25", "seed=1,2"]


def sweep(*words):
    return arguments.checked(arguments.read(["-m", *words])).sweep


def test_the_same_jobs_have_the_same_folder_however_they_are_typed(outputs, tmp_path, monkeypatch):
    made = sweep(*TWO)
    assert made.folder == outputs / "sweeps" / made.name
    assert made.name.startswith("clip.threshold-seed-")
    again = sweep("clip=norm", "clip.threshold=0.25,0.1", "seed=2,1", "tracker=none")
    assert again.folder == made.folder
    for word in ("seed=3,4", "seed=1,2,3", "optimizer.lr=0.3"):
        other = sweep(*TWO, word)
        assert (other.folder != made.folder, other.identity != made.identity) == (True, True)
    odd = tmp_path / "it's (a) = b,c"
    monkeypatch.setenv("RUNNER_OUTPUTS", str(odd))
    assert sweep("seed=1,2").folder.parent == odd / "sweeps"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_OUTPUTS", "~nobody-here")  # a folder, as in a shell
    assert sweep("seed=1,2").folder.parent == tmp_path / "~nobody-here" / "sweeps"


def test_a_sweep_takes_further_runs_and_no_others():
    made = request(["sweep.name=mine", "seed=1,2"], multirun=True)
    made.sweep.folder.mkdir(parents=True)
    runs = [
        {"number": number, "folder": str(number), "overrides": [], "words": []}
        | {"config_hash": job.hash, "state": "finished"}
        for number, job in enumerate(made.jobs)
    ]
    record = {"name": "mine", "request": made.sweep.identity, "words": ["-m", "seed=1,2"]}
    record |= {"objective": "eval/loss", "maximizes": False, "max_failures": None}
    record |= {"keys": ["seed"], "total": 2, "runs": runs}
    (made.sweep.folder / "sweep.json").write_text(json.dumps(record))
    # The runs that are there are among those that are asked for.
    for words in ("seed=1,2", "seed=1,2,3", "seed=3,2,1 clip.threshold=0.1,1.0"):
        assert sweep("sweep.name=mine", *words.split()).folder == made.sweep.folder
    for words in ("seed=1,3", "seed=1,2,3 optimizer.lr=0.3"):
        with pytest.raises(RequestError, match=r"holds another request \(-m seed=1,2"):
            sweep("sweep.name=mine", *words.split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("multirun.yaml", "no sweep"),
        (".hydra/config.yaml", "no sweep"),
        ("sweep.json", "no record"),
    ],
)
def test_a_folder_that_holds_no_sweep_is_refused(outputs, name, message):
    file = outputs / "sweeps" / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"request": "')
    with pytest.raises(RequestError, match=message):
        sweep("sweep.name=mine", "seed=1,2")
