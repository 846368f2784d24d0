import re

import pytest
from omegaconf import OmegaConf

from runner.compose import resolvers


@pytest.fixture(autouse=True)
def _registered():
    resolvers.register()


def test_a_composition_has_one_id_and_the_next_has_another():
    first = OmegaConf.create({"a": "${runner.id:}", "b": "${runner.id:}"})
    second = OmegaConf.create({"a": "${runner.id:}"})
    assert re.fullmatch("[0-9a-f]{6}", first.a)
    assert first.a == first.b
    assert first.a != second.a


def test_outputs_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path))
    assert OmegaConf.create({"a": "${runner.outputs:}"}).a == str(tmp_path)


def test_the_first_value_that_is_not_null():
    node = {"name": None, "other": "x", "a": "${runner.first:${name},${other}}"}
    assert OmegaConf.create(node).a == "x"
    assert OmegaConf.create({**node, "name": "y"}).a == "y"


def test_registering_again_does_no_harm():
    resolvers.register()
    assert OmegaConf.create({"a": "${runner.id:}"}).a
