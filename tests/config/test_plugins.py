"""Section ``plugin``: what goes with which option, each wrong request with a way out."""

import pytest

from runner.config.check import examine
from runner.config.folders import options
from runner.config.plugin_section import uses
from tests.config.composed import plain, problems

SPECIAL = {"tp_plan": {"head": "colwise"}, "schedule": "gpipe", "split": ["blocks.1"]}
SPECIAL |= {"param_dtype": "bf16", "zero_stage": 1}
ASKED = {
    key: SPECIAL.get(key, not neutral if isinstance(neutral, bool) else 2)
    for key, (neutral, _) in uses().items()
}
"""A value of each key that asks for something."""


def asked(name, **given):
    found = plain(f"plugin={name}")
    found["plugin"] |= given
    return found


@pytest.mark.parametrize("name", options("plugin"))
def test_a_key_that_nothing_uses_names_the_plugins_that_do(name):
    for key, (_, plugins) in uses().items():
        found = {one.key: one.message for one in examine(asked(name, **{key: ASKED[key]}))[1]}
        if name in plugins:
            assert "has no meaning under" not in str(found)
            continue
        assert list(found) == [f"plugin.{key}"]
        said = found[f"plugin.{key}"]
        assert f"has no meaning under plugin={name}" in said
        assert all(f"plugin={option}" in said for option in plugins)


STAGES_4 = {"pp_size": 4, "num_microbatches": 3}
ROUNDS = {"pp_size": 2, "schedule": "interleaved_1f1b"}
AXES = {"dp_size": 2, "tp_size": 2, "pp_size": 2}
NO_RESHARD = {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("name", "given", "key", "said"),
    [
        ("zero", {"zero_stage": 0}, "zero_stage", "1, 2 or 3"),
        ("zero", NO_RESHARD, "reshard_after_forward", "zero_stage=1"),
        ("zero", {"zero_stage": 2, **NO_RESHARD}, "reshard_after_forward", "zero_stage=2: give 3"),
        ("zero", {"param_dtype": "fp16"}, "param_dtype", "give 2 or more"),
        ("hybrid", {"zero_stage": 1, "cpu_offload": True}, "cpu_offload", "zero_stage=1: give 2"),
        ("hybrid", {"tp_size": None}, "tp_size", "must be a number"),
        ("pipeline", {"tp_size": None}, "tp_size", "has no meaning under plugin=pipeline"),
        ("hybrid", {"nproc": 6, **AXES}, "nproc", "6 ranks cannot be dp_size 2 x tp_size 2 x"),
        ("hybrid", {"dp_size": 3, "ep_size": 2}, "ep_size", "3 data-parallel ranks"),
        ("tensor", {"tp_size": 1, "sequence_parallel": True}, "sequence_parallel", "2 or more"),
        ("hybrid", {"sequence_parallel": True}, "sequence_parallel", "plugin.tp_size"),
        ("pipeline", STAGES_4, "num_microbatches", "must be 4 or more, one for each stage, or"),
        ("pipeline", {**ROUNDS, "num_microbatches": 5}, "num_microbatches", "a multiple of 2"),
        ("pipeline", {"pp_size": 2, "split": ["a", "b"]}, "split", "must name 1 modules"),
        ("pipeline", {**ROUNDS, "split": ["a"]}, "split", "must name 3 modules"),
    ],
)
def test_what_cannot_stand_together_is_named_with_a_way_out(name, given, key, said):
    found = problems(asked(name, **given))
    assert list(found) == [f"plugin.{key}"]
    assert said in found[f"plugin.{key}"]
