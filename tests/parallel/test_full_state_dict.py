"""A plain state dict goes into a model that is spread over ranks, and comes out again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.booster import Booster
from runner.booster.step_order import StepOrderError
from runner.parallel.full_state_dict import FirstRankValues
from runner.parallel.hooks import Usage
from runner.parallel.sharding import shard_model
from tests.distributed.by_hand import Loop, batch_for, make
from tests.ranks import run_ranks


def loaded(pairs):
    """The norm of the next step's gradient after other weights were loaded."""
    results = []
    first = not dist.is_initialized() or dist.get_rank() == 0
    for plugin, model in pairs:
        loop = Loop(plugin, make(model))
        # What a forward pass has gathered must not outlive it.
        with torch.no_grad():
            if loop.model.pipeline is None:
                loop.model(loop.part(batch_for(model)[0]))
        state = {name: 2 * tensor for name, tensor in make(model).state_dict().items()}
        loop.booster.load_state_dict(loop.model, state if first else {})
        got = loop.booster.state_dict(loop.model)
        if first:
            assert got.keys() == state.keys()
            assert all(torch.equal(got[name], state[name]) for name in state), (plugin, model)
        loop.backward(*batch_for(model))
        results.append(float(loop.clip(("norm", 0.05, 2.0)).norm))
    return results


def refused(state, plugin=None):
    loop = Loop(plugin, make("tied"))
    before = loop.weights()
    with pytest.raises((ValueError, AttributeError)) as error:
        loop.booster.load_state_dict(loop.model, state)
    after = loop.weights()
    assert all(torch.equal(after[name], before[name]) for name in before)
    return str(error.value).removeprefix("this state does not fit the model: ")


def shard_channels_last():
    """Values of channels-last weights are kept."""
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    values = FirstRankValues(model)
    shard_model(model, mesh, {}, Usage(), torch.device("cpu"))
    values.fill(model, {}, torch.device("cpu"))
    assert torch.equal(model.weight.full_tensor(), before)


def what_is_left():
    """Gradients of tied stages and of experts are made final once: what is left is refused."""
    for plugin, model in (("1f1b", "tied"), ("moe", "moe")):
        loop = Loop(plugin, make(model))
        for _ in range(2):
            loop.backward(*batch_for(model))
            loop.clip(("norm", 1e9, 2.0))
            loop.optimizer.step()
            with pytest.raises(StepOrderError, match="gradients of the step before are left"):
                loop.clip(("norm", 1e9, 2.0))
            loop.optimizer.zero_grad()
        loop.backward(*batch_for(model))
        loop.optimizer.step()
        for parameter in loop.raw.parameters():  # as model.zero_grad() does
            parameter.grad = None
        loop.backward(*batch_for(model))
        loop.optimizer.step()
        loop.backward(*batch_for(model))
        with pytest.raises(StepOrderError, match="gradients of the step before are left"):
            loop.optimizer.step()


def on_two(pairs):
    state = make("tied").state_dict()
    no_mapping = [1]
    no_tensor = state | {next(iter(state)): 1.0}
    messages = []
    for wrong_state in (state | {"extra": torch.ones(2)}, no_mapping, no_tensor):
        messages.append(refused(wrong_state if dist.get_rank() == 0 else None, "zero3"))
    shard_channels_last()
    what_is_left()
    return loaded(pairs), messages


TWO = [("ddp", "conv"), ("fsdp", "tied"), ("zero1", "tied"), ("tensor", "tied")]
TWO += [("1f1b", "tied"), ("moe", "moe")]
FOUR = [("hsdp", "gpt"), ("moe_zero3", "moe"), ("hybrid_fsdp_pp", "tied"), ("hybrid_zero1", "tied")]


def in_one_process(pairs):
    return pytest.approx(loaded([(None, model) for _, model in pairs]), rel=1e-9)


once = pytest.mark.xdist_group("state dicts over ranks")  # the ranks run once


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(on_two, 2, TWO)


@once
def test_a_state_dict_is_loaded_over_two_ranks(two_ranks):
    expected = in_one_process(TWO)
    for norms, _ in two_ranks:
        assert norms == expected


@once
def test_a_state_that_the_first_rank_refuses_fails_on_all_ranks(two_ranks):
    for _, messages in two_ranks:
        assert messages[0] == "unexpected: extra"
        assert "no attribute 'items'" in messages[1]
        assert "is no tensor, but of class float" in messages[2]


def test_a_state_dict_is_loaded_over_four_ranks():
    expected = in_one_process(FOUR)
    assert run_ranks(loaded, 4, FOUR) == [expected] * 4


def test_what_does_not_fit_is_listed():
    state = make("tied").state_dict()
    names = list(state)
    first = names[1]
    shape = list(state[names[1]].shape)
    said = refused({name: tensor for name, tensor in state.items() if name not in names[1:8]})
    assert said.startswith(f"missing: {first}, ")
    assert said.endswith(" and 2 more")
    odd = f"{first} has shape [2, 3] instead of {shape}"
    assert refused(state | {first: torch.ones(2, 3)}) == odd
    tied = next(name for name in names if name.startswith("head"))
    assert "in the model, but has other values" in refused(state | {tied: state[tied] + 1})


def test_the_state_of_a_compiled_model_fits():
    model = torch.compile(make("conv"), backend="eager")
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    booster = Booster()
    boosted, *_ = booster.boost(make("conv"))
    booster.load_state_dict(boosted, state)
    got = booster.state_dict(boosted)
    assert all(torch.equal(got[n.removeprefix("_orig_mod.")], t) for n, t in state.items())
