"""Arguments of a target are judged by the values that the files of conf/ give them."""

import copy
import inspect
import math
from importlib import import_module

import pytest
import yaml

from runner.compose.request import request
from runner.config.arguments import misfit, usual
from runner.config.check import examine
from runner.config.folders import find, options

OPEN = ("optimizer", "scheduler", "model", "data")
OWN = {"_target_", "batch_size", "num_workers", "drop_last"}
CHOICES = [(group, option) for group in OPEN for option in options(group)]


def composed(group, option):
    # Every job here is checked value by value: whether the data fits is not the question.
    return request([f"{group}={option}"], writes=False).jobs[0].plain


def wrong_values(example):
    """Values of which no option can make use where its file has ``example``."""
    anything = ["abc", "1e-3x", None, {"a": 1}]
    match example:
        case bool():
            return [*anything, 2, 0.5]
        case int() | float():
            numbers = [-1, -0.5, math.inf, -math.inf, math.nan, True, [1]]
            return [*anything, *numbers, *([] if isinstance(example, float) else [1.5])]
        case str():
            return [None, 5, "", [1]]
        case list():
            return [*anything, 0.5, ["abc"], [-1], [math.nan]]
    return []


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_a_wrong_value_of_any_key_is_named_with_what_is_allowed(group, option):
    plain = composed(group, option)
    target = plain[group]["_target_"]
    for key, example in usual(group, target).items():
        if key in OWN:
            continue
        for value in wrong_values(example):
            changed = copy.deepcopy(plain)
            changed[group][key] = value
            _, found = examine(changed)
            assert [problem.key for problem in found] == [f"{group}.{key}"], (key, value)
            assert found[0].value is value or found[0].value == value
            assert found[0].message.startswith("must be "), (key, value)


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_number_of_a_file_has_a_rule_that_allows_it(group, option):
    plain = composed(group, option)
    known = usual(group, plain[group]["_target_"])
    written = yaml.safe_load((find("conf") / group / f"{option}.yaml").read_text())
    referring = {key for key, value in written.items() if "${" in str(value)}
    assert written.keys() - referring <= known.keys()
    shared = (
        yaml.safe_load((find("conf") / "data_keys.yaml").read_text()) if group == "data" else {}
    )
    assert plain[group].keys() == written.keys() | shared.keys()
    for key in written.keys() - referring:
        value = plain[group][key]
        if value is None or isinstance(value, dict):
            continue
        assert misfit(known[key], object()), key
        assert misfit(known[key], value) is None, key


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_the_kinds_of_a_file_are_those_of_the_signature(group, option):
    """Else a value that the target takes would be refused."""
    pytest.importorskip("torch")
    plain = composed(group, option)[group]
    module, _, name = plain["_target_"].rpartition(".")
    if module == "timm":
        pytest.importorskip("timm")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    for key, value in usual(group, plain["_target_"]).items():
        annotation = str(getattr(parameters.get(key), "annotation", ""))
        if key not in OWN and type(value) is int:
            assert "float" not in annotation, key
        if key not in OWN and isinstance(value, int | float | str):
            ours = module.startswith("runner.")
            assert not ours or "None" not in annotation, key


def test_a_target_of_somebody_elses_is_not_judged_by_the_file_it_replaces():
    assert usual("optimizer", "my.Optimizer") == {}
    plain = composed("optimizer", "sgd")
    plain["optimizer"] |= {"_target_": "my.Optimizer", "lr": "auto"}
    assert examine(plain)[1] == []


def test_an_argument_that_the_file_lacks_is_left_to_the_target():
    plain = composed("optimizer", "sgd")
    plain["optimizer"]["maximize"] = "perhaps"
    assert examine(plain)[1] == []


def test_integers_are_numbers_and_lists_may_be_of_any_length():
    assert misfit(0.5, 1) is None
    assert misfit([1, 8, 8], [3]) is None
    assert misfit([0.9, 0.999], 0.9) == (
        "a list such as [0.9,0.999], each a finite number of at least 0"
    )
    for example in (None, -1, []):
        assert misfit(example, object()) is None
