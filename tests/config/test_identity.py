import pytest

from runner.config.identity import config_hash, differences, request_hash

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
    newer = {"scales": "auto", "skip": {"rule": None, "of": "norm", "k": None}}
    # The last: keys that earlier versions lacked, with their defaults.
    for same in (
        dict(reversed(CONFIG.items())),
        CONFIG | elsewhere,
        CONFIG | {"clip": CLIP | newer},
    ):
        assert config_hash(same) == plain
        assert differences(CONFIG, same) == {}
    for other in (
        {"threshold": 0.5},
        newer | {"scales": "all"},
        newer | {"skip": newer["skip"] | {"rule": "sigma"}},
    ):
        assert config_hash(CONFIG | {"clip": CLIP | other}) != plain
        assert differences(CONFIG, CONFIG | {"clip": CLIP | other})


def test_keys_that_differ_are_named_with_both_values():
    other = {**CONFIG, "clip": {"mode": "norm", "threshold": 0.5, "eps": 1}, "optimizer": {}}
    assert differences(CONFIG, other) == {
        "clip.threshold": (0.25, 0.5),
        "clip.eps": ("???", 1),
        "clip.exclude": (["head.*"], "???"),
        "optimizer": ("???", {}),
    }


@pytest.mark.parametrize(
    ("now", "counts"),
    [("60ba", False), ("61ba", False), ("59ba", True), ("60ep", True), (60, True)],
)
def test_a_longer_run_may_continue(now, counts):
    found = differences({"train": {"max_duration": "60ba"}}, {"train": {"max_duration": now}})
    assert bool(found) == counts


def test_a_request_is_its_jobs_in_whatever_order_and_a_search_its_words_too():
    assert request_hash(["a", "b"]) == request_hash(["b", "a"])
    words = ["hydra.sweeper.n_trials=8", "seed=choice(1,2)"]
    assert request_hash(["a"], words) == request_hash(["a"], words[::-1])
    hashes = [request_hash(jobs) for jobs in (["a"], ["a", "a"], ["a", "b"])]
    hashes += [request_hash(["a"], words), request_hash(["a"], words[:1])]
    assert len({*hashes}) == 5
