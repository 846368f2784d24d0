"""The order of a step, skipped steps, and the optimizers that torch's fused kernels run."""

import math

import pytest
import torch
from torch import nn

from runner.booster import Booster, LossScale, NonFiniteGradient, StepOrderError
from runner.clip import build


def boosted(precision=None, nonfinite="skip", optimizer=None, **scale):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    loss_scale = LossScale(**scale) if scale else None
    booster = Booster(precision, loss_scale=loss_scale, nonfinite=nonfinite)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def backward(booster, model, optimizer, factor=1.0):
    booster.backward((model(torch.ones(3, 4)) * factor).square().sum(), optimizer)


def test_the_norm_that_is_returned_is_the_one_before_clipping():
    booster, model, optimizer = boosted()
    backward(booster, model, optimizer)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = optimizer.clip_grad_by_norm(max_norm=0.1)
    torch.testing.assert_close(norm, expected)
    after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(after, torch.tensor(0.1))


def test_clip_grad_by_value():
    booster, model, optimizer = boosted()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_value(0.05)
    assert max(p.grad.abs().max() for p in model.parameters()) == pytest.approx(0.05)


def test_clipping_twice_in_a_step_is_an_error():
    booster, model, optimizer = boosted()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(StepOrderError, match="already"):
        optimizer.clip_grad_by_value(1.0)
    optimizer.step()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(1.0)


def test_accumulating_onto_a_clipped_gradient_is_an_error():
    booster, model, optimizer = boosted()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(StepOrderError, match="cannot accumulate now"):
        backward(booster, model, optimizer)


def test_gradients_that_the_optimizer_does_not_hold_do_not_pile_up():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    held = torch.optim.SGD(module[1].parameters(), lr=0.1)
    booster = Booster()
    model, optimizer, *_ = booster.boost(module, held)
    backward(booster, model, optimizer)
    optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    backward(booster, model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad.abs().sum() == 0 for p in module.parameters())


def test_a_loss_that_never_gets_finite_keeps_a_scale():
    scale = LossScale(scale=4.0)
    for _ in range(2000):
        scale.update(finite=False)
    assert scale.scale > 0


def test_clipping_an_accumulating_gradient_is_an_error():
    booster, model, optimizer = boosted()
    with booster.no_sync(model, optimizer):
        backward(booster, model, optimizer)
    with pytest.raises(StepOrderError, match="no_sync"):
        optimizer.clip_grad_by_norm(1.0)
    backward(booster, model, optimizer)
    assert optimizer.clip_grad_by_norm(1.0) > 0


def test_clipping_nothing_is_an_error():
    booster, model, optimizer = boosted()
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)
    backward(booster, model, optimizer)
    optimizer.zero_grad()
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)


def test_gradients_that_were_set_to_zero_are_nothing_to_clip():
    booster, model, optimizer = boosted()
    backward(booster, model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)


def test_gradients_of_an_earlier_step_are_nothing_to_clip():
    booster, model, optimizer = boosted()
    backward(booster, model, optimizer)
    optimizer.step()
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)


def test_no_sync_knows_the_optimizer_that_was_boosted_with_the_model():
    booster, model, optimizer = boosted()
    with booster.no_sync(model):
        backward(booster, model, optimizer)
    with pytest.raises(StepOrderError, match=r"cannot clip now: .*no_sync"):
        optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(StepOrderError, match=r"cannot step now: .*no_sync"):
        optimizer.step()
    backward(booster, model, optimizer)
    assert optimizer.step()


def test_a_loss_of_many_numbers_is_refused():
    booster, model, optimizer = boosted()
    with pytest.raises(ValueError, match=r"loss has shape \[3\]: reduce it"):
        booster.backward(next(model.parameters()).sum() * torch.ones(3), optimizer)


def test_gradients_in_float16_cannot_be_unscaled():
    module = nn.Linear(4, 2).half()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    booster = Booster("fp16")
    model, optimizer, *_ = booster.boost(module, optimizer)
    booster.backward(model.unwrap().weight.float().square().sum(), optimizer)
    with pytest.raises(TypeError, match="weight is float16: keep parameters in float32"):
        optimizer.clip_grad_by_norm(1.0)


def test_models_of_one_booster_keep_their_names():
    booster = Booster()
    first, *_ = booster.boost(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    second, *_ = booster.boost(nn.Linear(4, 2))
    assert booster.state_dict(first).keys() == first.unwrap().state_dict().keys()
    assert booster.state_dict(second).keys() == second.unwrap().state_dict().keys()


def weights(model):
    return [p.detach().clone() for p in model.unwrap().parameters()]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped(bad):
    booster, model, optimizer = boosted()
    before = weights(model)
    backward(booster, model, optimizer, bad)
    outcome = optimizer.clip(build("norm", threshold=1.0))
    assert not math.isfinite(outcome.norm)
    assert math.isnan(outcome.norm_clipped)
    assert outcome.clipped == 0.0
    assert optimizer.step() is False
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    optimizer.zero_grad()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step() is True


def test_a_step_that_is_not_finite_can_be_an_error_that_names_parameters():
    booster, model, optimizer = boosted(nonfinite="error")
    backward(booster, model, optimizer)
    model.unwrap().bias.grad[0] = math.nan
    with pytest.raises(NonFiniteGradient, match="nan: bias"):
        optimizer.clip_grad_by_norm(1.0)


def test_a_step_that_is_not_finite_can_be_ignored():
    booster, model, optimizer = boosted(nonfinite="ignore")
    backward(booster, model, optimizer)
    model.unwrap().bias.grad[0] = math.inf
    before = model.unwrap().weight.grad.clone()
    optimizer.clip_grad_by_norm(1e-3)
    assert torch.equal(model.unwrap().weight.grad, before)
    assert optimizer.step() is True
    assert not torch.isfinite(model.unwrap().bias).all()


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_fp16_clips_the_unscaled_gradient(mode):
    torch.manual_seed(0)
    plain, scaled = boosted(), boosted("fp16", scale=1024.0)
    for booster, model, optimizer in (plain, scaled):
        backward(booster, model, optimizer)
    outcomes = [
        optimizer.clip(build(mode, threshold=0.05, exclude=()))
        for _, _, optimizer in (plain, scaled)
    ]
    assert outcomes[0].clipped == outcomes[1].clipped == 1.0
    # Half precision rounds the forward pass; a scale left in would be off by 1024.
    assert outcomes[1].norm == pytest.approx(outcomes[0].norm, rel=5e-3)
    assert outcomes[1].norm_clipped == pytest.approx(outcomes[0].norm_clipped, rel=5e-3)


def test_fp16_overflow_skips_the_step_and_halves_the_scale_once():
    booster, model, optimizer = boosted("fp16", scale=64.0, growth_interval=2)
    before = weights(model)
    backward(booster, model, optimizer, math.inf)
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step() is False
    assert optimizer.loss_scale.scale == 32.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    # Two finite steps make it grow again: after the second, with the scale that step was made with.
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        backward(booster, model, optimizer)
        norms.append(optimizer.clip_grad_by_norm(1e-9).item())
        assert optimizer.step() is True
    assert optimizer.loss_scale.scale == 64.0
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert norms[2] == pytest.approx(norms[0], rel=1e-3)


def test_fp16_without_clipping_is_unscaled_and_skipped_as_well():
    booster, model, optimizer = boosted("fp16", scale=1024.0)
    before = weights(model)
    backward(booster, model, optimizer)
    gradient = model.unwrap().bias.grad.clone()
    assert optimizer.step() is True
    torch.testing.assert_close(model.unwrap().bias, before[1] - 0.1 * gradient / 1024.0)
    optimizer.zero_grad()
    before = weights(model)
    backward(booster, model, optimizer, math.inf)
    assert optimizer.step() is False
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_fused_optimizer_reads_the_flag_on_the_device():
    """What an accelerator does; the fused CPU kernels take the same flag."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    booster = Booster()
    model, optimizer, *_ = booster.boost(module, optimizer)
    for finite in (False, True):
        before = weights(model)
        backward(booster, model, optimizer)
        optimizer._finite = torch.tensor(finite)
        assert optimizer.step() is True
        same = all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
        assert same is not finite
        optimizer.zero_grad()


def test_a_gradient_with_other_strides_moves_the_right_weights_under_a_fused_optimizer():
    torch.manual_seed(0)
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        module = nn.Conv2d(3, 4, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
        _, optimizer, *_ = Booster().boost(module, optimizer)
        gradient = torch.randn(module.weight.shape).to(memory_format=torch.channels_last)
        module.weight.grad = gradient
        module.bias.grad = torch.zeros_like(module.bias)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        results.append(module.weight.detach().clone())
    torch.testing.assert_close(results[0], results[1])


def test_state_goes_round():
    _, _, optimizer = boosted("fp16", scale=8.0)
    optimizer.loss_scale.update(finite=False)
    _, _, other = boosted("fp16", scale=8.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.loss_scale.scale == 4.0


def test_unknown_precision():
    with pytest.raises(ValueError, match="unknown precision 'fp8'"):
        Booster("fp8")
