"""Section ``plugin``: what goes with which option, and how ranks are divided among the axes."""

from typing import get_args

import pytest

from runner.booster.plugin import SCHEDULES
from runner.config.check import examine, parse
from runner.config.folders import options
from runner.config.plugin_section import PluginSection, uses
from runner.config.problem import RequestError
from runner.train import preflight
from runner.train.build import mesh_of
from tests.config.composed import plain, problems

SPECIAL = {"tp_plan": {"head": "colwise"}, "schedule": "gpipe", "split": ["blocks.1"]}
SPECIAL |= {"param_dtype": "bf16", "zero_stage": 1}
ASKED = {key: not none if isinstance(none, bool) else 2 for key, (none, _) in uses().items()}
ASKED |= SPECIAL
"""A value of each key that asks for something."""


def config_with(name, **options):
    config = plain(f"plugin={name}")
    config["plugin"] |= options
    return config


@pytest.mark.parametrize("name", options("plugin"))
def test_a_key_that_nothing_uses_names_the_plugins_that_do(name):
    for key, (_, plugins) in uses().items():
        messages = {
            problem.key: problem.message
            for problem in examine(config_with(name, **{key: ASKED[key]}))[1]
        }
        if name in plugins:
            assert "has no meaning under" not in str(messages)
            continue
        assert list(messages) == [f"plugin.{key}"], key
        said = messages[f"plugin.{key}"]
        assert f"has no meaning under plugin={name}" in said, key
        assert all(f"plugin={option}" in said for option in plugins), key


AXES = {"dp_size": 2, "tp_size": 2, "pp_size": 2}
TP_PP = {"tp_size": 2, "pp_size": 2}
ROUNDS = {"pp_size": 2, "schedule": "interleaved_1f1b"}


@pytest.mark.parametrize(
    ("name", "sizes", "key", "said"),
    [
        ("zero", {"zero_stage": 0}, "zero_stage", "1, 2 or 3"),
        (
            *("zero", {"zero_stage": 2, "reshard_after_forward": False}),
            *("reshard_after_forward", "below plugin.zero_sta"),
        ),
        ("hybrid", {"zero_stage": 1, "cpu_offload": True}, "cpu_offload", "zero_stage=2"),
        ("zero", {"zero_stage": 1, "no_sync": False}, "no_sync", "zero_stage=2"),
    ],
)
def test_what_cannot_stand_together_is_named_with_a_way_out(name, sizes, key, said):
    named = problems(config_with(name, **sizes))
    assert list(named) == [f"plugin.{key}"]
    assert said in named[f"plugin.{key}"]


def test_the_schedules_are_those_that_a_pipeline_has():
    assert {*get_args(PluginSection.model_fields["schedule"].annotation)} == SCHEDULES.keys()


def plugin(name, sizes):
    return parse(plain(f"plugin={name}")).plugin.model_copy(update=sizes)


def test_the_ranks_that_are_asked_for():
    for name, sizes, least, grows in (
        ("single", {}, 1, False),
        ("ddp", {}, 1, True),
        ("moe", {"ep_size": 2, "dp_size": 4}, 4, False),
        ("hybrid", {"tp_size": 2, "ep_size": 2}, 4, True),
        ("hybrid", AXES, 8, False),
        # Machines have equal numbers of ranks.
        ("ddp", {"nnodes": 2, "nproc": 4}, 8, False),
        ("tensor", {"nnodes": 3, "tp_size": 2}, 6, True),
    ):
        section = plugin(name, sizes)
        assert (section.least_ranks, section.may_grow) == (least, grows), name
        assert section.nproc or mesh_of(section, least), (
            name
        )  # what the sizes ask for is never refused


@pytest.mark.parametrize(
    ("name", "sizes", "started", "key", "message"),
    [
        ("single", {"nproc": 2}, (), "nproc", "2 ranks cannot be one: plugin=ddp"),
        ("hybrid", {"nproc": 6, **TP_PP}, (), "nproc", "a multiple of tp_size 2 x pp_size 2 = 4"),
        ("hybrid", {"nproc": 6, **AXES}, (), "nproc", "6 ranks cannot be tp_size 2 x pp_size 2 x"),
        ("tensor", {"nproc": 2, "tp_size": 4}, (), "nproc", "a multiple of tp_size 4"),
        ("moe", {"nproc": 6, "ep_size": 4}, (), "ep_size", "of 6 data-parallel ranks evenly"),
        ("hybrid", {"dp_size": 3, "ep_size": 2}, (), "ep_size", "3 data-parallel ranks"),
        ("pipeline", {"pp_size": 4, "num_microbatches": 3}, (), "num_microbatches", "4 or more"),
        ("pipeline", {**ROUNDS, "num_microbatches": 5}, (), "num_microbatches", "multiple of 2"),
        ("pipeline", {"pp_size": 2, "split": ["norm", "head"]}, (), "split", "name 1 of"),
        # Of several machines; three numbers: of ranks started, on a machine, and of machines.
        ("tensor", {"nnodes": 2, "nproc": 2}, (), "tp_size", "4 do not divide the 2"),
        ("tensor", {}, (4, 2, 2), "tp_size", "4 do not divide the 2 ranks of a machine"),
        ("hybrid", {"tp_size": 3}, (6, 2, 3), "tp_size", "(plugin.nnodes=3)"),
        ("ddp", {"nnodes": 3}, (4, 2, 2), "nnodes", "2 machines started ranks"),
        ("ddp", {"nproc": 3}, (4, 2, 2), "nproc", "torchrun started 2 ranks on each machine"),
        ("ddp", {"nproc": 3}, (1, 1, 1), "nproc", "torchrun started 1 rank on each machine"),
        ("hybrid", {"tp_size": 3}, (4, 2, 2), "tp_size", "4 ranks cannot be a multiple of"),
        ("single", {}, (4, 2, 2), "", "torchrun started 4: plugin=ddp trains on all"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_way_out(
    monkeypatch, name, sizes, started, key, message
):
    variables = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in zip(variables, (0, *started) if started else (), strict=False):
        monkeypatch.setenv(variable, str(value))
    config = plain(f"plugin={name}", "device=cpu", "model=gpt", "data=text")
    config["plugin"] |= sizes
    with pytest.raises(RequestError) as error:
        preflight.check(parse(config))
    [problem] = error.value.problems
    assert problem.key == f"plugin.{key}".rstrip(".")
    assert message in problem.message


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TYPED = "plugin.tp_plan={blocks.*.up:colwise,blocks.*.down:rowwise}"
NO_PLANS = {
    "": "a length of at least 1",
    "a: colwise\na: rowwise\n": "duplicate key",
    "a: [colwise\n": "line 2, column 1",
}


def test_a_plan_is_taken_as_it_is_typed():
    typed = plain("plugin=tensor", TYPED)
    assert parse(typed).plugin.tp_plan == typed["plugin"]["tp_plan"] == PLAN
    assert config_with("tensor", tp_plan=PLAN) == typed


def test_a_plan_in_a_file_is_recorded_by_its_content(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("# mine\nblocks.*.up: colwise\nblocks.*.down: rowwise\n")
    assert plain("plugin=tensor", f"plugin.tp_plan={file}") == plain("plugin=tensor", TYPED)
    assert parse(config_with("tensor", tp_plan=str(file))).plugin.tp_plan == PLAN


def test_a_file_that_holds_no_plan_is_refused(tmp_path):
    file = tmp_path / "plan.yaml"
    wrong = config_with("tensor", tp_plan=str(file))
    assert "there is no file" in problems(wrong)["plugin.tp_plan"]
    for text, said in NO_PLANS.items():
        file.write_text(text)
        wrong = config_with("tensor", tp_plan=str(file))
        assert said in problems(wrong)["plugin.tp_plan"], text
