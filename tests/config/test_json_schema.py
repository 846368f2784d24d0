"""The JSON Schema that editors complete and check YAML files with."""

import json

import jsonschema
import pytest

from runner.cli.main import main
from runner.config.check import owned_keys
from runner.config.folders import find
from runner.config.yaml_file import read_yaml

REFUSED = [
    ("", {"clip": {"treshold": 1}}, ["clip"]),
    ("", {"cilp": {}}, []),
    ("", {"seed": -1}, ["seed"]),
    ("clip", {"threshold": 0}, ["threshold"]),
    ("clip", {"mode": "nrom"}, ["mode"]),
    ("clip", {"units": {"w": "a"}}, ["units"]),
    ("plugin", {"tp_plan": {"head": "columns"}}, ["tp_plan"]),
    ("", {"train": {"max_duration": "3 weeks"}}, ["train", "max_duration"]),
]
TAKEN = [
    ("", {"clip": {"threshold": None}, "data": {"anything": 1}, "hydra": {"mode": "MULTIRUN"}}),
    ("", {"seed": "???", "clip": {"threshold": "${optimizer.lr}"}}),
    ("clip", {"norm_type": "inf", "exclude": ["a"], "units": {"w": [0, 1], "v": 1}}),
    ("plugin", {"tp_plan": "plan.yaml", "split": ["blocks.1"], "param_dtype": None}),
]


@pytest.mark.usefixtures("outputs")
def test_an_editor_underlines_what_a_request_refuses_and_no_file_of_ours(capsys):
    assert main(["schema"]) == 0
    whole = json.loads(capsys.readouterr().out)
    jsonschema.Draft7Validator.check_schema(whole)

    def errors(section, content):
        part = {"$ref": f"#/$defs/{section}"} if section else whole
        validator = jsonschema.Draft7Validator({**part, "$defs": whole["$defs"]})
        return [list(error.absolute_path) for error in validator.iter_errors(content)]

    for file in [*find("conf").rglob("*.yaml"), *find("recipes").glob("*.yaml")]:
        group = file.stem.removesuffix("_keys") if "_keys" in file.stem else file.parent.name
        section = "" if group in ("conf", "recipes") else group
        assert errors(section, read_yaml(file)) == [], file
    for section, content in TAKEN:
        assert errors(section, content) == [], content
    for section, content, place in REFUSED:
        assert place in errors(section, content), content
    for key in owned_keys().values():
        section, _, name = key.name.rpartition(".")
        described = whole["$defs"][section] if section else whole
        assert described["properties"][name]["description"] == key.meaning
