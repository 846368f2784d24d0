"""A plain state dict goes into a model that is spread over ranks, and comes out again."""

import pytest
import torch
import torch.distributed as dist

from runner.booster import Booster
from tests.distributed.by_hand import Loop
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks


def other_weights(model):
    """The state of the same model with other weights."""
    made = make(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.7).add_(0.01)
    return made.state_dict()


def loaded(asked):
    """The state after loading, and the norm of the next step's gradient; then what is refused."""
    results = []
    first = not dist.is_initialized() or dist.get_rank() == 0
    for plugin, model in asked:
        loop = Loop(plugin, make(model))
        # What a forward pass has gathered must not outlive it.
        with torch.no_grad():
            if loop.model.pipeline is None:
                loop.model(loop.part(batch_for(model)[0]))
        state = other_weights(model)
        loop.booster.load_state_dict(loop.model, state if first else {})
        got = loop.booster.state_dict(loop.model)
        if first:
            assert got.keys() == state.keys()
            assert all(torch.equal(got[name], state[name]) for name in state), (plugin, model)
        loop.backward(*batch_for(model))
        results.append(float(loop.clip(("norm", 0.05, 2.0)).norm))
    return results


def check(world, asked):
    wanted = loaded([(None, model) for _, model in asked])
    for rank in run_ranks(loaded, world, asked) if world > 1 else [wanted]:
        assert rank == pytest.approx(wanted, rel=1e-9)


def test_over_two_ranks():
    check(2, [("ddp", "conv"), ("fsdp", "tied"), ("zero1", "tied"), ("tensor", "tied"),
              ("1f1b", "tied"), ("moe", "moe")])  # fmt: skip


def test_over_four_ranks():
    check(4, [("hsdp", "gpt"), ("hybrid_fsdp_tp", "gpt"), ("moe_zero3", "moe"),
              ("hybrid_fsdp_pp", "tied"), ("hybrid_zero1", "tied")])  # fmt: skip


def message(state, plugin=None):
    loop = Loop(plugin, make("tied"))
    before = loop.weights()
    with pytest.raises(ValueError, match="this state does not fit the model") as error:
        loop.booster.load_state_dict(loop.model, state)
    after = loop.weights()
    assert all(torch.equal(after[name], before[name]) for name in before)
    return str(error.value)


def test_what_does_not_fit_is_listed():
    model = make("tied")
    state = model.state_dict()
    names = list(state)
    first = names[1]
    short = {name: tensor for name, tensor in state.items() if name not in names[1:8]}
    said = message(short)
    assert said.startswith(f"this state does not fit the model: missing: {first}, ")
    assert said.endswith(" and 2 more")
    assert message(state | {"extra": torch.ones(2)}).endswith("model: unexpected: extra")
    shape = list(state[first].shape)
    assert message(state | {first: torch.ones(2, 3)}).endswith(
        f"model: {first} has shape [2, 3] instead of {shape}"
    )
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    assert message(wrapped).endswith(
        "take the state of the model inside the wrapper: wrapper.module"
    )
    tied = next(name for name in names if name.startswith("head"))
    assert "in the model, but has other values" in message(state | {tied: state[tied] + 1})


def refused_everywhere():
    state = make("tied").state_dict()
    first = dist.get_rank() == 0
    # Not a mapping, and not a tensor: what fails on the first rank fails on all.
    given = [state | {"extra": torch.ones(2)}, [1], state | {next(iter(state)): 1.0}]
    return [message(each if first else None, "zero3") for each in given]


def test_every_rank_refuses_what_the_first_rank_gives():
    said = run_ranks(refused_everywhere, 2, timeout=120)
    name = next(iter(make("tied").state_dict()))
    problems = [
        "unexpected: extra",
        "AttributeError: 'list' object has no attribute 'items'",
        f"{name} is no tensor, but of class float",
    ]
    assert said == [[f"this state does not fit the model: {problem}" for problem in problems]] * 2


def test_the_state_of_a_compiled_model_fits():
    model = torch.compile(make("conv"), backend="eager")
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    booster = Booster()
    boosted, *_ = booster.boost(make("conv"))
    booster.load_state_dict(boosted, state)
    got = booster.state_dict(boosted)
    assert all(torch.equal(got[n.removeprefix("_orig_mod.")], t) for n, t in state.items())
