import json
from pathlib import Path

import pytest

from runner.compose.request import request
from runner.config.problem import RequestError
from runner.run_folder.earlier import earlier_record

pytestmark = pytest.mark.usefixtures("outputs")


def sweep(*words):
    return request(words, multirun=True, earlier=earlier_record).sweep


def problem(*words, **options):
    with pytest.raises(RequestError) as error:
        request(words, multirun=True, earlier=earlier_record, **options)
    [found] = error.value.problems
    return found


def test_the_same_jobs_have_the_same_folder_however_they_are_typed(outputs):
    made = sweep("clip.threshold=0.1,0.25", "seed=1,2")
    assert made.folder == outputs / "sweeps" / made.name
    assert made.name.startswith("clip.threshold-seed-")
    assert sweep("clip.threshold=0.1,0.25", "seed=1,2") == made
    again = sweep("clip=norm", "clip.threshold=0.25,0.1", "seed=2,1", "tracker=none")
    assert again.folder == made.folder


@pytest.mark.parametrize("word", ["seed=3,4", "seed=1,2,3", "optimizer.lr=0.3"])
def test_other_jobs_have_another_folder(word):
    one = sweep("clip.threshold=0.1,0.25", "seed=1,2")
    other = sweep("clip.threshold=0.1,0.25", "seed=1,2", word)
    assert one.folder != other.folder
    assert one.identity != other.identity


def test_a_name_that_holds_another_request_is_refused(outputs):
    made = sweep("sweep.name=mine", "seed=1,2")
    made.folder.mkdir(parents=True)
    record = {"name": "mine", "request": made.identity, "words": ["-m", "seed=1,2"]}
    record |= {"objective": "eval/loss", "maximizes": False, "max_failures": None}
    record |= {"keys": ["seed"], "total": 2, "runs": []}
    (made.folder / "sweep.json").write_text(json.dumps(record))
    assert sweep("sweep.name=mine", "seed=1,2").folder == made.folder
    found = problem("sweep.name=mine", "seed=1,3")
    assert found.key == "sweep.name"
    assert "holds another request (-m seed=1,2)" in found.message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=1,2,3"], None),  # the runs that are there are among these
        (["seed=3,2,1", "clip.threshold=0.1,1.0"], None),
        (["seed=1,3"], "holds another request (-m seed=1,2)"),
        (["seed=1,2,3", "optimizer.lr=0.3"], "holds another request (-m seed=1,2)"),
    ],
)
def test_a_sweep_takes_further_runs(outputs, words, message):
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
    if message is None:
        assert sweep("sweep.name=mine", *words).folder == made.sweep.folder
    else:
        assert message in problem("sweep.name=mine", *words).message


@pytest.mark.parametrize("name", ["multirun.yaml", "status.json", ".hydra/config.yaml"])
def test_a_folder_that_holds_no_sweep_is_refused(outputs, name):
    file = outputs / "sweeps" / "mine" / name
    file.parent.mkdir(parents=True)
    file.touch()
    assert "no sweep" in problem("sweep.name=mine", "seed=1,2").message


def test_a_torn_record_is_refused(outputs):
    folder = outputs / "sweeps" / "mine"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text('{"request": "')
    assert "cannot be read" in problem("sweep.name=mine", "seed=1,2").message


def test_lists_that_are_zipped_advance_together():
    words = ["clip.threshold=0.1,0.2", "seed=1,2", "optimizer.lr=0.3,0.4"]
    found = request([*words, "sweep.zip=[clip.threshold,optimizer.lr]"], multirun=True)
    assert [job.label for job in found.jobs] == [
        "clip.threshold=0.1 optimizer.lr=0.3 seed=1",
        "clip.threshold=0.1 optimizer.lr=0.3 seed=2",
        "clip.threshold=0.2 optimizer.lr=0.4 seed=1",
        "clip.threshold=0.2 optimizer.lr=0.4 seed=2",
    ]


def test_a_zipped_list_leaves_a_key_out_of_jobs_whose_mode_has_no_such_option():
    words = ["clip=norm,schedule", "clip.warmup_steps=unset,30", "seed=1,2"]
    found = request([*words, "sweep.zip=[clip,clip.warmup_steps]"], multirun=True)
    assert [job.label for job in found.jobs] == [
        "clip=norm seed=1",
        "clip=norm seed=2",
        "clip=schedule clip.warmup_steps=30 seed=1",
        "clip=schedule clip.warmup_steps=30 seed=2",
    ]


def test_a_list_that_is_not_zipped_has_no_value_unset():
    found = problem("clip=schedule", "clip.warmup_steps=unset,30")
    assert "must be an integer" in found.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1,2", "clip.threshold=1,2,3"], "seed has 2, clip.threshold has 3"),
        (["seed=1,2", "clip.threshold=1"], "no list is given for clip.threshold  (lists: seed)"),
        (["seed=1,2"], "no list is given for clip.threshold"),
    ],
)
def test_lists_that_cannot_be_zipped_are_refused(words, said):
    found = problem(*words, "sweep.zip=[seed,clip.threshold]")
    assert found.key == "sweep.zip"
    assert said in found.message


def test_what_all_runs_share_is_no_list():
    assert "all runs of a sweep share it" in problem("sweep.name=a,b").message


def test_every_job_knows_its_words():
    jobs = request(["clip=none,value", "seed=4"], multirun=True).jobs
    assert [job.words for job in jobs] == [("clip=none", "seed=4"), ("clip=value", "seed=4")]
    assert [job.apart for job in jobs] == [("clip=none",), ("clip=value",)]
    assert jobs[0].hash != jobs[1].hash


def test_a_folder_with_signs_reaches_hydra_as_it_is(tmp_path, monkeypatch):
    odd = tmp_path / "it's (a) = b,c"
    monkeypatch.setenv("RUNNER_OUTPUTS", str(odd))
    assert sweep("seed=1,2").folder.parent == Path(odd) / "sweeps"
