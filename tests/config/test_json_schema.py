"""The JSON Schema that editors complete and check our YAML with."""

import copy
import json
import re

import jsonschema
import pytest
from omegaconf import OmegaConf

from runner.cli import schema
from runner.compose.composer import Source
from runner.compose.request import request
from runner.config.check import owned_keys
from runner.config.folders import find, options
from runner.config.problem import RequestError

SCHEMA = find("conf") / "schema.json"
FILES = sorted([*find("conf").rglob("*.yaml"), *find("recipes").glob("*.yaml")])
HEADER = re.compile(r"# yaml-language-server: \$schema=([^#\s]+)(?:#/\$defs/(\w+))?")


@pytest.fixture(scope="module")
def whole():
    found = json.loads(SCHEMA.read_text())
    jsonschema.Draft7Validator.check_schema(found)
    return found


def errors(whole, section, content):
    """What an editor underlines in a file whose header names ``section``."""
    part = {"$ref": f"#/$defs/{section}"} if section else copy.deepcopy(whole)
    validator = jsonschema.Draft7Validator({**part, "$defs": whole["$defs"]})
    return [list(error.absolute_path) for error in validator.iter_errors(content)]


def read(file):
    return OmegaConf.to_container(OmegaConf.load(file))


def test_the_committed_file_is_what_the_command_writes(tmp_path, capsys):
    assert schema.main([str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_text() == SCHEMA.read_text(), (
        "run: python -m runner schema conf/schema.json"
    )
    assert schema.main([]) == 0
    assert capsys.readouterr().out == SCHEMA.read_text()


def test_a_file_that_cannot_be_written_is_a_wrong_request():
    with pytest.raises(RequestError, match=r"schema=/proc/schema\.json  cannot be written"):
        schema.main(["/proc/schema.json"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_names_its_schema_and_validates(whole, file):
    comments = re.match(r"(#.*\n)+", file.read_text())[0]
    [(path, section)] = HEADER.findall(comments)
    assert (file.parent / path).resolve() == SCHEMA.resolve()
    group = file.stem.removesuffix("_keys") if file.stem.endswith("_keys") else file.parent.name
    assert section == ("" if group in ("conf", "recipes") else group)
    assert errors(whole, section, read(file)) == []


@pytest.mark.parametrize(
    ("section", "content", "place"),
    [
        ("", {"clip": {"treshold": 1}}, ["clip"]),
        ("", {"cilp": {}}, []),
        ("", {"seed": -1}, ["seed"]),
        ("", {"clip": {"threshold": "x"}}, ["clip", "threshold"]),
        ("clip", {"threshold": 0}, ["threshold"]),
        ("clip", {"mode": "nrom"}, ["mode"]),
        ("clip", {"norm_type": 3}, ["norm_type"]),
        ("clip", {"units": {"w": "a"}}, ["units"]),
        ("clip", {"exclude": "head"}, ["exclude"]),
        ("plugin", {"tp_plan": {"head": "columns"}}, ["tp_plan"]),
        ("plugin", {"schedule": "zigzag"}, ["schedule"]),
        ("accumulation", {"steps": 1.5}, ["steps"]),
        ("data", {"batch_size": "many"}, ["batch_size"]),
        ("", {"train": {"max_duration": "3 weeks"}}, ["train", "max_duration"]),
        ("", {"verify": {"modes": []}}, ["verify", "modes"]),
    ],
)
def test_what_a_request_refuses_an_editor_underlines(whole, section, content, place):
    assert place in errors(whole, section, content)


@pytest.mark.parametrize(
    ("section", "content"),
    [
        ("", {"clip": {"threshold": None}, "data": {"anything": 1}, "hydra": {"mode": "MULTIRUN"}}),
        ("", {"seed": "???", "clip": {"threshold": "${optimizer.lr}"}}),
        ("clip", {"norm_type": "inf", "exclude": ["a"], "units": {"w": [0, 1], "v": 1}}),
        ("plugin", {"tp_plan": "plan.yaml", "split": ["blocks.1"], "param_dtype": None}),
        ("optimizer", {"_target_": "my.Optimizer", "lr": "auto"}),
        ("", {"train": {"max_duration": "100_000sp"}}),
    ],
)
def test_what_a_request_takes_an_editor_leaves_alone(whole, section, content):
    assert errors(whole, section, content) == []


def test_every_key_is_described(whole):
    for key in owned_keys().values():
        section, _, name = key.name.rpartition(".")
        described = whole["$defs"][section] if section else whole
        assert described["properties"][name]["description"] == key.meaning


def test_hydra_takes_it_for_no_configuration():
    assert "schema" not in options("")
    with pytest.raises(RequestError, match=r"there is no schema\.yaml"):
        request([], source=Source(name="schema"), writes=False)
