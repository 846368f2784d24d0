"""The whole model from its parts, the same weights on every rank, and how a model is computed."""

import pytest
import torch

from runner.booster.plugin import TorchFSDPPlugin
from runner.gradients import total_norm
from tests.distributed.by_hand import Loop, batch_for, make
from tests.distributed.cases import FAMILIES, MODELS, Case, alone, train, trainer
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
    states, norms = [], []
    for plugin, model in plugins.items():
        net = drawn(model, torch.distributed.get_rank())
        made = trainer(Case(model, "L2"), plugin, model=net)
        states.append(made.booster.state_dict(made.model))
        loop = Loop(plugin, make(model, torch.bfloat16))
        loop.backward(*batch_for(model, torch.bfloat16))
        loop.optimizer.unscale()
        whole = [gradient.double().flatten() for gradient in loop.gradients().values()]
        for norm_type in (2.0, 1.0, float("inf")):
            measured = float(total_norm(loop.layout, norm_type))
            norms.append((measured, torch.cat(whole).norm(norm_type).item() if whole else measured))
    return states, norms


@pytest.mark.parametrize("world", FAMILIES)
def test_the_first_ranks_weights_are_everybodys_and_whole_again(world):
    (first, norms), *others = run_ranks(states_and_norms, world, FAMILIES[world])
    for state, model in zip(first, FAMILIES[world].values(), strict=True):
        wanted = drawn(model, 0).state_dict()
        # Tied parameters under both of their names, as one process has them.
        assert list(state) == list(wanted)
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
        drawn(model, 1).load_state_dict(state)
    assert not any(state for states, _ in others for state in states)
    # In float32 or better: sums of bfloat16 would be off by a hundredth.
    for measured, reference in norms:
        assert measured == pytest.approx(reference, rel=1e-5)


SINGLE = Case("tied", "L2", 1, double=False, steps=2, rate=0.1)
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def gathered_in_half_precision():
    return [train(SINGLE, TorchFSDPPlugin(param_dtype=dtype)) for dtype in HALF]


def test_parameters_gathered_in_half_precision_are_off_by_its_rounding():
    for halves in run_ranks(gathered_in_half_precision, 2):
        for result, roundoff in zip(halves, HALF.values(), strict=True):
            for row, wanted in zip(result["rows"], alone(SINGLE)["rows"], strict=True):
                # All of forward and backward is rounded, parameters and residual stream too.
                assert row["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=4 * roundoff)
                assert row["grad/norm"] != wanted["grad/norm"]
                # The loss is taken in float32: a sum in half precision would be off by 5 in 1000.
                assert row["train/loss"] == pytest.approx(wanted["train/loss"], rel=roundoff / 4)
            assert all(weight.dtype == torch.float32 for weight in result["weights"].values())


def looked_at_before_the_step(plugins):
    """Outputs after a step, of a model that was also looked at between backward pass and step."""
    inputs, targets = batch_for("gpt")
    found = []
    for plugin in plugins:
        loop = Loop(plugin, make("gpt"))
        loop.backward(inputs, targets)
        with torch.no_grad():
            loop.model(loop.part(inputs))
            loop.optimizer.step()
            loop.model(loop.part(inputs))
            found.append(loop.model(inputs))
    return found


def test_a_forward_pass_between_backward_pass_and_step_leaves_no_old_weights_behind():
    plugins = ["fsdp", "fsdp_gathered", "zero2", "zero3"]
    [wanted] = looked_at_before_the_step([None])
    for outputs in (
        each for rank in run_ranks(looked_at_before_the_step, 2, plugins) for each in rank
    ):
        torch.testing.assert_close(outputs, wanted, rtol=1e-12, atol=1e-12)
