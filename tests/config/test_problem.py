import pickle

import pytest

from runner.config.check import owned_keys
from runner.config.problem import (
    NOTHING,
    Problem,
    RequestError,
    nearest_keys,
    nearest_name,
    or_list,
    shown,
)

KEYS = [*owned_keys(), "optimizer.lr", "optimizer.momentum"]


def test_one_message_names_every_problem():
    error = RequestError(
        [
            Problem("clip.treshold", 1, "unknown key; did you mean clip.threshold?"),
            Problem("accumulation.steps", 0, "must be an integer of at least 1"),
        ]
    )
    assert str(error).splitlines() == [
        "clip-runner: this request cannot be run (2 problems)",
        "  clip.treshold=1       unknown key; did you mean clip.threshold?",
        "  accumulation.steps=0  must be an integer of at least 1",
    ]


def test_a_problem_of_one_job_says_which():
    error = RequestError([Problem("seed", -1, "must be larger", job="seed=-1")])
    assert "(1 problem)" in str(error)
    assert str(error).endswith("must be larger  (in the job seed=-1)")


def test_a_problem_without_a_value_shows_none():
    assert Problem("norm", NOTHING, "must be KEY=VALUE").word == "norm"
    assert Problem("norm", None, "must be KEY=VALUE").word == "norm=null"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.25, "0.25"),
        ("abc", "abc"),
        ("1.0", "'1.0'"),
        ("null", "'null'"),
        ("", "''"),
        (["a", 1], "[a,1]"),
        ({"a": None}, "{a:null}"),
        (float("nan"), "nan"),
    ],
)
def test_values_are_shown_as_they_are_typed(value, text):
    assert shown(value) == text


def test_an_error_survives_pickling():
    error = RequestError([Problem("seed", NOTHING, "no value given", "job")])
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == error.problems
    assert copy.problems[0].value is NOTHING
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("clip.treshold", "clip.threshold"),
        ("threshold", "clip.threshold"),
        ("CLIP.Threshold", "clip.threshold"),
        ("optimizer.threshold", "clip.threshold"),
        ("lr", "optimizer.lr"),
        ("verfy.lr", "verify.lr"),
        ("tensor_parallel_size", "plugin.tp_size"),
        ("sed", "seed"),
        ("verify.tol", "verify.tolerance"),
        ("tol", "verify.tolerance"),
        ("plugin.dp", "plugin.dp_size"),
        ("train.max_durtion", "train.max_duration"),
        ("accumulation.step", "accumulation.steps"),
        ("max_grad_norm", "clip.threshold"),
        ("epochs", "train.max_duration"),
        ("training.learning_rate", "optimizer.lr"),
    ],
)
def test_the_key_that_was_meant_comes_first(wrong, right):
    assert nearest_keys(wrong, KEYS)[0] == right


def test_a_key_in_several_sections_names_them():
    named = {"checkpoint.interval", "eval.interval", "log.interval"}
    assert set(nearest_keys("interval", KEYS)) == named


def test_nothing_is_near_to_nonsense():
    assert nearest_keys("qqqqqq.zzzzz", KEYS) == []
    assert nearest_name("qqqq", ["norm", "value"]) is None


@pytest.mark.parametrize(
    ("wrong", "names", "right"),
    [
        ("nrom", ["none", "norm", "value"], "norm"),
        ("Norm", ["none", "norm"], "norm"),
        ("gpu", ["auto", "cpu", "cuda"], "cuda"),
        ("half", ["fp32", "bf16", "fp16"], "fp16"),
    ],
)
def test_the_name_that_was_meant(wrong, names, right):
    assert nearest_name(wrong, names) == right


def test_lists_in_words():
    assert or_list(["a"]) == "a"
    assert or_list(["a", "b", "c"]) == "a, b or c"
