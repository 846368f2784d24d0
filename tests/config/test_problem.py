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


def test_one_message_names_every_problem_and_survives_pickling():
    error = RequestError(
        [
            Problem("clip.treshold", 1, "unknown key; did you mean clip.threshold?"),
            Problem("accumulation.steps", 0, "must be an integer of at least 1"),
            Problem("seed", NOTHING, "must be larger", job="seed=-1"),
        ]
    )
    assert str(error).splitlines() == [
        "clip-runner: this request cannot be run (3 problems)",
        "  clip.treshold=1       unknown key; did you mean clip.threshold?",
        "  accumulation.steps=0  must be an integer of at least 1",
        "  seed                  must be larger  (in the job seed=-1)",
    ]
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == error.problems
    assert copy.problems[2].value is NOTHING
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "null"), (True, "true"), (0.25, "0.25"), ("abc", "abc"), ("1.0", "'1.0'")),
        *(("null", "'null'"), ("", "''"), (["a", 1], "[a,1]"), ({"a": None}, "{a:null}")),
        (float("nan"), "nan"),
    ],
)
def test_values_are_shown_as_they_are_typed(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        *(("clip.treshold", "clip.threshold"), ("threshold", "clip.threshold")),
        *(("CLIP.Threshold", "clip.threshold"), ("optimizer.threshold", "clip.threshold")),
        *(("lr", "optimizer.lr"), ("verfy.lr", "verify.lr"), ("sed", "seed")),
        *(("tensor_parallel_size", "plugin.tp_size"), ("verify.tol", "verify.tolerance")),
        *(("tol", "verify.tolerance"), ("plugin.dp", "plugin.dp_size")),
        *(("train.max_durtion", "train.max_duration"), ("accumulation.step", "accumulation.steps")),
        *(("max_grad_norm", "clip.threshold"), ("epochs", "train.max_duration")),
        ("training.learning_rate", "optimizer.lr"),
    ],
)
def test_the_key_that_was_meant_comes_first(wrong, right):
    assert nearest_keys(wrong, KEYS)[0] == right


def test_the_name_that_was_meant():
    assert nearest_name("nrom", ["none", "norm", "value"]) == "norm"
    assert nearest_name("Norm", ["none", "norm"]) == "norm"
    assert nearest_name("gpu", ["auto", "cpu", "cuda"]) == "cuda"
    assert nearest_name("half", ["fp32", "bf16", "fp16"]) == "fp16"
    intervals = {"checkpoint.interval", "eval.interval", "log.interval"}
    assert set(nearest_keys("interval", KEYS)) == intervals
    assert nearest_keys("qqqqqq.zzzzz", KEYS) == []
    assert nearest_name("qqqq", ["norm", "value"]) is None
    assert [or_list(names) for names in (["a"], ["a", "b", "c"])] == ["a", "a, b or c"]
