import pytest

from runner.config.identity import config_hash, differences
from runner.config.masking import masked, masked_words

CLIP = {"mode": "norm", "threshold": 0.25, "exclude": ["head.*"]}
CONFIG = {
    "seed": 0,
    "clip": CLIP,
    "tracker": {"mode": "auto"},
    "log": {"interval": 1},
    "sweep": {"name": None},
}


def test_the_hash_is_a_number_of_16_digits():
    assert len(config_hash(CONFIG)) == 16
    assert int(config_hash(CONFIG), 16) >= 0


def test_the_hash_does_not_depend_on_the_order_of_keys():
    reordered = dict(reversed(CONFIG.items()))
    assert config_hash(reordered) == config_hash(CONFIG)
    assert differences(CONFIG, reordered) == {}
    assert config_hash({"a": {1: 2, "b": 3}}) == config_hash({"a": {"b": 3, 1: 2}})


def test_how_an_experiment_is_watched_does_not_change_its_hash():
    elsewhere = {"tracker": {"mode": "offline"}, "log": {}, "sweep": {"name": "mine"}}
    elsewhere |= {"checkpoint": {"keep": 3}, "resume": {"from": "auto"}, "shutdown": {"timeout": 1}}
    assert config_hash(CONFIG | elsewhere) == config_hash(CONFIG)
    assert differences(CONFIG, CONFIG | elsewhere) == {}


def test_another_experiment_has_another_hash():
    looser = CONFIG | {"clip": CLIP | {"threshold": 0.5}}
    assert config_hash(looser) != config_hash(CONFIG)
    assert differences(CONFIG, looser)


def test_keys_that_differ_are_named_with_both_values():
    changed = {**CONFIG, "clip": {"mode": "norm", "threshold": 0.5, "eps": 1}, "optimizer": {}}
    assert differences(CONFIG, changed) == {
        "clip.threshold": (0.25, 0.5),
        "clip.eps": ("???", 1),
        "clip.exclude": (["head.*"], "???"),
        "optimizer": ("???", {}),
    }


def test_a_longer_run_may_continue():
    for duration, counts in (("60ba", 0), ("61ba", 0), ("59ba", 1), ("60ep", 1), (60, 1)):
        differing = differences(
            {"train": {"max_duration": "60ba"}}, {"train": {"max_duration": duration}}
        )
        assert len(differing) == counts


SECRET = "hf_token token access_token api_key apikey password WANDB_API_KEY client_secret"
OPEN = "pad_token mask_token tokens token_id tokens_per_sample key sort_key monkey author secretary"


@pytest.mark.parametrize("name", SECRET.split())
def test_the_value_of_a_secret_key_is_masked(name):
    assert masked({"model": {name: "abc"}}) == {"model": {name: "***"}}
    assert masked({name: None, "list": {name: ["a", "b"]}}) == {
        name: None,
        "list": {name: ["***"] * 2},
    }
    assert masked_words([f"+model.{name}=abc"]) == [f"+model.{name}=***"]


@pytest.mark.parametrize("name", OPEN.split())
def test_the_value_of_another_key_stays(name):
    assert masked({name: ["abc"]}) == {name: ["abc"]}


def test_a_mapping_that_holds_a_secret_is_masked_whole():
    words = ["+model={api_key:abc,width:3}", "model.width=3", "-m"]
    assert masked_words(words) == ["+model=***", "model.width=3", "-m"]


def test_a_reference_stays():
    for name in SECRET.split():
        assert masked({name: "${oc.env:ANY}"}) == {name: "${oc.env:ANY}"}, name
    assert masked_words(["model.token='${oc.env:ANY}'"]) == ["model.token='${oc.env:ANY}'"]


@pytest.mark.parametrize("value", ["sk-1${b}", "${a}sk-1", "${a}sk-1${b}"])
def test_a_value_of_which_only_a_part_is_a_reference_is_masked(value):
    assert masked({"token": value}) == {"token": "***"}
    assert masked_words([f"model.token={value}"]) == ["model.token=***"]
    hidden = masked_words([f"callbacks=[{{_target_:m.N,token:{value},url:'${{u}}'}}]"])
    assert hidden == ["callbacks=***"]


def test_a_record_that_lacks_a_later_key_acted_by_its_default():
    current = CONFIG | {"loss": {"_target_": None, "items": "auto"}}
    assert differences(CONFIG | {"loss": {"_target_": None}}, current) == {}


def test_a_record_without_a_later_key_is_one_with_its_default():
    before = {"data": {"batch_size": 1}}
    assert not differences(before, {"data": {"batch_size": 1, "collate": {"_target_": None}}})
    assert differences(before, {"data": {"batch_size": 1, "collate": {"_target_": "mine.pad"}}})
