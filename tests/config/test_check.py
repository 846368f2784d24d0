"""A composed configuration becomes a typed one, or every wrong value in it is named."""

import math
import pickle

import pytest
from pydantic import ValidationError

from runner.config.check import parse
from runner.config.notation import UNITS, Duration
from tests.config.composed import changed, plain, problems

WRONG = {
    "clip.threshold": [0, -0.5, math.nan, math.inf, "1.0", True, [1.0], 10**400],
    "clip.mode": ["nrom"],
    "clip.norm_type": [3, None],
    "clip.exclude": ["head", [1]],
    "clip.units": ["w", {}, {"w": [0, "a"]}, {"w": True}],
    "clip.eps": [0],
    "precision.name": ["fp8"],
    "plugin.name": ["dpp"],
    "plugin.zero_stage": [4, -1],
    "plugin.schedule": ["1f1B", None],
    "plugin.split": ["blocks.1"],
    "plugin.tp_plan": [3, ["colwise"]],
    "tracker.project": [" "],
    "train.max_duration": [3, "3 epochs"],
    "sweep.name": ["a/b", ".."],
    "seed": [-1, 1.5, True, 2**32, "0", None],
    "verify.modes": ["norm", [], ["nrom"]],
}
RIGHT = {
    "clip.threshold": [1, 2.5],
    "clip.norm_type": [1, 2, "inf", math.inf],
    "clip.skip": [None, "sigma", {"rule": "ema", "k": 2}],
    "clip.units": [None, {"w": 1}, {"*.w": [0, 1], "b": [], "v": -1}],
    "seed": [0, 2**32 - 1],
    "train.max_duration": ["3ep", "500ba", "100_000sp", "9tok"],
    "verify.modes": [None, ["norm", "value"]],
}
BASE = ("clip=adaptive", "plugin=hybrid")


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_is_named_with_what_is_allowed(key):
    for value in WRONG[key]:
        named = problems(changed(plain(*BASE), key, value))
        assert list(named) == [key], value
        assert "must " in named[key]


def test_a_right_value_is_taken():
    for key, values in RIGHT.items():
        for value in values:
            assert parse(changed(plain(*BASE), key, value))


def test_the_default_configuration_becomes_typed():
    config = parse(plain())
    assert (config.clip.mode, config.clip.threshold, config.recipe) == ("norm", 1.0, "none")
    assert config.train.max_duration == Duration(15, "ep")
    assert parse(changed(plain(), "clip.norm_type", "inf")).clip.norm_type == math.inf


def test_a_configuration_is_frozen():
    config = parse(plain())
    with pytest.raises(ValidationError, match="frozen"):
        config.clip.threshold = 2.0


def test_a_configuration_travels_between_processes():
    config = parse(plain())
    assert pickle.loads(pickle.dumps(config)) == config


def test_arguments_of_a_target_lie_apart_from_the_keys_of_its_section():
    keys = {"batch_size", "num_workers", "drop_last", "_target_"}
    assert not keys & parse(plain()).data.arguments.keys()
    section = {"_target_": "torch.optim.SGD", "lr": 0.1, "deep": {"er": [1, 2]}}
    optimizer = parse(changed(plain(), "optimizer", section)).optimizer
    assert optimizer.mapping() == section
    assert optimizer.arguments["lr"] == 0.1


def test_the_bound_of_a_verification_follows_from_its_dtype():
    assert parse(plain()).verify.bound == 1e-9
    assert parse(changed(plain(), "verify.dtype", "float32")).verify.bound == 1e-5


def test_a_mode_inside_of_another_one_is_named_with_its_place():
    links = [
        {"mode": "adagc", "threshold": -1, "beta": 2},
        {"mode": "norm", "eps": 1},
        "spike",
        1.0,
    ]
    named = problems(changed(plain("clip=chain"), "clip.links", links))
    keys = ["0.beta", "0.threshold", "1.eps", "2.mode", "2.threshold"]
    assert sorted(named) == [f"clip.links.{key}" for key in keys]
    groups = {"a.*": {"mode": "nrom"}, "*.b": {"_target_": "nowhere.Mode"}, "*": {"mode": "norm"}}
    named = problems(changed(plain("clip=groups", "clip.groups={*:1.0}"), "clip.groups", groups))
    assert sorted(named) == [
        f"clip.groups.{key}" for key in ("*.b._target_", "*.threshold", "a.*.mode")
    ]
    assert "did you mean norm?" in named["clip.groups.a.*.mode"]


@pytest.mark.parametrize(("value", "unit"), [(3, "ep"), (100_000, "sp"), (9, "tok")])
def test_a_duration_reads_what_it_prints(value, unit):
    duration = Duration.parse(f"{value:_}{unit}")
    assert str(duration) == f"{value}{unit}"
    assert duration == Duration.parse_interval(str(duration)) == Duration(value, unit)


def test_an_interval_may_be_in_minutes():
    assert Duration.parse_interval("1_000min") == Duration(1000, "min")


@pytest.mark.parametrize(
    "text", ["3", "ep", "0ep", "1.5ep", "3 ep", "3EP", "1__0ba", "10min", pytest.param(3, id="int")]
)
def test_a_wrong_duration_is_refused_with_its_units(text):
    with pytest.raises(ValueError, match="must be a duration") as error:
        Duration.parse(text)
    assert all(f"{unit} ({meaning})" in str(error.value) for unit, meaning in UNITS.items())
    assert "minutes" not in str(error.value)
