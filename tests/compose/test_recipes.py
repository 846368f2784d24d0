import pytest

from runner.compose import recipes
from runner.compose.request import request
from runner.config.problem import RequestError


def job(*words):
    [only] = request(words, writes=False).jobs
    return only.config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "find", lambda name: tmp_path)
    return tmp_path


MINE = """\
# mine: a trial.
# source: none
# command: python -m runner recipe=mine
defaults:
  - override /clip: value
  - override /optimizer: sgd
clip:
  threshold: 0.125
optimizer:
  lr: 0.3
accumulation:
  steps: 3
seed: 5
"""


def test_a_recipe_beats_the_defaults_and_the_words_beat_the_recipe(folder):
    (folder / "mine.yaml").write_text(MINE)
    config = job("recipe=mine")
    assert config.recipe == "mine"
    assert (config.clip.mode, config.clip.threshold) == ("value", 0.125)
    assert config.optimizer.arguments["lr"] == 0.3
    assert (config.accumulation.steps, config.seed) == (3, 5)
    config = job("recipe=mine", "clip.threshold=2", "optimizer.lr=0.7", "seed=6")
    assert config.clip.threshold == 2
    assert config.optimizer.arguments["lr"] == 0.7
    assert config.seed == 6


def test_another_option_leaves_the_recipes_values_for_the_group_out(folder):
    (folder / "mine.yaml").write_text(MINE)
    config = job("recipe=mine", "optimizer=adamw")
    assert config.optimizer.target == "torch.optim.AdamW"
    assert config.optimizer.arguments["lr"] == job("optimizer=adamw").optimizer.arguments["lr"]
    assert config.clip.threshold == 0.125
    assert job("recipe=mine", "clip=none").clip.threshold is None
    assert job("recipe=mine", "clip=value").clip.threshold == 0.125


def test_each_job_of_a_sweep_decides_for_itself(folder):
    (folder / "mine.yaml").write_text(MINE)
    found = request(["recipe=mine,none", "clip=none,norm,value"], multirun=True, writes=False)
    assert [job.config.clip.threshold for job in found.jobs] == [None, 1.0, 0.125, None, 1.0, 0.5]


def test_a_recipe_that_cannot_be_read_concerns_only_who_asks_for_it(folder):
    (folder / "mine.yaml").write_text(MINE)
    (folder / "torn.yaml").write_text("# torn: broken.\nclip: {threshold: 1\n")
    assert job("recipe=mine").seed == 5
    assert job().recipe == "none"
    with pytest.raises(RequestError, match=r"torn\.yaml cannot be read: line") as error:
        request(["recipe=torn", "seed=-1"], writes=False)
    assert {problem.key for problem in error.value.problems} == {"recipe", "seed"}


def test_a_recipe_holds_keys_and_values(folder):
    (folder / "odd.yaml").write_text("- a\n- b\n")
    with pytest.raises(RequestError, match=r"odd\.yaml cannot be read"):
        request(["recipe=odd"], writes=False)


def test_a_recipe_with_an_unknown_key_is_found_like_a_word(folder):
    (folder / "odd.yaml").write_text("# odd: x.\nclip:\n  treshold: 1\n")
    with pytest.raises(RequestError, match=r"did you mean clip\.threshold"):
        request(["recipe=odd"], writes=False)


def test_a_recipe_that_chooses_what_does_not_exist_is_named(folder):
    (folder / "odd.yaml").write_text("# odd: x.\ndefaults:\n  - override /clip: nrom\n")
    with pytest.raises(RequestError, match=r"recipe=odd .*clip/nrom"):
        request(["recipe=odd"], writes=False)


def test_a_recipe_may_be_a_sweep(folder):
    text = "# many: x.\nhydra: {mode: MULTIRUN, sweeper: {params: {clip.threshold: '0.1,1'}}}\n"
    (folder / "many.yaml").write_text(text)
    found = request(["recipe=many"], writes=False)
    assert found.sweep is not None
    assert [job.config.clip.threshold for job in found.jobs] == [0.1, 1.0]
    assert len(request(["recipe=many", "seed=1,2"], writes=False).jobs) == 4
    with pytest.raises(RequestError, match="seed=-1"):
        request(["recipe=many", "seed=1,-1"], writes=False)


def test_the_purpose_stands_in_the_header(folder):
    (folder / "mine.yaml").write_text(MINE)
    assert [(recipe.name, recipe.purpose) for recipe in recipes.read_all()] == [
        ("mine", "a trial.")
    ]


def test_resnet34_is_the_published_setting():
    config = job("recipe=cifar10_resnet34")
    assert config.model.target == "torchvision.models.resnet34"
    assert config.data.batch_size == 128
    assert config.data.arguments["augment"] is True
    assert config.optimizer.target == "torch.optim.SGD"
    wanted = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    assert wanted.items() <= config.optimizer.arguments.items()
    assert (config.clip.mode, config.clip.threshold, config.clip.norm_type) == ("norm", 0.1, 2)
    assert str(config.train.max_duration) == "200ep"
    assert config.precision.name == "fp32"
    assert job("recipe=cifar10_resnet34", "precision=fp16").precision.name == "fp16"


def test_accumulate_4_probes_four_microbatches_to_a_step():
    config = job("recipe=accumulate_4")
    assert (config.accumulation.steps, config.telemetry.probe) == (4, 10)
    assert config.data.batch_size == 8
    assert config.train.max_duration.unit == "ba"
