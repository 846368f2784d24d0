import pytest

from runner.config.identity import config_hash, differences, request_hash, sweep_name

CONFIG = {
    "seed": 0,
    "clip": {"mode": "norm", "threshold": 0.25, "exclude": ["head.*"]},
    "tracker": {"mode": "auto"},
    "log": {"interval": 1},
    "sweep": {"name": None},
}


def test_the_hash_names_the_experiment():
    plain = config_hash(CONFIG)
    assert len(plain) == 16
    assert int(plain, 16) >= 0
    backwards = dict(reversed(CONFIG.items()))
    elsewhere = {**CONFIG, "tracker": {"mode": "offline"}, "log": {}, "sweep": {"name": "mine"}}
    other = {**CONFIG, "clip": {**CONFIG["clip"], "threshold": 0.5}}
    assert config_hash(backwards) == plain
    assert config_hash(elsewhere) == plain
    assert config_hash(other) != plain


def test_how_a_run_is_watched_and_saved_is_no_part_of_the_experiment():
    more = {"checkpoint": {"keep": 3}, "resume": {"from": "auto"}, "shutdown": {"timeout": 1}}
    assert config_hash(CONFIG | more) == config_hash(CONFIG)
    assert differences(CONFIG, CONFIG | more) == {}


def test_keys_that_differ_are_named_with_both_values():
    other = {**CONFIG, "clip": {"mode": "norm", "threshold": 0.5, "eps": 1}, "optimizer": {}}
    assert differences(CONFIG, other) == {
        "clip.threshold": (0.25, 0.5),
        "clip.eps": ("???", 1),
        "clip.exclude": (["head.*"], "???"),
        "optimizer": ("???", {}),
    }


@pytest.mark.parametrize(
    ("before", "now", "counts"),
    [
        ("60ba", "60ba", False),
        ("60ba", "61ba", False),
        ("60ba", "59ba", True),
        ("60ba", "60ep", True),
        ("60ba", 60, True),
    ],
)
def test_a_longer_run_may_continue(before, now, counts):
    found = differences({"train": {"max_duration": before}}, {"train": {"max_duration": now}})
    assert bool(found) == counts


def test_a_request_is_its_jobs_in_whatever_order():
    assert request_hash(["a", "b"]) == request_hash(["b", "a"])
    assert request_hash(["a", "b"]) != request_hash(["a"])
    assert request_hash(["a", "a"]) != request_hash(["a"])


def test_a_search_is_its_words_too():
    words = ["hydra.sweeper.n_trials=8", "seed=choice(1,2)"]
    assert request_hash(["a"], words) == request_hash(["a"], words[::-1])
    assert request_hash(["a"], words) != request_hash(["a"], words[:1])
    assert request_hash(["a"], words) != request_hash(["a"])


def test_a_name_says_what_varies_and_which_it_is():
    assert sweep_name("none", ["clip.threshold", "seed"], "0123456789") == (
        "clip.threshold-seed-01234567"
    )
    assert sweep_name("sweep_norm", [], "0123456789") == "sweep_norm-01234567"
    assert sweep_name("none", [], "0123456789") == "sweep-01234567"


def test_a_name_is_that_of_a_folder():
    made = sweep_name("none", ["model@x/y", *["optimizer.weight_decay"] * 9], "0123456789")
    assert made.startswith("model-x-y-optimizer.weight_decay")
    assert len(made) < 60


def test_a_key_that_earlier_versions_lacked_changes_nothing_by_its_default():
    newer = {"scales": "auto", "skip": {"rule": None, "of": "norm", "k": None}}
    same = {**CONFIG, "clip": {**CONFIG["clip"], **newer}}
    assert config_hash(same) == config_hash(CONFIG)
    assert differences(CONFIG, same) == {}
    for chosen in ({"scales": "all"}, {"skip": {**newer["skip"], "rule": "sigma"}}):
        other = {**CONFIG, "clip": {**CONFIG["clip"], **newer, **chosen}}
        assert config_hash(other) != config_hash(CONFIG)
        assert differences(CONFIG, other)
