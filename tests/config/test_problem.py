import pickle

import pytest

from runner.config.problem import NOTHING, Problem, RequestError, shown


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
