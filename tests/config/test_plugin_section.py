"""Section ``plugin``: what goes with which option."""

import copy

import pytest

from runner.compose.request import request
from runner.config.check import examine, parse
from runner.config.folders import options
from runner.config.plugin_section import USES, pipeline_microbatches
from runner.config.problem import RequestError

# A value of each key that asks for something.
ASKED = {
    "find_unused_parameters": True,
    "reshard_after_forward": False,
    "dp_replicate": 2,
    "dp_size": 2,
    "tp_size": 2,
    "pp_size": 2,
    "ep_size": 2,
    "zero_stage": 1,
    "sequence_parallel": True,
    "tp_plan": {"head": "colwise"},
    "schedule": "gpipe",
    "num_microbatches": 4,
    "split": ["blocks.1"],
    "param_dtype": "bf16",
    "cpu_offload": True,
    "sync_batchnorm": True,
}


@pytest.fixture(scope="module")
def jobs():
    found = request([f"plugin={','.join(options('plugin'))}"], multirun=True, writes=False)
    return {job.config.plugin.name: job.plain for job in found.jobs}


@pytest.fixture
def plain(jobs):
    def make(name, **given):
        copied = copy.deepcopy(jobs[name])
        copied["plugin"] |= given
        return copied

    return make


def problems(plain):
    with pytest.raises(RequestError) as error:
        parse(plain)
    return {problem.key: problem.message for problem in error.value.problems}


def test_there_is_a_value_of_every_key():
    assert ASKED.keys() == USES.keys()


@pytest.mark.parametrize("name", options("plugin"))
@pytest.mark.parametrize("key", USES)
@pytest.mark.product(every=8)
def test_a_key_that_nothing_uses_names_the_plugins_that_do(plain, name, key):
    asked = plain(name, **{key: ASKED[key]})
    if name in USES[key].options:
        found = {problem.key: problem.message for problem in examine(asked)[1]}
        assert "has no meaning under" not in str(found)
        return
    found = problems(asked)
    assert list(found) == [f"plugin.{key}"]
    said = found[f"plugin.{key}"]
    assert f"has no meaning under plugin={name}" in said
    if key == "dp_size" and name != "single":
        assert said.endswith("all ranks are data-parallel: give plugin.nproc=2")
    elif key == "dp_size":
        assert "plugin=ddp plugin.nproc=2" in said
    else:
        assert all(f"plugin={option}" in said for option in USES[key].options)


def test_the_message_reads_as_a_sentence(plain):
    assert problems(plain("ddp", tp_size=2))["plugin.tp_size"] == (
        "has no meaning under plugin=ddp; plugin=tensor or plugin=hybrid has tensor parallelism"
    )


def test_every_key_that_nothing_uses_is_named_at_once(plain):
    found = problems(plain("single", nproc=2, tp_size=2, split=["a"]))
    assert found.keys() == {"plugin.nproc", "plugin.tp_size", "plugin.split"}


def test_one_process_is_one_data_parallel_rank(plain):
    assert parse(plain("single", dp_size=1, nproc=1)).plugin.dp_size == 1


@pytest.mark.parametrize(
    ("name", "given", "key", "said"),
    [
        ("zero", {"zero_stage": 0}, "zero_stage", "1, 2 or 3"),
        ("zero", {"reshard_after_forward": False}, "reshard_after_forward", "zero_stage=1"),
        (
            "zero",
            {"zero_stage": 2, "reshard_after_forward": False},
            "reshard_after_forward",
            "has no meaning with plugin.zero_stage=2; stage 3",
        ),
        ("zero", {"param_dtype": "fp16"}, "param_dtype", "stages 2 and 3"),
        ("zero", {"cpu_offload": True}, "cpu_offload", "stages 2 and 3"),
        ("hybrid", {"zero_stage": 1, "cpu_offload": True}, "cpu_offload", "zero_stage=1; stages 2"),
        ("hybrid", {"param_dtype": "bf16"}, "param_dtype", "zero_stage=0; stages 2 and 3"),
        ("hybrid", {"reshard_after_forward": False}, "reshard_after_forward", "stage 3 shards"),
        ("hybrid", {"tp_size": None}, "tp_size", "null means all ranks for plugin=tensor"),
        ("hybrid", {"pp_size": None}, "pp_size", "null means all ranks for plugin=pipeline"),
        ("hybrid", {"ep_size": None}, "ep_size", "null means all ranks for plugin=moe"),
        ("pipeline", {"tp_size": None}, "tp_size", "has no meaning under plugin=pipeline"),
        (
            "hybrid",
            {"nproc": 6, "dp_size": 2, "tp_size": 2, "pp_size": 2},
            "nproc",
            "6 ranks are not dp_size 2 x tp_size 2 x pp_size 2 = 8: give plugin.nproc=8",
        ),
        ("tensor", {"nproc": 6, "tp_size": 4}, "nproc", "give plugin.nproc=4 or 8"),
        ("moe", {"nproc": 4, "ep_size": 3}, "ep_size", "give plugin.ep_size=1, 2 or 4"),
        ("hybrid", {"dp_size": 3, "ep_size": 2}, "ep_size", "3 data-parallel ranks"),
        ("tensor", {"tp_size": 1, "sequence_parallel": True}, "sequence_parallel", "2 or more"),
        ("hybrid", {"sequence_parallel": True}, "sequence_parallel", "plugin.tp_size"),
        (
            "tensor",
            {"nproc": 2, "dp_size": 2, "sequence_parallel": True},
            "sequence_parallel",
            "2 or more",
        ),
        (
            "pipeline",
            {"pp_size": 4, "num_microbatches": 3},
            "num_microbatches",
            "plugin.pp_size=4 with plugin.schedule=1f1b is 4 stages, each of which needs a "
            "microbatch: give 4 or more, or plugin.schedule=gpipe",
        ),
        ("pipeline", {"nproc": 4, "num_microbatches": 3}, "num_microbatches", "4 stages"),
        (
            "hybrid",
            {"pp_size": 2, "num_microbatches": 3, "schedule": "interleaved_1f1b"},
            "num_microbatches",
            "give 4 or more",
        ),
        (
            "pipeline",
            {"pp_size": 2, "num_microbatches": 5, "schedule": "interleaved_1f1b"},
            "num_microbatches",
            "5 microbatches make no equal rounds: give 4 or 6",
        ),
        ("pipeline", {"pp_size": 2, "split": ["a", "b"]}, "split", "must name 1 of them"),
        (
            "pipeline",
            {"pp_size": 2, "split": ["a"], "schedule": "zero_bubble"},
            "split",
            "is 4 stages, so it must name 3",
        ),
    ],
)
def test_what_cannot_stand_together_is_named_with_a_way_out(plain, name, given, key, said):
    found = problems(plain(name, **given))
    assert list(found) == [f"plugin.{key}"]
    assert said in found[f"plugin.{key}"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("zero", {"zero_stage": 3, "reshard_after_forward": False}),
        ("zero", {"zero_stage": 2, "param_dtype": "bf16", "cpu_offload": True}),
        ("tensor", {"sequence_parallel": True}),
        ("pipeline", {"pp_size": 4, "num_microbatches": 3, "schedule": "gpipe"}),
        ("pipeline", {"num_microbatches": 3}),
        ("pipeline", {"pp_size": 2, "num_microbatches": 6, "schedule": "interleaved_1f1b"}),
        ("pipeline", {"pp_size": 2, "split": ["blocks.1"]}),
        ("hybrid", {"dp_size": 2, "tp_size": 2, "pp_size": 2, "zero_stage": 1, "nproc": 8}),
        ("hybrid", {"dp_size": 4, "ep_size": 2, "nproc": 4}),
        ("hybrid", {"zero_stage": 2, "param_dtype": "bf16", "cpu_offload": True}),
        ("hybrid", {"zero_stage": 3, "reshard_after_forward": False, "tp_size": 2}),
    ],
)
def test_what_goes_together(plain, name, given):
    plugin = parse(plain(name, **given)).plugin
    assert {key: getattr(plugin, key) for key in given} == given


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dp_size", 0),
        ("tp_size", "2"),
        ("pp_size", 1.5),
        ("ep_size", True),
        ("zero_stage", 4),
        ("zero_stage", -1),
        ("sequence_parallel", "yes"),
        ("schedule", "1f1B"),
        ("schedule", None),
        ("num_microbatches", 0),
        ("split", "blocks.1"),
        ("param_dtype", "fp32"),
        ("cpu_offload", 1),
        ("dp_replicate", 0),
        ("tp_plan", 3),
        ("tp_plan", ["colwise"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(plain, key, value):
    found = problems(plain("hybrid", **{key: value}))
    assert list(found) == [f"plugin.{key}"]
    assert "must be " in found[f"plugin.{key}"]


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("single", {}, None),
        ("tensor", {"tp_size": 2}, None),
        ("hybrid", {"tp_size": 2}, None),
        ("hybrid", {"num_microbatches": 8}, None),
        ("hybrid", {"pp_size": 2, "num_microbatches": 8}, 8),
        ("hybrid", {"pp_size": 2}, 2),
        ("pipeline", {}, None),
        ("pipeline", {"num_microbatches": 8}, 8),
        ("pipeline", {"nproc": 4}, 4),
        ("pipeline", {"pp_size": 2, "schedule": "zero_bubble"}, 4),
    ],
)
def test_a_batch_must_fill_the_pipeline(plain, name, given, parts):
    asked = plain(name, **given)
    assert pipeline_microbatches(parse(asked).plugin) == parts
    asked["data"]["batch_size"] = parts or 1
    assert parse(asked).data.batch_size
    if parts is not None:
        asked["data"]["batch_size"] = parts - 1
        found = problems(asked)
        assert list(found) == ["data.batch_size"]
        assert f"must be {parts} or more" in found["data.batch_size"]


def test_a_wrong_option_invents_no_conflict_with_another_section(plain):
    asked = plain("pipeline", nproc=4)
    asked["data"]["batch_size"] = 1
    assert len(examine(asked)[1]) == 1
    assert examine(asked, unsettled={"plugin"})[1] == []
    assert examine(asked, unsettled={"clip"})[1] == []


def test_a_plugin_of_somebody_else_is_not_judged(plain, monkeypatch):
    foreign = {"name": "mine", "tp_size": 2, "cpu_offload": True}
    plugin = parse(plain("single")).plugin.model_copy(update=foreign)
    assert list(plugin.conflicts()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("dtype", "bf16"),
        ("tolerance", 0),
        ("lr", 0),
        ("modes", "norm"),
        ("modes", []),
        ("modes", ["nrom"]),
    ],
)
def test_a_wrong_value_of_verify_is_named(plain, key, value):
    asked = plain("single")
    asked["verify"][key] = value
    found = problems(asked)
    assert list(found) == [f"verify.{key}"]
    assert "must be " in found[f"verify.{key}"]


def test_the_tolerance_of_a_comparison_follows_its_numbers(plain):
    asked = plain("single")
    assert parse(asked).verify.bound == 1e-9
    asked["verify"]["dtype"] = "float32"
    assert parse(asked).verify.bound == 1e-5
    asked["verify"] |= {"tolerance": 1e-3, "modes": ["norm", "value"]}
    assert parse(asked).verify.bound == 1e-3
