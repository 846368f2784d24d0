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


def test_the_hash_names_the_experiment_and_not_how_it_is_watched_and_saved():
    plain = config_hash(CONFIG)
    assert len(plain) == 16
    assert int(plain, 16) >= 0
    elsewhere = {"tracker": {"mode": "offline"}, "log": {}, "sweep": {"name": "mine"}}
    elsewhere |= {"checkpoint": {"keep": 3}, "resume": {"from": "auto"}, "shutdown": {"timeout": 1}}
    for same in (dict(reversed(CONFIG.items())), CONFIG | elsewhere):
        assert config_hash(same) == plain
        assert differences(CONFIG, same) == {}
    assert config_hash({"a": {1: 2, "b": 3}}) == config_hash({"a": {"b": 3, 1: 2}})
    other = CONFIG | {"clip": CLIP | {"threshold": 0.5}}
    assert config_hash(other) != plain
    assert differences(CONFIG, other)


def test_keys_that_differ_are_named_with_both_values():
    other = {**CONFIG, "clip": {"mode": "norm", "threshold": 0.5, "eps": 1}, "optimizer": {}}
    assert differences(CONFIG, other) == {
        "clip.threshold": (0.25, 0.5),
        "clip.eps": ("???", 1),
        "clip.exclude": (["head.*"], "???"),
        "optimizer": ("???", {}),
    }


def test_a_longer_run_may_continue():
    for now, counts in (("60ba", 0), ("61ba", 0), ("59ba", 1), ("60ep", 1), (60, 1)):
        found = differences({"train": {"max_duration": "60ba"}}, {"train": {"max_duration": now}})
        assert len(found) == counts


SECRET = "hf_token token access_token api_key apikey password WANDB_API_KEY client_secret"
OPEN = "pad_token mask_token tokens token_id tokens_per_sample key sort_key monkey author secretary"


def test_values_of_secret_keys_are_masked_and_references_stay():
    for name in SECRET.split():
        assert masked({"model": {name: "abc"}}) == {"model": {name: "***"}}, name
        assert masked({name: "${oc.env:ANY}"}) == {name: "${oc.env:ANY}"}
        assert masked_words([f"+model.{name}=abc"]) == [f"+model.{name}=***"]
    for name in OPEN.split():
        assert masked({name: ["abc"]}) == {name: ["abc"]}, name
    given = ["+model={api_key:abc,width:3}", "model.token='${oc.env:ANY}'", "model.width=3", "-m"]
    assert masked_words(given) == ["+model=***", *given[1:]]
    for value in ("sk-1${b}", "${a}sk-1", "${a}sk-1${b}"):
        assert masked({"token": value}) == {"token": "***"}
        assert masked_words([f"model.token={value}"]) == ["model.token=***"]
        hidden = masked_words([f"callbacks=[{{_target_:m.N,token:{value},url:'${{u}}'}}]"])
        assert hidden == ["callbacks=***"]
    assert masked({"token": None, "api_key": ["a", "b"]}) == {"token": None, "api_key": ["***"] * 2}


def test_a_record_that_lacks_a_later_key_acted_by_its_default():
    now = CONFIG | {"loss": {"_target_": None, "items": "auto"}}
    assert differences(CONFIG | {"loss": {"_target_": None}}, now) == {}


def test_a_record_without_a_later_key_is_one_with_its_default():
    before = {"data": {"batch_size": 1}}
    assert not differences(before, {"data": {"batch_size": 1, "collate": {"_target_": None}}})
    assert differences(before, {"data": {"batch_size": 1, "collate": {"_target_": "mine.pad"}}})
