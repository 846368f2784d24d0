"""The comparison on real ranks: right plugins pass, wrong ones do not."""

import pytest

from runner.config.modes import NAMES
from tests.ranks import run_ranks
from tests.verify.requests import IMAGES, TOKENS, net, plain_of, verify

NORM = ["clip=norm", "clip.threshold=0.2"]
MODES = ["none", "norm", "value", "adaptive"]
EVERY_MODE = [*NORM, f"verify.modes=[{','.join(MODES)}]", "accumulation.steps=3"]
PLUGINS = ["ddp", "pipeline", "fsdp", "tensor", "zero"]
SPARE = [*IMAGES, *net("Normed"), "+model.spare=true", "plugin=fsdp"]
STREAM = [
    *("data=own", "data.train._target_=tests.verify.nets.Images", "data.batch_size=4", *NORM),
    *("loss._target_=tests.verify.nets.Tempered", "accumulation.steps=2", "verify.steps=3"),
    *("train.max_duration=4ba", "sweep.objective=train/loss", "device=cpu", *net("Normed")),
]
NORMED = [*IMAGES, *net("Normed"), "plugin=ddp"]
FLOAT32 = ["verify.dtype=float32", "model.dropout=0.1", "precision=bf16"]
SPIKE = ["clip=spike", "clip.threshold=2", "clip.min_steps=0", "optimizer=adamw"]
# The reference has none of these but the phases.
SWITCHED = ["activation_checkpointing=blocks", "compile=blocks", "compile.backend=eager"]
SWITCHED += ["accumulation.steps={0:1,1ba:2}"]
ON_TWO = {
    # 70 samples in steps of 24 or 12: the epoch ends within the three steps compared, unevenly.
    **{name: ([*TOKENS, f"plugin={name}", *EVERY_MODE], None) for name in PLUGINS[:2]},
    **{name: ([*TOKENS, f"plugin={name}", *NORM], None) for name in PLUGINS[2:]},
    "fsdp": ([*TOKENS, "plugin=fsdp", *NORM, *SWITCHED], None),
    "history": ([*TOKENS, "plugin=tensor", *SPIKE], None),
    "float32": ([*TOKENS, *FLOAT32, "plugin=tensor"], None),
    "batch norm": ([*NORMED, "accumulation.steps=2", "clip=adaptive"], None),
    "pipeline of batch norm": ([*IMAGES, *net("Chain"), "plugin=pipeline"], None),
    "dropout": ([*NORMED, "+model.chance=0.5"], None),
    "stream": ([*STREAM, "plugin=fsdp"], None),
    "spare": (SPARE, None),
    "zeros": (SPARE, "ZerosForUnusedParameters"),
    "twice": ([*TOKENS, "plugin=ddp", *NORM], "CountsReplicasTwice"),
    "reduces nothing": ([*TOKENS, "plugin=ddp", "clip=none"], "ForgetsToReduce"),
    "by stage": ([*TOKENS, "plugin=pipeline", *NORM], "ClipsByStage"),
}
"""Overrides, and a plugin with a fault."""


def verify_each(asked):
    return [verify(plain, faulty) for plain, faulty in asked]


@pytest.fixture(scope="module")
def verified():
    cases = [(plain_of(*words, "plugin.nproc=2"), faulty) for words, faulty in ON_TWO.values()]
    first, second = run_ranks(verify_each, 2, cases)
    assert not any(isinstance(answer, dict) and answer for answer in second), "the first rank tells"
    return dict(zip(ON_TWO, first, strict=True))


def assert_ok(verified, bound=1e-9):
    assert verified["ok"], [mode["failures"] for mode in verified["modes"]]
    assert verified["max_rel_error"] <= bound
    assert verified["causes"] == []
    for mode in verified["modes"]:
        assert mode["max_rel_error"] <= verified["max_rel_error"], mode["mode"]
        assert [step["step"] for step in mode["steps"]] == [1, 2, 3], mode["mode"]
        for step in mode["steps"]:
            assert step["plugin"]["fraction"] == step["reference"]["fraction"]
            loss = pytest.approx(step["loss"]["reference"], rel=max(bound, 1e-9))
            assert step["loss"]["plugin"] == loss


@pytest.mark.xdist_group("side by side")
@pytest.mark.parametrize(
    "case", [*PLUGINS, "batch norm", "pipeline of batch norm", "stream", "spare"]
)
def test_a_right_plugin_takes_the_steps_of_one_process(verified, case):
    assert_ok(verified[case])


@pytest.mark.xdist_group("side by side")
@pytest.mark.parametrize("plugin", PLUGINS[:2])
def test_a_threshold_that_is_not_given_is_derived_so_that_it_binds(verified, plugin):
    none, norm, value, adaptive = verified[plugin]["modes"]
    assert not none["binds"]
    assert norm["binds"]
    assert (norm["threshold"], norm["derived"]) == (0.2, False)
    for mode in (value, adaptive):
        assert mode["derived"], mode["mode"]
        assert 0 < mode["steps"][0]["reference"]["fraction"] < 1, mode["mode"]


@pytest.mark.xdist_group("side by side")
def test_a_mode_with_memory_takes_the_steps_of_one_process(verified):
    """Its counts differ by gradients of keys' biases, which are zero up to rounding."""
    assert verified["history"]["ok"]
    assert verified["history"]["max_rel_error"] < 1e-9
    assert all(verified[name]["modes"][0]["binds"] for name in ("stream", "history"))


@pytest.mark.xdist_group("side by side")
def test_in_float32_the_tolerance_is_larger(verified):
    assert_ok(verified["float32"], bound=1e-5)
    assert verified["float32"]["tolerance"] == 1e-5
    assert verified["float32"]["max_rel_error"] > 1e-12
    [note] = verified["float32"]["notes"]
    assert "plain SGD at a rate of 0.1" in note
    assert "in float32 and without dropout" in note


@pytest.mark.xdist_group("side by side")
@pytest.mark.parametrize(
    ("case", "failure"),
    [
        ("zeros", "spare.bias, spare.weight: a gradient under the plugin, but none in one"),
        ("twice", "‖G‖ of step 1 is off by 0.41"),
        ("reduces nothing", "replicas no longer hold the same bits"),
        ("reduces nothing", "norm of step 1 is"),
        ("by stage", "norm of step 1 is"),
    ],
)
def test_a_faulty_plugin_is_found_out(verified, case, failure):
    [mode] = verified[case]["modes"]
    assert not verified[case]["ok"]
    assert any(failure in line for line in mode["failures"])
    assert len(mode["worst"]) == 5
    if case == "zeros":
        assert mode["max_rel_error"] < 1e-12, "plain SGD does not see it"
        assert len(mode["failures"]) == 3, "one a step"
    else:
        assert verified[case]["max_rel_error"] > 0.01
    if case == "twice":
        assert mode["steps"][0]["norm_error"] == pytest.approx(2**0.5 - 1, rel=1e-6)
        assert verified[case]["naive"] < 1e-12, "torch's own norm of whole gradients is right"


@pytest.mark.xdist_group("side by side")
def test_what_is_no_fault_of_the_plugin_is_named_as_the_cause(verified):
    assert not verified["dropout"]["ok"]
    causes = "\n".join(verified["dropout"]["causes"])
    for part in ("losses of step 1 differ already", "random numbers", "batch norm"):
        assert part in causes


def test_every_mode_is_compared_with_itself():
    modes = f"verify.modes=[{','.join(sorted({*NAMES} - {'groups'}))}]"
    comparison = verify(plain_of(*TOKENS, "plugin=single", "clip=chain", modes))
    assert_ok(comparison, bound=0.0)
    assert len(comparison["modes"]) == len(NAMES) - 1


@pytest.mark.parametrize("clip", ["units", "elements"])
def test_hybrid_on_eight_ranks_clipped_by(clip):
    sizes = ["plugin.dp_size=2", "plugin.tp_size=2", "plugin.pp_size=2", "plugin.nproc=8"]
    words = ["clip=adaptive"] if clip == "units" else [*SPIKE, "plugin.zero_stage=1"]
    comparison = run_ranks(verify, 8, plain_of(*TOKENS, "plugin=hybrid", *sizes, *words))[0]
    if clip == "units":
        assert_ok(comparison, bound=1e-12)
    # The counts of spikes differ by gradients that are zero up to rounding.
    assert comparison["ok"], [mode["failures"] for mode in comparison["modes"]]
    assert comparison["max_rel_error"] <= 1e-12
    assert all(mode["binds"] for mode in comparison["modes"])
    # A rank-local norm sees one stage.
    assert comparison["naive"] == "RuntimeError" or comparison["naive"] > 0.01
