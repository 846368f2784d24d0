"""A value that a target refuses is named by its key."""

import math

import pytest
import torch
from torch import nn

from runner.config.section import Target
from runner.train import build
from runner.train.refused import to_blame, unknown, wrong_kinds


def net(**arguments):
    return Target.of("tests.refusing.Net", arguments)


def made(target):
    return build.maker(target)()


def blamed(target, section="model"):
    with pytest.raises(Exception) as error:  # noqa: PT011 - any error of a constructor
        made(target)
    return [(p.key, p.value, p.message) for p in to_blame(section, target, made, error.value)]


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("width", "abc", "an integer"),
        ("width", 4.0, "an integer"),
        ("width", True, "an integer"),
        ("width", None, "an integer"),
        ("scale", "1e-3x", "a number or null"),
        ("scale", math.nan, "a number or null"),
        ("scale", False, "a number or null"),
        ("kind", "gate", "plain or gated"),
        ("widths", 3, "a list"),
        ("bias", "no", "true or false"),
        ("bias", 1, "true or false"),
        ("kind", None, "plain or gated"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_is_allowed(argument, value, allowed):
    [problem] = wrong_kinds("model", net(**{argument: value}))
    assert problem.key == f"model.{argument}"
    assert problem.value is value
    assert problem.message == f"must be {allowed} (tests.refusing.Net)"


@pytest.mark.parametrize(
    "arguments",
    [
        {"width": 8, "scale": 1, "kind": "gated", "widths": [1, 2], "bias": False},
        {"scale": math.inf},
        {"scale": None},
        {"act": {"_target_": "torch.nn.ReLU"}},
        {"act": "relu"},  # more than plain kinds may do
        {"free": 5},
    ],
)
def test_what_the_annotations_allow_is_left_alone(arguments):
    assert wrong_kinds("model", net(**arguments)) == []


def test_a_target_without_annotations_or_signature_is_left_alone():
    assert wrong_kinds("optimizer", Target.of("tests.refusing.Optimizer", {"lr": "abc"})) == []
    assert wrong_kinds("model", Target.of("builtins.dict", {"lr": "abc"})) == []
    assert unknown("model", Target.of("builtins.dict", {"lr": "abc"})) == []


def test_each_unknown_argument_is_named_with_the_ways_out():
    found = unknown("model", Target.of("tests.refusing.pair", {"first": 1, "frist": 2, "x": "y"}))
    assert [(one.word, one.message) for one in found] == [
        (
            "model.frist=2",
            "tests.refusing.pair has no such argument; did you mean first? "
            "Remove it with ~model.frist. Arguments: first, second",
        ),
        (
            "model.x=y",
            "tests.refusing.pair has no such argument. "
            "Remove it with ~model.x. Arguments: first, second",
        ),
    ]


def test_every_key_that_is_refused_is_named_with_its_own_error():
    given = {"params": [nn.Parameter(torch.ones(1))], "nesterov": True, "lr": -1, "momentum": -2}
    found = blamed(Target.of("tests.refusing.Optimizer", given), "optimizer")
    refuses = "tests.refusing.Optimizer refuses it"
    assert found == [
        ("optimizer.lr", -1, f"{refuses}: lr is negative"),
        ("optimizer.momentum", -2, f"{refuses}: momentum is negative"),
    ]


def test_an_error_that_names_no_argument_is_traced_to_the_one_that_causes_it():
    [(key, value, message)] = blamed(net(width=8, free="no", bias=False))
    assert (key, value) == ("model.free", "no")
    assert message == "tests.refusing.Net refuses it: RuntimeError: I will not"


def test_where_no_usual_value_is_known_the_error_tells():
    [(key, value, message)] = blamed(Target.of("tests.refusing.pair", {"first": 3, "second": 2}))
    assert (key, value) == ("model.second", 2)
    assert message.startswith("tests.refusing.pair refuses it: second must be at least first")


def test_where_nothing_tells_the_target_is_named():
    [(key, value, message)] = blamed(Target.of("tests.refusing.silent", {"first": 3, "second": 2}))
    assert (key, value) == ("model._target_", "tests.refusing.silent")
    assert message == "refused its arguments: ValueError: no"


def test_the_values_of_conf_are_the_usual_ones():
    usual = {"vocabulary": 256, "context": 64, "layers": 1, "tied": True, "bias": True}
    target = Target.of("runner.models.gpt.GPT", {**usual, "heads": 3, "width": 64, "dropout": 2.0})
    found = {key: message for key, _, message in blamed(target)}
    assert found.keys() == {"model.heads", "model.dropout"}
    assert "3 heads do not divide a width of" in found["model.heads"]
    assert "dropout probability" in found["model.dropout"]
