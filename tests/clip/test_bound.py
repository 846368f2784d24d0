"""What clipping by one call keeps of a model, and when it looks at the model again."""

import math

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.clip import Layout
from runner.clip import bound as module


@pytest.fixture
def made(monkeypatch):
    """The models whose layout was made."""
    models = []
    of_model = Layout.of_model

    def counted(model):
        models.append(model)
        return of_model(model)

    monkeypatch.setattr(module.Layout, "of_model", counted)
    return models


def graded(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))


def clip(model, seed, **options):
    norm = graded(model, seed)
    decision = apply_gradient_clipping(model, "norm", norm / 2, **options)
    assert decision.norm == pytest.approx(norm, rel=1e-6)
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert after == pytest.approx(norm / 2, rel=1e-6)


def test_a_layout_is_made_once_and_again_when_parameters_change(made):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for seed in range(3):  # with a threshold of its own each
        clip(model, seed)
    assert len(made) == 1
    model[1] = nn.Linear(4, 5)
    clip(model, 3)
    model.append(nn.Linear(5, 2))
    clip(model, 4)
    model[0].weight = model[0].weight  # the same parameter
    clip(model, 5)
    assert len(made) == 3
    with torch.no_grad():
        model[2].weight.set_(torch.randn(7, 5))  # the same parameter in another shape
    clip(model, 6)
    assert len(made) == 4


def test_adaptive_clipping_twice_is_that_of_new_modes():
    kept = nn.Linear(3, 4)
    for seed in range(3):
        for threshold in (0.1, 0.2):
            graded(kept, seed)
            other = nn.Linear(3, 4)
            other.load_state_dict(kept.state_dict())
            graded(other, seed)
            options = {"exclude": ()}
            one = apply_gradient_clipping(kept, "adaptive", threshold, **options)
            two = apply_gradient_clipping(other, "adaptive", threshold, **options)
            assert one == two
            assert torch.equal(kept.weight.grad, other.weight.grad)


def test_a_model_that_is_gone_is_forgotten():
    before = len(module._bound)
    clip(nn.Linear(2, 2), 0)
    assert len(module._bound) == before


def test_fsdp_1_is_refused():
    class FullyShardedDataParallel(nn.Module):
        pass

    model = nn.Sequential(FullyShardedDataParallel(), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="use fully_shard"):
        apply_gradient_clipping(model, "norm", 1.0)


def test_wrapped_models_have_the_names_of_the_users_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = torch.compile(model)
    graded(model, 0)
    apply_gradient_clipping(compiled, "adaptive", 0.1, exclude=["1.weight"])
