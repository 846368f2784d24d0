"""The order of a step, skipped steps, and the optimizers that torch's fused kernels run."""

import math

import pytest
import torch
from torch import nn

from runner.booster import Booster, LossScale, NonFiniteGradient, StepOrderError
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.step_order import StepState
from runner.clip import Layout, build


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
        optimizer.clip(
            build(mode, threshold=0.05, **({"exclude": ()} if mode == "adaptive" else {}))
        )
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


def test_a_gradient_whose_strides_a_step_has_changed_is_not_a_new_one():
    module = nn.Conv2d(3, 4, 2, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    _, optimizer, *_ = Booster().boost(module, optimizer)
    gradient = torch.ones(module.weight.shape).to(memory_format=torch.channels_last)
    module.weight.grad = gradient
    optimizer.step()
    assert module.weight.grad is not gradient
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(0.5)


def test_state_goes_round():
    _, _, optimizer = boosted("fp16", scale=8.0)
    optimizer.loss_scale.update(finite=False)
    _, _, other = boosted("fp16", scale=8.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.loss_scale.scale == 4.0


def test_unknown_precision():
    with pytest.raises(ValueError, match="unknown precision 'fp8'"):
        Booster("fp8")


# -- once a step, and in this order


class Calls(list):
    """Which of the plugin's functions were called."""

    def __getattr__(self, name):
        return lambda: self.append(name)


def wrapped(precision=None, max_norm=0.0, lr=0.1, **scale):
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    calls = Calls()
    optimizer = OptimizerWrapper(
        torch.optim.SGD(module.parameters(), lr=lr),
        Layout.of_model(module),
        LossScale(**scale) if scale else None,
        sync_grads=calls.sync_grads,
        broadcast_params=calls.broadcast_params,
        max_norm=max_norm,
    )
    return module, optimizer, calls


def loss_of(module):
    return module(torch.ones(3, 4)).square().sum()


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


def test_gradients_are_made_final_once_a_step_and_weights_published_after_it():
    module, optimizer, calls = wrapped()
    for _ in range(2):
        calls.clear()
        optimizer.backward(loss_of(module))
        assert calls == []
        optimizer.unscale()
        optimizer.unscale()
        optimizer.clip_grad_by_norm(0.1)
        assert calls == ["sync_grads"]
        assert optimizer.step() is True
        assert optimizer.was_taken()
        assert calls == ["sync_grads", "broadcast_params"]
        optimizer.zero_grad()
    optimizer.backward(loss_of(module))
    optimizer.step()
    assert calls == ["sync_grads", "broadcast_params"] * 2


def test_a_skipped_step_publishes_nothing():
    module, optimizer, calls = wrapped()
    optimizer.backward(loss_of(module) * math.nan)
    optimizer.clip_grad_by_norm(0.1)
    assert optimizer.step() is False
    assert not optimizer.was_taken()
    assert calls == ["sync_grads"]


def test_gradients_are_divided_by_the_scale_once():
    plain, unscaled, _ = wrapped()
    unscaled.backward(loss_of(plain))
    module, optimizer, _ = wrapped(scale=8.0)
    for _ in range(2):
        optimizer.backward(loss_of(module))
        scaled = gradients(module)
        optimizer.unscale()
        optimizer.unscale()
        for got, wanted, big in zip(gradients(module), gradients(plain), scaled, strict=True):
            assert torch.equal(got, wanted)
            assert torch.equal(got * 8.0, big)
        optimizer.zero_grad()


def test_a_loss_is_weighted_and_scaled_whatever_came_before():
    plain, reference, _ = wrapped()
    reference.backward(loss_of(plain))
    module, optimizer, _ = wrapped(scale=8.0)
    for weight in (1.0, 0.5, 0.5, 3.0):
        optimizer.backward(loss_of(module), weight)
        for got, wanted in zip(gradients(module), gradients(plain), strict=True):
            assert torch.equal(got, wanted * weight * 8.0)
        optimizer.zero_grad()
    optimizer.loss_scale.scale = 2.0
    optimizer.backward(loss_of(module).double(), 3.0)
    for got, wanted in zip(gradients(module), gradients(plain), strict=True):
        assert torch.equal(got, wanted * 6.0)
    assert optimizer.begin_backward() == 2.0


def test_a_loss_may_be_of_any_shape_with_one_element():
    module, optimizer, _ = wrapped()
    optimizer.backward(loss_of(module))
    first = gradients(module)
    optimizer.zero_grad()
    optimizer.backward(loss_of(module).reshape(1))
    for got, wanted in zip(gradients(module), first, strict=True):
        assert torch.equal(got, wanted)


def test_a_limit_of_the_plugin_clips_what_nobody_clipped():
    """Once, by the whole norm; a gradient that was clipped to less stays as it is."""
    module, optimizer, _ = wrapped(max_norm=0.5, lr=1.0)
    for threshold in (None, 0.25):
        before = weights(Booster().boost(module)[0])
        optimizer.backward(loss_of(module))
        if threshold is not None:
            optimizer.clip_grad_by_norm(threshold)
        optimizer.step()
        after = weights(Booster().boost(module)[0])
        moved = [a - b for a, b in zip(after, before, strict=True)]
        assert torch.nn.utils.get_total_norm(moved) == pytest.approx(threshold or 0.5, rel=1e-5)
        optimizer.zero_grad()


def test_a_limit_of_the_plugin_clips_after_a_backward_pass_that_nobody_saw():
    module, optimizer, _ = wrapped(max_norm=0.5)
    assert optimizer.step() is True
    loss_of(module).backward()
    optimizer.step()
    assert torch.nn.utils.get_total_norm(gradients(module)) == pytest.approx(0.5, rel=1e-5)


def test_one_mode_is_kept_however_many_thresholds_there_are():
    module, optimizer, _ = wrapped()
    for threshold in (0.5, 0.25, 0.125):
        optimizer.backward(loss_of(module))
        optimizer.clip_grad_by_norm(threshold)
        assert torch.nn.utils.get_total_norm(gradients(module)) == pytest.approx(threshold)
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="must be above 0"):
        optimizer.clip_grad_by_norm(0.0)
    assert len(optimizer._modes) == 1


def test_nothing_can_be_added_to_gradients_that_are_final():
    module, optimizer, _ = wrapped()
    optimizer.backward(loss_of(module))
    optimizer.unscale()
    with pytest.raises(StepOrderError, match=r"^cannot accumulate now: gradients are final$"):
        optimizer.backward(loss_of(module))
    optimizer.zero_grad()
    optimizer.backward(loss_of(module))


def test_a_norm_that_is_not_finite_is_an_error_where_it_is_asked_for():
    for bad, text in ((math.nan, "nan"), (math.inf, "inf")):
        module, optimizer, _ = wrapped()
        optimizer.backward(loss_of(module))
        module.bias.grad[0] = bad
        with pytest.raises(NonFiniteGradient, match=rf"^the gradient's norm is {text}$"):
            optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    module, optimizer, _ = wrapped()
    optimizer.backward(loss_of(module))
    norm = optimizer.clip_grad_by_norm(1.0, norm_type=math.inf, error_if_nonfinite=True)
    assert norm.dtype == torch.float32
    assert norm.shape == ()


def test_the_largest_element_is_limited_where_the_norm_is_that():
    module, optimizer, _ = wrapped()
    optimizer.backward(loss_of(module))
    largest = max(g.abs().max() for g in gradients(module))
    assert optimizer.clip_grad_by_norm(0.5, norm_type=math.inf) == largest
    assert max(g.abs().max() for g in gradients(module)) == pytest.approx(0.5)


def test_an_error_names_at_most_five_parameters():
    torch.manual_seed(0)
    for layers, tail in ((2, ""), (3, " and 1 more")):
        module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
        names = [name for name, _ in module.named_parameters()]
        booster = Booster(nonfinite="error")
        model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=1.0))
        booster.backward(model(torch.ones(1, 2)).sum() * math.nan, optimizer)
        with pytest.raises(NonFiniteGradient) as raised:
            optimizer.clip_grad_by_norm(1.0)
        assert str(raised.value) == (
            f"the gradient's norm is nan: {', '.join(names[:5])}{tail} "
            "(clip.nonfinite=skip leaves such steps out)"
        )


def test_an_fp16_overflow_is_skipped_whatever_the_policy():
    for policy in ("error", "ignore"):
        booster, model, optimizer = boosted("fp16", nonfinite=policy, scale=4.0)
        backward(booster, model, optimizer, math.inf)
        optimizer.clip_grad_by_norm(1.0)
        assert optimizer.step() is False
        assert optimizer.loss_scale.scale == 2.0


def test_a_step_that_was_ignored_is_taken_and_says_so():
    booster, model, optimizer = boosted(nonfinite="ignore")
    backward(booster, model, optimizer, math.nan)
    outcome = optimizer.clip(build("norm", threshold=2.0))
    assert math.isnan(outcome.norm)
    assert (outcome.clipped, outcome.fraction, outcome.threshold) == (0.0, 0.0, 2.0)
    assert math.isnan(outcome.coef)
    assert math.isnan(outcome.max_stat)
    assert optimizer.step() is True
    assert optimizer.was_taken()


def test_gradients_that_somebody_set_by_hand_are_clipped():
    """Also a second time, when they replace those of the step before, or are written over."""
    module, optimizer, _ = wrapped()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.clip_grad_by_norm(1.0) == pytest.approx(math.sqrt(10))
    optimizer.step()
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)
    module.bias.grad.add_(1.0)
    assert optimizer.clip_grad_by_norm(9.0) > 1.0
    optimizer.step()
    module.bias.grad = torch.ones(2)
    assert optimizer.clip_grad_by_norm(9.0) > 1.0


def test_the_state_holds_the_scale_where_there_is_one():
    _, optimizer, _ = wrapped()
    assert optimizer.state_dict()["loss_scale"] is None
    _, scaled, _ = wrapped(scale=8.0)
    scaled.load_state_dict(optimizer.state_dict())
    assert scaled.loss_scale.scale == 8.0
    optimizer.load_state_dict(scaled.state_dict())
    assert scaled.state_dict()["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert optimizer.param_groups is not None


def test_the_states_of_several_optimizers_go_round_in_order():
    module = nn.Linear(4, 2)

    def several(rates):
        pairs = zip(module.parameters(), rates, strict=True)
        return OptimizerWrapper(
            [torch.optim.SGD([parameter], lr=rate) for parameter, rate in pairs],
            Layout.of_model(module),
        )

    saved, other = several((0.1, 0.2)), several((0.3, 0.4))
    other.load_state_dict(saved.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]
    _, one, _ = wrapped()
    with pytest.raises(
        ValueError, match=r"^the state is that of 2 optimizers, but 1 were boosted$"
    ):
        one.load_state_dict(saved.state_dict())
    with pytest.raises(
        RuntimeError, match=r"^2 optimizers were boosted together: use .optimizers$"
    ):
        saved.unwrap()
    assert one.unwrap() is one.optimizers[0]
    with pytest.raises(ValueError, match=r"^a closure goes with one optimizer: run it before step"):
        saved.step(lambda: 0.0)
    one.backward(loss_of(module))
    assert one.step(lambda: 0.0) is True


def test_gradients_that_somebody_dropped_are_nothing_to_clip():
    module, optimizer, _ = wrapped()
    optimizer.backward(loss_of(module))
    optimizer.step()
    module.zero_grad()
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)


def test_a_plain_backward_pass_under_accumulation_is_not_final():
    """Whether or not there were gradients before; without one, nothing has changed."""
    module, optimizer, _ = wrapped()
    for _ in range(2):
        with optimizer.accumulate():
            assert optimizer.accumulating
        assert not optimizer.accumulating
        with optimizer.accumulate():
            loss_of(module).backward()
        with pytest.raises(StepOrderError, match=r"^cannot clip now: .*under no_sync"):
            optimizer.clip_grad_by_norm(1.0)
        with pytest.raises(StepOrderError, match=r"^cannot step now: .*under no_sync"):
            optimizer.step()
        optimizer.backward(loss_of(module))
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
    with optimizer.accumulate():
        module.zero_grad()
    with pytest.raises(StepOrderError, match="no backward pass"):
        optimizer.clip_grad_by_norm(1.0)


def test_a_plain_backward_pass_through_a_watched_output_is_noted():
    module, optimizer, _ = wrapped()
    optimizer.watch(torch.ones(2), held=False)
    optimizer.watch(torch.ones(2, requires_grad=True), held=False)
    for held, stage in ((False, StepState.READY), (True, StepState.ACCUMULATING)):
        outputs = module(torch.ones(3, 4))
        optimizer.watch(outputs, held)
        assert optimizer.stage is StepState.EMPTY
        outputs.sum().backward()
        assert optimizer.stage is stage
        optimizer.zero_grad()
    outputs = module(torch.ones(3, 4))
    optimizer.watch(outputs, held=False)
    optimizer.backward(loss_of(module))
    optimizer.clip_grad_by_norm(1.0)
    outputs.sum().backward()
    assert optimizer.stage is StepState.CLIPPED


def test_an_fp16_loss_that_nobody_scaled_is_refused():
    module, optimizer, _ = wrapped(scale=8.0)
    loss_of(module).backward()
    with pytest.raises(StepOrderError) as raised:
        optimizer.clip_grad_by_norm(1.0)
    assert str(raised.value) == (
        "the loss was not scaled, as fp16 needs it: call booster.backward(loss, optimizer) "
        "instead of loss.backward()"
    )
