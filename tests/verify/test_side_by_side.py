"""The comparison on real ranks: right plugins pass, wrong ones do not."""

import pytest

from tests.ranks import run_ranks
from tests.verify.requests import IMAGES, TOKENS, net, plain_of, verify

EVERY_MODE = "verify.modes=[none,norm,value,adaptive]"


def found_on(ranks, *words, faulty=None):
    first, *others = run_ranks(verify, ranks, plain_of(*words), faulty)
    assert all(other["found"] == {} for other in others)
    return first["found"]


def assert_ok(found, modes=1, bound=1e-9):
    assert found["ok"], [mode["failures"] for mode in found["modes"]]
    assert found["max_rel_error"] <= bound
    assert found["causes"] == []
    assert len(found["modes"]) == modes
    for mode in found["modes"]:
        assert mode["max_rel_error"] <= found["max_rel_error"]
        assert [step["step"] for step in mode["steps"]] == [1, 2, 3]
        for step in mode["steps"]:
            assert step["plugin"]["fraction"] == step["reference"]["fraction"]
            loss = pytest.approx(step["loss"]["reference"], rel=max(bound, 1e-9))
            assert step["loss"]["plugin"] == loss


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "tensor", "pipeline", "zero"])
def test_a_plugin_takes_the_steps_of_one_process_in_every_mode(plugin):
    # 70 samples in steps of 24 or 12: the epoch ends within the three steps compared, unevenly.
    words = [*TOKENS, f"plugin={plugin}", "plugin.nproc=2", "accumulation.steps=3"]
    found = found_on(2, *words, "clip=norm", "clip.threshold=0.2", EVERY_MODE)
    assert_ok(found, modes=4)
    none, norm, value, adaptive = found["modes"]
    assert not none["binds"]
    assert norm["binds"]
    assert (norm["threshold"], norm["derived"]) == (0.2, False)
    for mode in (value, adaptive):
        assert mode["derived"]
        assert 0 < mode["steps"][0]["reference"]["fraction"] < 1


def test_hybrid_on_eight_ranks_clipped_by_units():
    sizes = ["plugin.dp_size=2", "plugin.tp_size=2", "plugin.pp_size=2"]
    found = found_on(8, *TOKENS, "plugin=hybrid", *sizes, "clip=adaptive")
    assert_ok(found, bound=1e-12)
    # A rank-local norm sees one stage.
    assert found["naive"] == "RuntimeError" or found["naive"] > 0.01


def test_in_float32_within_its_own_bound():
    words = ["plugin=tensor", "plugin.nproc=2", "verify.dtype=float32", "model.dropout=0.1"]
    found = found_on(2, *TOKENS, *words, "precision=bf16")
    assert_ok(found, bound=1e-5)
    assert found["tolerance"] == 1e-5
    assert found["max_rel_error"] > 1e-12
    said = "\n".join(found["notes"])
    assert "plain SGD at a constant rate of 0.1 instead of SGD" in said
    assert "not in bf16" in said
    assert "dropout is off, in 9 places" in said


def test_batch_norm_sees_the_same_batches_on_both_sides():
    words = [*IMAGES, *net("Normed"), "plugin=ddp", "plugin.nproc=2", "accumulation.steps=2"]
    assert_ok(found_on(2, *words, "clip=adaptive"))
    assert_ok(found_on(2, *IMAGES, *net("Chain"), "plugin=pipeline", "plugin.nproc=2"))


def test_a_layer_that_takes_no_part_has_no_gradient_on_both_sides():
    words = [*IMAGES, *net("Spare"), "plugin=fsdp", "plugin.nproc=2"]
    assert_ok(found_on(2, *words))
    found = found_on(2, *words, faulty="ZerosForUnusedParameters")
    [mode] = found["modes"]
    assert mode["max_rel_error"] < 1e-12, "plain SGD does not see it"
    said = "spare.bias, spare.weight: a gradient under the plugin, but none in one process"
    assert mode["failures"] == [f"in step {step}, {said}" for step in (1, 2, 3)]


def test_batch_norm_of_a_batch_that_fills_no_pipeline_is_named_as_the_cause():
    words = [*net("Chain"), "data.batch_size=7"]
    found = found_on(2, *IMAGES, *words, "plugin=pipeline", "plugin.nproc=2")
    assert not found["ok"]
    assert any("fills a short microbatch up" in cause for cause in found["causes"])


def test_random_numbers_that_nobody_can_switch_off_are_named_as_the_cause():
    model = [*net("Normed"), "+model.chance=0.5"]
    found = found_on(2, *IMAGES, *model, "plugin=ddp", "plugin.nproc=2")
    assert not found["ok"]
    assert any("draws random numbers" in cause for cause in found["causes"])
    assert any("losses of step 1 differ already" in cause for cause in found["causes"])


@pytest.mark.parametrize(
    "name", ["torchvision.models.squeezenet1_1", "timm.models.resnet.resnet10t"]
)
@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.product(every=2)
def test_models_of_other_people(name, plugin):
    model = [f"model._target_={name}", "~model.width"]
    data = ["data.shape=[3,32,32]", "data.batch_size=2", "verify.steps=2"]
    found = found_on(2, *IMAGES, *model, *data, f"plugin={plugin}", "plugin.nproc=2")
    assert found["ok"], found
    assert found["max_rel_error"] < 1e-9


@pytest.mark.parametrize("clip", ["norm", "value", "adaptive"])
def test_replicas_that_are_counted_twice_are_found_out(clip):
    words = [*TOKENS, "plugin=ddp", "plugin.nproc=2", f"clip={clip}", "clip.threshold=0.01"]
    found = found_on(2, *words, faulty="CountsReplicasTwice")
    assert not found["ok"]
    [mode] = found["modes"]
    first = mode["steps"][0]
    assert first["norm_error"] == pytest.approx(2**0.5 - 1, rel=1e-6)
    assert len(mode["worst"]) == 5
    assert any("‖G‖ of step 1 is off by 0.41" in failure for failure in mode["failures"])
    # What torch makes of whole gradients is right.
    assert found["naive"] < 1e-12


def test_a_forgotten_reduction_is_found_out():
    words = [*TOKENS, "plugin=ddp", "plugin.nproc=2", "clip=none"]
    found = found_on(2, *words, faulty="ForgetsToReduce")
    assert not found["ok"]
    assert found["max_rel_error"] > 0.01
    said = "\n".join(found["modes"][0]["failures"])
    assert "norm of step 1 is" in said
    assert "on rank 1" in said
    assert "replicas no longer hold the same bits" in said


def test_clipping_by_stage_is_found_out():
    words = [*TOKENS, "plugin=pipeline", "plugin.nproc=2", "clip=norm", "clip.threshold=0.2"]
    found = found_on(2, *words, faulty="ClipsByStage")
    assert not found["ok"]
    assert found["max_rel_error"] > 0.01
    assert "norm of step 1 is" in "\n".join(found["modes"][0]["failures"])


def test_a_layout_that_checks_itself_ends_every_rank():
    with pytest.raises(AssertionError, match=r"LayoutError: .* has \d+ elements, but the ranks"):
        found_on(2, *TOKENS, "plugin=ddp", "plugin.nproc=2", faulty="ChecksItsLayout")


def test_each_step_is_told_of_as_it_is_compared():
    done = verify(plain_of(*IMAGES, "plugin=single", "verify.modes=[norm,none]"))
    assert [(row["verify/mode"], row["train/step"]) for row in done["rows"]] == [
        (mode, step) for mode in (0, 1) for step in (1, 2, 3)
    ]
    row, step = done["rows"][0], done["found"]["modes"][0]["steps"][0]
    assert row["grad/norm"] == row["verify/norm"] == step["reference"]["norm"]
    assert done["found"]["naive"] is None


@pytest.mark.parametrize("plugin", ["single", "ddp", "fsdp"])
def test_a_stream_and_a_criterion_that_is_trained(plugin):
    ranks = 1 if plugin == "single" else 2
    data = ["data=own", "data.train._target_=tests.verify.nets.Images", "data.batch_size=4"]
    words = [*net("Normed"), "loss._target_=tests.verify.nets.Tempered", "accumulation.steps=2"]
    words += ["verify.steps=3", "train.max_duration=4ba", "sweep.objective=train/loss"]
    words += ["device=cpu", f"plugin.nproc={ranks}"]
    found = found_on(ranks, *data, *words, f"plugin={plugin}", "clip=norm", "clip.threshold=0.2")
    assert_ok(found, bound=1e-12)
    assert found["modes"][0]["binds"]
