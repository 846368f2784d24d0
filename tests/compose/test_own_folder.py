"""A folder of a user's own (``--config-dir``): only what differs, diagnosed like ours."""

import pytest

from runner.compose.answers import help_text
from runner.compose.composer import Source
from runner.compose.request import request
from runner.config.problem import RequestError

FILES = {
    "model/mine.yaml": "_target_: own.Net\nwidth: 16\n",
    "data/mine.yaml": "_target_: own.points\nbatch_size: 20\n",
    "recipe/mine.yaml": (
        "# mine: a trial of my own.\n"
        "defaults:\n  - override /model: mine\n  - override /data: mine\n"
        "model: {width: 8}\noptimizer: {lr: 0.3}\nseed: 5\n"
    ),
    # As Hydra's own documentation writes such a file.
    "recipe/spelled.yaml": (
        "# @package _global_\ndefaults:\n  - override /clip: value\nrecipe: spelled\nseed: 6\n"
    ),
    "recipe/many.yaml": "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n",
}


@pytest.fixture
def own(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Source(extra=tmp_path / "conf")


def job(own, *words):
    [only] = request(words, source=own, writes=False).jobs
    return only.config


def test_files_give_only_what_differs(own):
    config = job(own, "model=mine", "data=mine")
    assert (config.data.batch_size, config.data.num_workers, config.data.drop_last) == (
        20,
        0,
        False,
    )
    assert config.data.arguments == {}
    assert config.model.arguments == {"width": 16}
    assert job(own, "data=mine", "data.num_workers=2").data.num_workers == 2


def test_a_recipe_is_one_like_ours(own):
    config = job(own, "recipe=mine")
    assert (config.recipe, config.seed, config.optimizer.arguments["lr"]) == ("mine", 5, 0.3)
    assert (config.model.target, config.model.arguments) == ("own.Net", {"width": 8})
    # Values of a recipe belong to the options that it chooses; overrides take precedence.
    assert job(own, "recipe=mine", "model=gpt").model.arguments["width"] != 8
    assert job(own, "recipe=mine", "seed=7", "model.width=4").model.arguments == {"width": 4}
    assert job(own, "recipe=gpt").recipe == "gpt"


def test_a_recipe_may_spell_out_its_package_and_name(own):
    config = job(own, "recipe=spelled")
    assert (config.recipe, config.seed, config.clip.mode) == ("spelled", 6, "value")


def test_recipes_are_swept_over(own):
    found = request(["recipe=mine,none"], multirun=True, source=own, writes=False)
    assert [one.config.seed for one in found.jobs] == [5, 0]
    found = request(["recipe=many"], source=own, writes=False)
    assert [one.config.seed for one in found.jobs] == [1, 2]


def test_a_file_takes_the_place_of_ours_with_its_name(own):
    (own.extra / "recipe" / "gpt.yaml").write_text("# gpt: another one.\nseed: 9\n")
    assert job(own, "recipe=gpt").seed == 9
    assert job(Source(), "recipe=gpt").seed == 0
    assert "  gpt                      another one.\n" in help_text([], own)


def test_help_lists_recipes_with_their_purposes(own):
    text = help_text([], own)
    assert "  mine                     a trial of my own.\n" in text
    assert "  spelled\n" in text
    assert "a trial of my own" not in help_text([])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model=mien", r"model=mien  unknown option; did you mean mine\?"),
        ("recipe=mien", r"recipe=mien  unknown option; did you mean mine\?"),
        ("recipe=spelld", r"did you mean spelled\?"),
        (
            "recipe=wrong",
            r"recipe=wrong  chooses model/mien, which .*did you mean mine\? .*awd_lstm",
        ),
        ("recipe=torn", r"recipe=torn .*recipe/torn\.yaml cannot be read: line"),
        ("model.wdith=3", r"model\.wdith=3  unknown key; did you mean model\.width\?"),
    ],
)
def test_mistakes_are_named_with_the_nearest_name(own, word, expected):
    (own.extra / "recipe" / "wrong.yaml").write_text("defaults: [{override /model: mien}]\n")
    (own.extra / "recipe" / "torn.yaml").write_text("clip: {threshold: 1\n")
    words = [word] if word.startswith(("model=", "recipe=")) else ["model=mine", word]
    with pytest.raises(RequestError, match=expected):
        request(words, source=own, writes=False)
    assert job(own, "recipe=mine").seed == 5
