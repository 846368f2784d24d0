"""The JSON Schema that editors complete and check YAML files with."""

import json

import jsonschema
import pytest

from runner.cli.main import main
from runner.config.check import owned_keys
from runner.config.folders import find
from runner.config.yaml_file import read_yaml


@pytest.fixture
def whole(capsys):
    assert main(["schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft7Validator.check_schema(found)
    return found


def errors(whole, section, content):
    """What an editor underlines in a file whose header names ``section``."""
    part = {"$ref": f"#/$defs/{section}"} if section else whole
    validator = jsonschema.Draft7Validator({**part, "$defs": whole["$defs"]})
    return [list(error.absolute_path) for error in validator.iter_errors(content)]


def test_every_file_of_ours_validates_and_every_key_is_described(whole):
    for file in [*find("conf").rglob("*.yaml"), *find("recipes").glob("*.yaml")]:
        group = file.stem.removesuffix("_keys") if "_keys" in file.stem else file.parent.name
        section = "" if group in ("conf", "recipes") else group
        assert errors(whole, section, read_yaml(file)) == [], file
    for key in owned_keys().values():
        section, _, name = key.name.rpartition(".")
        described = whole["$defs"][section] if section else whole
        assert described["properties"][name]["description"] == key.meaning


def test_what_a_request_refuses_an_editor_underlines(whole):
    for section, content, place in [
        ("", {"clip": {"treshold": 1}}, ["clip"]),
        ("", {"cilp": {}}, []),
        ("", {"seed": -1}, ["seed"]),
        ("clip", {"threshold": 0}, ["threshold"]),
        ("clip", {"mode": "nrom"}, ["mode"]),
        ("clip", {"norm_type": 3}, ["norm_type"]),
        ("clip", {"units": {"w": "a"}}, ["units"]),
        ("clip", {"exclude": "head"}, ["exclude"]),
        ("plugin", {"tp_plan": {"head": "columns"}}, ["tp_plan"]),
        ("data", {"batch_size": "many"}, ["batch_size"]),
        ("", {"train": {"max_duration": "3 weeks"}}, ["train", "max_duration"]),
        ("", {"verify": {"modes": []}}, ["verify", "modes"]),
    ]:
        assert place in errors(whole, section, content), content


def test_what_a_request_takes_an_editor_leaves_alone(whole):
    for section, content in [
        ("", {"clip": {"threshold": None}, "data": {"anything": 1}, "hydra": {"mode": "MULTIRUN"}}),
        ("", {"seed": "???", "clip": {"threshold": "${optimizer.lr}"}}),
        ("clip", {"norm_type": "inf", "exclude": ["a"], "units": {"w": [0, 1], "v": 1}}),
        ("plugin", {"tp_plan": "plan.yaml", "split": ["blocks.1"], "param_dtype": None}),
        ("optimizer", {"_target_": "my.Optimizer", "lr": "auto"}),
    ]:
        assert errors(whole, section, content) == [], content
