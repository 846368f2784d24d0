from pathlib import Path

import pytest

from runner.compose.request import Source, request
from runner.config.problem import RequestError

pytestmark = pytest.mark.usefixtures("outputs")


def one(*words, **options):
    [job] = request(words, **options).jobs
    return job


def problems(*words, **options):
    with pytest.raises(RequestError) as error:
        request(words, **options)
    return error.value.problems


def test_nothing_is_written(tmp_path):
    request(["clip.threshold=0.1,0.2"], multirun=True)
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_typed_and_plain():
    job = one("clip=adaptive", "clip.threshold=0.02", "data.batch_size=4")
    assert job.config.clip.mode == job.plain["clip"]["mode"] == "adaptive"
    assert job.config.data.batch_size == 4
    assert type(job.plain["optimizer"]) is dict
    assert "hydra" not in job.plain


def test_references_are_resolved():
    assert one("seed=7", "model.width=${seed}").plain["model"]["width"] == 7
    assert one("tracker.group=${hydra:job.name}").config.tracker.group == "runner"


def test_a_target_takes_keys_that_are_added():
    assert one("+optimizer.maximize=true").config.optimizer.arguments["maximize"] is True
    assert "nesterov" not in one("~optimizer.nesterov").config.optimizer.arguments


def test_a_sweep_is_every_combination_in_hydras_order():
    found = request(["clip=none,norm", "seed=range(0,2)", "device=cpu"], multirun=True)
    assert [job.label for job in found.jobs] == [
        "clip=none seed=0",
        "clip=none seed=1",
        "clip=norm seed=0",
        "clip=norm seed=1",
    ]
    assert [job.config.seed for job in found.jobs] == [0, 1, 0, 1]


def test_a_pattern_chooses_options():
    found = request(["clip=glob(n*)"], multirun=True)
    assert [job.config.clip.mode for job in found.jobs] == ["none", "norm"]


def test_a_job_may_use_its_number():
    found = request(["clip=none,norm", "seed=${hydra:job.num}"], multirun=True)
    assert [job.config.seed for job in found.jobs] == [0, 1]


def test_a_sweep_may_be_asked_for_by_a_word():
    assert request(["hydra.mode=MULTIRUN", "seed=1,2"]).sweep is not None


def test_a_key_that_only_the_listed_models_have_is_forced_for_hydra():
    found = request(["model=gpt,lstm", "model.layers=2", "seed=1"], multirun=True)
    assert [job.config.model.arguments["layers"] for job in found.jobs] == [2, 2]
    assert found.sweep.words[:3] == ("model=gpt,lstm", "++model.layers=2", "seed=1")
    assert problems("model=gpt,cnn", "model.layers=2", multirun=True)


def test_words_of_a_sweep_stay_as_they_were_typed_where_that_will_do():
    found = request(["seed=1,2", "clip.threshold=3"], multirun=True)
    assert found.sweep.words[:2] == ("seed=1,2", "clip.threshold=3")


def test_a_problem_of_some_jobs_names_one_and_of_all_jobs_none():
    found = {p.key: p.job for p in problems("seed=1,-1", "log.flush=0", multirun=True)}
    assert found == {"seed": "seed=-1", "log.flush": ""}


def test_a_wrong_option_of_a_sweep_is_named_once():
    found = problems("plugin=dpp,dpd", "plugin.nproc=2", "seed=1,-1", multirun=True)
    assert [(p.key, p.value, p.job) for p in found] == [
        ("plugin", "dpp", ""),
        ("plugin", "dpd", ""),
        ("seed", -1, "seed=-1"),
    ]


def test_a_wrong_option_does_not_hide_wrong_values_nor_invent_conflicts():
    keys = [p.key for p in problems("plugin=dpp", "plugin.nproc=2", "clip.threshold=0", "sed=1")]
    assert sorted(keys) == ["clip.threshold", "plugin", "sed"]


def test_the_keys_of_a_model_that_nobody_chose_are_not_judged():
    assert [p.key for p in problems("model=gptt", "model.layers=2")] == ["model"]


def test_hydras_advice_to_add_a_plus_is_not_repeated():
    for found in (problems("clip.treshold=1"), problems("treshold=1"), problems("hydra.foo=1")):
        assert "+" not in found[0].message


def test_the_folder_of_a_run_must_be_one_that_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    [problem] = problems(f"hydra.run.dir={tmp_path}/file/run")
    assert (problem.key, problem.value) == ("hydra.run.dir", f"{tmp_path}/file/run")
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path / "file"))
    [problem] = problems("clip=none")
    assert (problem.key, problem.value) == ("RUNNER_OUTPUTS", str(tmp_path / "file"))
    assert problems("seed=1,2", multirun=True)
    assert one("clip=none", writes=False)


def test_a_folder_of_further_options_is_searched(tmp_path):
    (tmp_path / "more" / "clip").mkdir(parents=True)
    text = "mode: norm\nthreshold: 3\nnorm_type: 1\nnonfinite: skip\nmax_skips: 50\nwhat_if: []\n"
    (tmp_path / "more" / "clip" / "mild.yaml").write_text(text)
    source = Source(extra=tmp_path / "more")
    assert one("clip=mild", source=source).config.clip.threshold == 3
    assert "did you mean mild?" in problems("clip=mld", source=source)[0].message
    assert request(["clip=glob(m*)"], multirun=True, source=source).jobs[0].label == ""


def test_a_file_at_fault_is_not_blamed_on_the_words(tmp_path):
    (tmp_path / "config.yaml").write_text("defaults:\n  - clip: norm\n  - _self_\n")
    found = problems("seed=1", source=Source(path=Path(tmp_path)))
    assert [p.key for p in found] == ["configuration"]
    assert "clip/norm" in found[0].message


def test_another_search_path_finds_its_own_files(tmp_path):
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "mine.yaml").write_text("defaults: [norm]\nthreshold: 0.7\n")
    found = [f"hydra.searchpath=[{tmp_path.as_uri()}]", "clip=mine"]
    assert one(*found).config.clip.threshold == 0.7
    assert problems("clip=mine")[0].key == "clip"
    (tmp_path / "clip" / "mine.yaml").write_text("defaults: [norm]\nthreshold: 0.8\n")
    assert one(*found).config.clip.threshold == 0.8
