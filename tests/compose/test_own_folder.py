"""A folder of a user's own (``--config-dir``): only what differs, diagnosed like ours."""

import pickle

import pytest
from omegaconf import open_dict

from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.request.composition import refer_to
from runner.request.jobs import resolved_and_recorded
from runner.request.record import recorded_job, write_yaml
from runner.request.request import request

FILES = {
    "model/mine.yaml": "_target_: own.Net\nwidth: 16\n",
    "data/mine.yaml": "_target_: own.points\nbatch_size: 20\n",
    "clip/gentle.yaml": "defaults: [norm]\nthreshold: 0.7\n",
    "recipe/mine.yaml": (
        "# mine: a trial of my own.\n"
        "defaults:\n  - override /model: mine\n  - override /data: mine\n"
        "  - override /clip: value\n  - override /optimizer: sgd\n"
        "model: {width: 8}\noptimizer: {lr: 0.3}\nclip: {threshold: 0.125}\nseed: 5\n"
    ),
    # As Hydra's own documentation writes such a file.
    "recipe/spelled.yaml": (
        "# @package _global_\ndefaults:\n  - override /clip: value\nrecipe: spelled\nseed: 6\n"
    ),
    "recipe/many.yaml": "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n",
    "recipe/classes.yaml": "hydra: {mode: MULTIRUN, sweeper: {params: {model: 'own.A,own.B'}}}\n",
    "recipe/gpt.yaml": "# gpt: another one.\nseed: 9\n",
    "recipe/wrong.yaml": "defaults: [{override /model: mien}]\n",
    "recipe/torn.yaml": "clip: {threshold: 1\n",
    "recipe/listed.yaml": "- a\n- b\n",
    "recipe/five.yaml": "defaults: 5\n",
    "recipe/odd.yaml": "clip:\n  treshold: 1\n",
    "recipe/target.yaml": (
        "defaults: [{override /optimizer: adamw}]\nmodel: {_target_: own.Net, width: 32}\n"
        "optimizer: {_target_: own.Adam, lr: 2}\n"
    ),
    "recipe/bare.yaml": "clip: 0.1\n",
    "recipe/loss.yaml": "loss: {_target_: own.Loss, label_smoothing: 0.1}\n",
    "model/torn.yaml": "_target_: {",
    "experiment/big.yaml": (
        "# @package _global_\ndefaults:\n  - override /clip: value\nclip: {threshold: 0.3}\n"
    ),
    "experiment/own.yaml": (
        "# @package _global_\nmodel: {_target_: own.Net, width: 32}\ndata: {_target_: own.points}\n"
    ),
}


@pytest.fixture
def conf(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "conf"


def job(conf, *words):
    [only] = request(words, config_dir=conf).jobs
    return only.config


def test_a_file_gives_only_what_differs_from_the_defaults_of_its_group(conf):
    config = job(conf, "model=mine", "data=mine", "data.num_workers=2", "clip=gentle")
    data = config.data
    assert (data.batch_size, data.num_workers, data.drop_last, data.arguments) == (20, 2, False, {})
    assert config.model.arguments == {"width": 16}
    assert (config.clip.threshold, config.clip.norm_type) == (0.7, 2)


def test_a_recipe_takes_the_place_of_ours_with_its_name(conf):
    assert job(conf, "recipe=gpt").seed == 9
    assert job(None, "recipe=gpt").seed == 0


def test_a_target_in_a_file_replaces_the_whole_option(conf):
    config = job(conf, "recipe=target", "model.depth=3")
    assert config.model.arguments == {"width": 32, "depth": 3}
    assert config.optimizer.mapping() == {"_target_": "own.Adam", "lr": 2}
    config = job(conf, "recipe=target", "model=cnn", "optimizer._target_=own.Other")
    assert config.model.arguments["width"] == 32
    assert config.model.target == "runner.models.cnn.DigitsCNN"
    assert config.optimizer.arguments == {}
    loss = job(conf, "recipe=loss", "loss=own.Other", "loss.weight=2").loss
    assert loss.mapping() == {"_target_": "own.Other", "weight": 2}


def test_overrides_beat_the_recipe_which_beats_the_defaults(conf):
    config = job(conf, "recipe=mine")
    assert (config.recipe, config.seed, config.optimizer.arguments["lr"]) == ("mine", 5, 0.3)
    assert (config.model.target, config.model.arguments) == ("own.Net", {"width": 8})
    assert (config.clip.mode, config.clip.threshold) == ("value", 0.125)
    config = job(conf, "recipe=mine", "seed=7", "model.width=4", "clip.threshold=2")
    assert (config.seed, config.model.arguments, config.clip.threshold) == (7, {"width": 4}, 2)
    # Values of a recipe for a group belong to the option that it chooses.
    config = job(conf, "recipe=mine", "optimizer=adamw", "model=gpt")
    assert (
        config.optimizer.arguments["lr"] == job(conf, "optimizer=adamw").optimizer.arguments["lr"]
    )
    assert config.model.arguments["width"] != 8
    assert config.clip.threshold == 0.125
    config = job(conf, "recipe=spelled")
    assert (config.recipe, config.seed, config.clip.mode) == ("spelled", 6, "value")


def test_an_experiment_of_hydras_kind_is_added_with_a_plus(conf):
    for more, threshold in (([], 0.3), (["clip.threshold=2"], 2)):
        config = job(conf, "+experiment=big", *more)
        assert (config.clip.mode, config.clip.threshold) == ("value", threshold), threshold
    config = job(conf, "model={_target_:own.Other,width:3}", "model.depth=2")
    assert config.model.mapping() == {"_target_": "own.Other", "width": 3, "depth": 2}
    config = job(conf, "+experiment=own", "model.depth=2", "data.samples=9")
    assert config.model.mapping() == {"_target_": "own.Net", "width": 32, "depth": 2}
    assert config.data.arguments == {"samples": 9}


def test_recipes_are_swept_over(conf):
    words = ["recipe=mine,none", "clip=none,norm,value"]
    requested = request(words, multirun=True, config_dir=conf)
    thresholds = [run.config.clip.threshold for run in requested.jobs]
    assert thresholds == [None, 1.0, 0.125, None, 1.0, 0.5]
    assert [run.config.seed for run in requested.jobs] == [5, 5, 5, 0, 0, 0]


def test_a_recipe_may_be_a_sweep(conf):
    requested = request(["recipe=many", "clip=none,norm"], config_dir=conf)
    assert [run.config.seed for run in requested.jobs] == [1, 1, 2, 2]
    requested = request(["recipe=classes"], config_dir=conf)
    assert [run.config.model.target for run in requested.jobs] == ["own.A", "own.B"]


def test_a_class_takes_the_place_of_a_section_of_a_recorded_run(conf):
    file = conf / "run.yaml"
    [recorded] = request(["recipe=loss"], config_dir=conf).jobs
    write_yaml(file, recorded.plain)
    changed = recorded_job(file, ["data=own.points", "data.rows=3", "loss=own.Other"], conf).config
    assert changed.data.mapping() == {"_target_": "own.points", "rows": 3}
    assert changed.loss.mapping() == {"_target_": "own.Other"}


def test_all_wrong_changes_of_a_recorded_run_are_named(conf):
    file = conf / "run.yaml"
    [recorded] = request(["recipe=loss"], config_dir=conf).jobs
    write_yaml(file, recorded.plain)
    with pytest.raises(RequestError) as refused:
        recorded_job(file, ["~model", "+experiment=big", "~data=mien", "seed=-1"], conf)
    words = ["~data=mien", "model._target_=???", "seed=-1"]
    assert [problem.word for problem in refused.value.problems] == words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("model=mien", r"model=mien  there is no model/mien; did you mean mine\?"),
        ("clip=gentel", r"did you mean gentle\?"),
        ("recipe=mien", r"recipe=mien  there is no recipe/mien; did you mean mine\?"),
        ("recipe=wrong", r"recipe=wrong  there is no model/mien.*did you mean mine\? .*awd_lstm"),
        ("recipe=torn seed=-1", r"(?s)recipe=torn .*torn\.yaml cannot be read: .*seed=-1 "),
        ("recipe=five", r"five\.yaml: defaults must be a list"),
        ("recipe=listed", r"listed\.yaml cannot be read"),
        ("recipe=odd", r"did you mean clip\.threshold"),
        ("model=torn", r"model=torn .*torn\.yaml"),
        ("recipe=bare clip._target_=own.Clip", r"clip\._target_=own\.Clip  .*No module named"),
        ("model=mine model.wdith=3", r"model\.wdith=3  .*did you mean model\.width\?"),
    ],
)
def test_mistakes_are_named_with_the_nearest_name(conf, words, expected):
    with pytest.raises(RequestError, match=expected):
        request(words.split(), config_dir=conf)


def edit(conf, files="*.yaml"):
    for file in conf.rglob(files):
        file.write_text(file.read_text().translate(str.maketrans("267", "379")))


@pytest.mark.parametrize(
    "words",
    [
        ["model=mine"],
        ["clip=gentle"],
        ["recipe=mine"],
        ["+experiment=own"],
        ["data=mine", "seed=8"],
    ],
)
def test_a_job_of_a_sweep_is_composed_of_the_files_as_they_were_planned(conf, outputs, words):
    """In another process too, which gets Hydra's own overrides first."""
    planned = request(
        [*words, "train.max_duration=2ba,3ba", "hydra/launcher=joblib"],
        multirun=True,
        config_dir=conf,
    )
    edit(conf)
    composer = pickle.loads(pickle.dumps(planned.composer))
    master = planned.composition.config
    for job in planned.jobs:
        with composer.active():
            config = composer.load_sweep_config(master, list(job.overrides))
            refer_to(config)
            with open_dict(config):
                del config.hydra
            _, plain = resolved_and_recorded(config)
        assert config_hash(plain) == job.hash


def test_a_search_refuses_choices_that_it_composes_of_a_file_that_was_changed(conf, outputs):
    words = [
        "model=mine,cnn",
        "clip=norm,value",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=4",
    ]
    planned = request(words, multirun=True, config_dir=conf)
    edit(conf, "model/mine.yaml")
    master = planned.composition.config
    with planned.composer.active():
        planned.composer.load_sweep_config(master, ["model=mine", "clip=norm"])
        with pytest.raises(
            RequestError, match=r"model/mine\.yaml was changed while the sweep runs"
        ):
            planned.composer.load_sweep_config(master, ["model=mine", "clip=value"])
