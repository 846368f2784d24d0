"""One call that clips plain, boosted and sharded models."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster, LossScale, StepOrderError
from runner.booster.step_order import StepState
from runner.clip import transfer
from tests.clip.reference import norm_of, refused


def boosted():
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    booster = Booster(loss_scale=LossScale(scale=64.0))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
    return raw, model, optimizer


def length(model):
    return norm_of([p.grad for p in model.parameters()])


@pytest.mark.parametrize("ask", ["boosted", "raw", "parameters", "trained"])
def test_a_whole_boosted_model_is_clipped_by_its_optimizer(ask):
    """Unscaled first, once a step; parameters that do not train need not be given."""
    raw, model, optimizer = boosted()
    scaled = length(raw)
    given = {"boosted": model, "raw": raw, "parameters": raw.parameters()}.get(ask)
    if ask == "trained":
        raw[0].bias.requires_grad_(False)
        given = [p for p in raw.parameters() if p.requires_grad]
    outcome = apply_gradient_clipping(given, "norm", 0.5)
    assert outcome.norm == pytest.approx(scaled / 64.0, rel=1e-5)
    assert length(raw) == pytest.approx(0.5, rel=1e-5)
    assert optimizer.stage is StepState.CLIPPED
    refused(StepOrderError, "already", apply_gradient_clipping, model, "norm", 0.5)


def test_a_model_whose_optimizer_is_gone_is_a_plain_one():
    raw, model, optimizer = boosted()
    del optimizer
    model.optimizer = None
    norm = apply_gradient_clipping(raw, "norm", math.inf).norm
    assert norm == pytest.approx(length(raw), rel=1e-6)


def graded(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return length(model)


def clip(model, seed):
    norm = graded(model, seed)
    decision = apply_gradient_clipping(model, "norm", norm / 2)
    assert decision.norm == pytest.approx(norm, rel=1e-6)
    assert length(model) == pytest.approx(norm / 2, rel=1e-6)


def test_what_is_kept_of_a_model_changes_with_its_parameters_and_goes_with_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for seed in range(12):  # with a threshold of its own each
        clip(model, seed)
    model[1] = nn.Linear(4, 5)
    clip(model, 3)
    model.append(nn.Linear(5, 2))
    clip(model, 4)
    with torch.no_grad():
        model[2].weight.set_(torch.randn(7, 5))  # the same parameter in another shape
    clip(model, 6)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


def test_wrapped_models_have_the_names_of_the_users_model_and_fsdp_1_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graded(model, 0)
    apply_gradient_clipping(torch.compile(model), "adaptive", 0.1, exclude=["1.weight"])
    first = nn.Sequential(type("FullyShardedDataParallel", (nn.Module,), {})(), nn.Linear(2, 2))
    refused(TypeError, "fully_shard", apply_gradient_clipping, first, "norm", 1.0)


def test_values_of_devices():
    for kind in ("cuda", "mps", "xpu", "meta"):
        assert not transfer.can_read(torch.device(kind))
    assert transfer.widest(torch.device("mps")) == torch.float32
    assert transfer.widest(torch.device("cuda")) == torch.float64
    away = torch.empty((), device="meta")
    assert transfer.read(away) is away
    assert transfer.read_later(torch.tensor(2.5))() == 2.5
    for values in ([1.5, 1e-300], [torch.tensor(1.5), 2**53 - 1.0], [torch.tensor(1.5)] * 2):
        vector = transfer.on_device(values, torch.device("cpu"))
        assert (vector.dtype, vector.tolist()) == (torch.float64, [float(one) for one in values])
        assert transfer.on_device(values, torch.device("meta")).device.type == "meta"
