"""The whole model from its parts, the same weights on every rank, and how a model is computed."""

from functools import cache

import pytest
import torch

from runner.booster.plugin import TorchFSDPPlugin
from runner.gradients import total_norm
from tests.distributed.by_hand import Loop, batch_for, make
from tests.distributed.cases import FAMILIES, MODELS, Case, in_one_process, train, trainer
from tests.ranks import run_ranks


def drawn(model, seed):
    """A model with a buffer that belongs to its state, and one that does not."""
    torch.manual_seed(seed)
    net = MODELS[model]().double()
    first = net.get_submodule("0" if model == "conv" else "embed")
    first.register_buffer("seen", torch.randn(3))
    first.register_buffer("scratch", torch.randn(3), persistent=False)
    return net


def states_and_norms(plugins):
    """Of each plugin, the state of a model that every rank drew from a seed of its own, before any
    step; and ‖G‖ of bfloat16 gradients as measured, and that of the whole gradient in float64.
    """
    states = []
    norms = []
    for plugin, model in plugins.items():
        net = drawn(model, torch.distributed.get_rank())
        training = trainer(Case(model, "L2"), plugin, model=net)
        states.append(training.booster.state_dict(training.model))
        loop = Loop(plugin, make(model, torch.bfloat16))
        loop.backward(*batch_for(model, torch.bfloat16))
        loop.optimizer.unscale()
        whole = [gradient.double().flatten() for gradient in loop.gradients().values()]
        for norm_type in (2.0, 1.0, float("inf")):
            measured = float(total_norm(loop.layout, norm_type))
            norms.append((measured, torch.cat(whole).norm(norm_type).item() if whole else measured))
    return states, norms


@cache
def on_ranks(world):
    return run_ranks(states_and_norms, world, FAMILIES[world])


@pytest.mark.xdist_group("states")  # the ranks run once
@pytest.mark.parametrize("world", FAMILIES)
def test_a_state_has_the_whole_weights_of_the_first_rank(world):
    """Also under both names of tied parameters, as one process has them."""
    states, _ = on_ranks(world)[0]
    for state, model in zip(states, FAMILIES[world].values(), strict=True):
        expected = drawn(model, 0).state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        drawn(model, 1).load_state_dict(state)


@pytest.mark.xdist_group("states")
@pytest.mark.parametrize("world", FAMILIES)
def test_the_first_rank_alone_holds_a_state(world):
    _, *further = on_ranks(world)
    assert not any(state for states, _ in further for state in states)


@pytest.mark.xdist_group("states")
@pytest.mark.parametrize("world", FAMILIES)
def test_norms_of_bfloat16_are_summed_in_float32_or_better(world):
    """Sums of bfloat16 would be off by a hundredth."""
    _, norms = on_ranks(world)[0]
    for measured, reference in norms:
        assert measured == pytest.approx(reference, rel=1e-5)


SINGLE = Case("tied", "L2", 1, double=False, steps=2, rate=0.1)
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def gathered_in_half_precision():
    return [train(SINGLE, TorchFSDPPlugin(param_dtype=dtype)) for dtype in HALF]


def test_parameters_gathered_in_half_precision_are_off_by_its_rounding():
    for halves in run_ranks(gathered_in_half_precision, 2):
        for result, roundoff in zip(halves, HALF.values(), strict=True):
            for row, expected in zip(result["rows"], in_one_process(SINGLE)["rows"], strict=True):
                # All of forward and backward is rounded, parameters and residual stream too.
                assert row["grad/norm"] == pytest.approx(expected["grad/norm"], rel=4 * roundoff)
                assert row["grad/norm"] != expected["grad/norm"]
                # The loss is taken in float32: a sum in half precision would be off by 5 in 1000.
                assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=roundoff / 4)
            assert all(weight.dtype == torch.float32 for weight in result["weights"].values())


def looked_at_before_the_step(plugins):
    """Outputs after a step, of a model that was also looked at between backward pass and step."""
    inputs, targets = batch_for("gpt")
    outputs = []
    for plugin in plugins:
        loop = Loop(plugin, make("gpt"))
        loop.backward(inputs, targets)
        with torch.no_grad():
            loop.model(loop.part(inputs))
            loop.optimizer.step()
            loop.model(loop.part(inputs))
            outputs.append(loop.model(inputs))
    return outputs


def test_a_forward_pass_before_the_step_leaves_no_old_weights_behind():
    plugins = ["fsdp", "fsdp_gathered", "zero2", "zero3"]
    [expected] = looked_at_before_the_step([None])
    for outputs in (
        outputs_of_plugin
        for rank in run_ranks(looked_at_before_the_step, 2, plugins)
        for outputs_of_plugin in rank
    ):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
