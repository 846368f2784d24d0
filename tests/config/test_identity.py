from runner.config.identity import config_hash, request_hash, sweep_name

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
