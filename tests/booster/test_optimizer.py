"""The order of a step, skipped steps, loss scaling, and what the boosted optimizer returns."""

import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner import HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from runner.booster import Booster, LossScale, NonFiniteGradient, SinglePlugin, StepOrderError
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.plugin import ParallelModel
from runner.clip import build
from runner.gradients import Layout
from tests.clip.reference import norm_of, refused
from tests.ranks import run_ranks


class Calls(list):
    """Which of the plugin's functions were called."""

    def __getattr__(self, name):
        return lambda: self.append(name)


def wrapped(max_norm=0.0, lr=0.1, nonfinite="skip", **scale):
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    calls = Calls()
    plugin = SinglePlugin()
    plugin.max_norm = max_norm
    optimizer = OptimizerWrapper(
        [torch.optim.SGD(module.parameters(), lr=lr)],
        ParallelModel(Layout.of_model(module), calls.sync_grads, calls.broadcast_params),
        plugin,
        LossScale(**scale) if scale else None,
        nonfinite,
    )
    return module, optimizer, calls


def loss_of(module):
    return module(torch.ones(3, 4)).square().sum()


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(some, others):
    return all(map(torch.equal, some, others))


# -- the order of a step


ACTIONS = {
    "backward": lambda module, optimizer: optimizer.backward(loss_of(module)),
    "plain": lambda module, _: loss_of(module).backward(),
    "clip": lambda _, optimizer: optimizer.clip_grad_by_norm(1.0),
    "value": lambda _, optimizer: optimizer.clip_grad_by_value(1.0),
    "step": lambda _, optimizer: optimizer.step(),
    "zero": lambda _, optimizer: optimizer.zero_grad(),
    "drop": lambda module, _: module.zero_grad(),
    "add": lambda module, _: module.bias.grad.add_(1.0),
    "replace": lambda module, _: setattr(module.bias, "grad", torch.ones(2)),
    "unscale": lambda _, optimizer: optimizer.unscale(),
    "nothing": lambda _, optimizer: optimizer.accumulating,
}


def do(module, optimizer, action):
    with optimizer.accumulate() if action.startswith("held-") else torch.enable_grad():
        return ACTIONS[action.removeprefix("held-")](module, optimizer)


@pytest.mark.parametrize(
    ("actions", "error"),
    [
        ("backward clip step backward clip step", ""),
        ("backward zero backward clip", ""),
        ("held-backward backward clip step", ""),
        ("plain clip step", ""),
        ("step plain step", ""),
        ("held-nothing backward clip", ""),
        ("backward step add clip step replace clip", ""),
        ("clip", "clip|no backward pass"),
        ("backward zero clip", "clip|no backward pass"),
        ("backward step drop clip", "clip|no backward pass"),
        ("backward step held-drop clip", "clip|no backward pass"),
        ("backward clip clip", "clip|already"),
        ("backward clip value", "clip|already"),
        ("backward clip backward", "accumulate|clipped already"),
        ("backward unscale backward", "accumulate|final"),
        ("held-backward clip", "clip|no_sync"),
        ("held-backward step", "step|no_sync"),
    ],
)
def test_the_order_of_a_step(actions, error):
    module, optimizer, _ = wrapped()
    *first, last = actions.split()
    for action in first:
        assert do(module, optimizer, action) is not False
        assert not optimizer.accumulating
    if error:
        refused(StepOrderError, f"cannot {error}", do, module, optimizer, last)
    else:
        assert do(module, optimizer, last) is not False


def test_gradients_are_made_final_once_a_step():
    module, optimizer, calls = wrapped()
    for bad in (1.0, math.nan, 1.0):
        calls.clear()
        optimizer.backward(loss_of(module) * bad)
        assert calls == []
        optimizer.unscale()
        optimizer.unscale()
        optimizer.clip_grad_by_norm(0.1)
        assert calls == ["sync_grads"]
        optimizer.step()
        assert calls.count("sync_grads") == 1
        optimizer.zero_grad()


def test_weights_are_published_after_a_step_that_is_taken():
    module, optimizer, calls = wrapped()
    for bad in (1.0, math.nan, 1.0):
        calls.clear()
        optimizer.backward(loss_of(module) * bad)
        optimizer.clip_grad_by_norm(0.1)
        assert optimizer.step() is optimizer.was_taken() is (bad == 1.0)
        assert calls == ["sync_grads", "broadcast_params"][: 2 if bad == 1.0 else 1]
        optimizer.zero_grad()


def test_a_step_without_clipping_makes_gradients_final_before_it_publishes_weights():
    module, optimizer, calls = wrapped()
    optimizer.backward(loss_of(module))
    optimizer.step()
    assert calls == ["sync_grads", "broadcast_params"]


def test_gradients_that_the_optimizer_does_not_hold_do_not_pile_up():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    booster = Booster()
    sgd = torch.optim.SGD(module[1].parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(module, sgd)
    for to_none in (True, False):
        booster.backward(loss_of(model), optimizer)
        optimizer.zero_grad(set_to_none=to_none)
        sums = [None if p.grad is None else float(p.grad.abs().sum()) for p in module.parameters()]
        assert sums == [None if to_none else 0.0] * 4


# -- what clipping returns and limits


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_that_is_returned_is_the_one_before_clipping(norm_type):
    module, optimizer, _ = wrapped()
    for threshold in (0.5, 0.25, 0.125):
        optimizer.backward(loss_of(module))
        before = norm_of(gradients(module), norm_type)
        assert optimizer.get_grad_norm() is None or threshold < 0.5, threshold
        norm = optimizer.clip_grad_by_norm(threshold, norm_type, error_if_nonfinite=True)
        assert (norm.dtype, norm.shape) == (torch.float32, ()), threshold
        assert norm.item() == pytest.approx(before, rel=1e-6), threshold
        assert norm_of(gradients(module), norm_type) == pytest.approx(threshold), threshold
        optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(before, rel=1e-6), threshold
        optimizer.zero_grad()
    refused(ValueError, "greater than 0", optimizer.clip_grad_by_norm, 0.0)
    optimizer.backward(loss_of(module))
    optimizer.clip_grad_by_value(0.05)
    assert norm_of(gradients(module), math.inf) == pytest.approx(0.05)


def test_a_limit_of_the_plugin_clips_what_nobody_clipped():
    """Once, by the whole norm; a gradient that was clipped to less stays as it is."""
    module, optimizer, _ = wrapped(max_norm=0.5, lr=1.0)
    assert optimizer.step() is True
    for threshold, plain in ((None, False), (0.25, False), (None, True)):
        before = weights(module)
        loss_of(module).backward() if plain else optimizer.backward(loss_of(module))
        if threshold is not None:
            optimizer.clip_grad_by_norm(threshold)
        optimizer.step()
        moved = [a - b for a, b in zip(weights(module), before, strict=True)]
        assert norm_of(moved) == pytest.approx(threshold or 0.5, rel=1e-5), threshold
        optimizer.zero_grad()


def test_a_gradient_with_other_strides_moves_the_right_weights_under_a_fused_optimizer():
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
        assert (module.weight.grad is not gradient) is fused
    torch.testing.assert_close(*results)


class MuonWithAuxAdam(torch.optim.SGD):
    """An optimizer that steps marked groups by Muon and others by something else."""


class OwnMuon(torch.optim.SGD):
    pass


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("limit", ["mode", "plugin"])
def test_matrices_are_left_out_in_whatever_way_muon_is_known(marked, limit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plugin = SinglePlugin()
    matrix, *further = module.parameters()
    if marked:
        groups = [{"params": [matrix], "use_muon": True}, {"params": further, "use_muon": False}]
        optimizers = MuonWithAuxAdam(groups, lr=0.1, fused=True)
    else:
        optimizers = [OwnMuon([matrix], lr=0.1), torch.optim.SGD(further, lr=0.1, fused=True)]
    plugin.max_norm = 0.1 if limit == "plugin" else 0.0
    _, optimizer, *_ = Booster(plugin=plugin).boost(module, optimizers)
    optimizer.backward(30 * loss_of(module))
    before = gradients(module)
    norm = norm_of([p.grad for p in further])
    step = optimizer.step if limit == "plugin" else optimizer.clip_and_step
    step(*([] if limit == "plugin" else [build("norm", threshold=0.1)]))
    for number, (gradient, was) in enumerate(zip(gradients(module), before, strict=True)):
        torch.testing.assert_close(gradient, was * (0.1 / norm if number else 1.0))


# -- gradients that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("scale", [{}, {"scale": 4.0}])
@pytest.mark.parametrize("policy", ["skip", "error", "ignore"])
def test_a_step_that_is_not_finite(policy, scale, bad):
    """An fp16 overflow is skipped whatever the policy."""
    module, optimizer, _ = wrapped(nonfinite=policy, **scale)
    before = weights(module)
    optimizer.backward(loss_of(module) + module.bias.sum() * bad)
    kept = module.weight.grad.clone()
    if policy == "error" and not scale:
        refused(NonFiniteGradient, f"{bad}: bias", optimizer.clip_grad_by_norm, 1.0)
        return
    outcome = optimizer.clip(build("norm", threshold=2.0))
    assert not math.isfinite(outcome.norm)
    assert (outcome.clipped, outcome.fraction, outcome.threshold) == (0.0, 0.0, 2.0)
    assert all(map(math.isnan, (outcome.norm_clipped, outcome.coef, outcome.max_stat)))
    taken = policy == "ignore" and not scale
    assert optimizer.step() is optimizer.was_taken() is taken
    assert equal(before, weights(module)) is not taken
    assert not taken or torch.allclose(module.weight, before[0] - 0.1 * kept)
    assert optimizer.loss_scale is None or optimizer.loss_scale.scale == 2.0
    optimizer.zero_grad()
    if not taken:
        optimizer.backward(loss_of(module))
        optimizer.clip_grad_by_norm(1.0)
        assert optimizer.step() is True


def test_what_is_final_only_after_the_backward_pass_is_not_clipped_in_it():
    _, optimizer, _ = wrapped()  # as under a plugin that does not watch gradients
    mode = build("value", threshold=1.0)
    refused(ValueError, "works with SinglePlugin", optimizer.clip_in_backward, mode)


def test_one_call_may_ask_for_an_error():
    module, optimizer, _ = wrapped()
    optimizer.backward(loss_of(module) * math.inf)
    clip = optimizer.clip_grad_by_norm
    refused(NonFiniteGradient, "norm is", clip, 1.0, error_if_nonfinite=True)


# -- the loss and its scale


@pytest.fixture
def plain_gradients():
    plain, reference, _ = wrapped()
    reference.backward(loss_of(plain))
    return gradients(plain)


WEIGHTS = pytest.mark.parametrize(
    ("weight", "shape"), [(1.0, ()), (0.5, (1,)), (0.5, ()), (3.0, ())]
)


@WEIGHTS
def test_a_loss_is_multiplied_by_weight_times_scale(plain_gradients, weight, shape):
    module, optimizer, _ = wrapped(scale=8.0)
    optimizer.backward(loss_of(module).reshape(shape), weight)
    assert equal(gradients(module), [g * weight * 8.0 for g in plain_gradients])


@WEIGHTS
def test_gradients_are_divided_by_the_scale_once(plain_gradients, weight, shape):
    module, optimizer, _ = wrapped(scale=8.0)
    for _ in range(2):
        optimizer.backward(loss_of(module).reshape(shape), weight)
        optimizer.unscale()
        optimizer.unscale()
        assert equal(gradients(module), [g * weight for g in plain_gradients])
        optimizer.zero_grad()


def test_a_backward_pass_has_the_scale_of_its_beginning(plain_gradients):
    module, optimizer, _ = wrapped(scale=8.0)
    optimizer.loss_scale.scale = 2.0
    optimizer.backward(loss_of(module).double(), 3.0)
    assert equal(gradients(module), [g * 6.0 for g in plain_gradients])
    assert optimizer.begin_backward() == 2.0


def test_a_loss_of_several_elements_is_refused():
    module, optimizer, _ = wrapped(scale=8.0)
    losses = module.weight.sum() * torch.ones(3)
    refused(ValueError, "[3]|reduce it", optimizer.backward, losses)


def test_a_scale_that_nobody_used_is_refused():
    module, optimizer, _ = wrapped(scale=8.0)
    loss_of(module).backward()
    refused(StepOrderError, "was not scaled", optimizer.clip_grad_by_norm, 1.0)


def test_float16_gradients_are_refused():
    module = nn.Linear(4, 2).half()
    booster = Booster("fp16")
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    booster.backward(model.unwrap().weight.float().square().sum(), optimizer)
    refused(TypeError, "weight is float16", optimizer.clip_grad_by_norm, 1.0)


def test_an_unknown_precision_is_refused():
    refused(ValueError, "fp8", Booster, "fp8")


def overflown(clips):
    """A wrapper whose first step of fp16 overflowed, with clipping or without."""
    module, optimizer, _ = wrapped(scale=64.0, growth_interval=2, lr=1e-9)
    optimizer.backward(loss_of(module) * math.inf)
    if clips:
        optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step() is False
    return module, optimizer


@pytest.mark.parametrize("clips", [True, False])
def test_an_overflow_of_fp16_halves_the_scale_once(clips):
    _, optimizer = overflown(clips)
    assert optimizer.loss_scale.scale == 32.0


@pytest.mark.parametrize("clips", [True, False])
def test_finite_steps_of_fp16_let_the_scale_grow(clips):
    """A step is made with the scale of its backward pass."""
    module, optimizer = overflown(clips)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of(module))
        if clips:
            norms.append(optimizer.clip_grad_by_norm(1e-9).item())
        assert optimizer.step() is True
        norms += [] if clips else [norm_of(gradients(module))]
    assert optimizer.loss_scale.scale == 64.0
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_the_scale_never_becomes_0():
    scale = LossScale(scale=4.0)
    for _ in range(2000):
        scale.update(finite=False)
    assert scale.scale > 0


# -- states


def test_states_go_round():
    module, plain, _ = wrapped()
    _, scaled, _ = wrapped(scale=8.0)
    scaled.load_state_dict(plain.state_dict())
    assert scaled.loss_scale.scale == 8.0

    def several(rates):
        pairs = zip(module.parameters(), rates, strict=True)
        optimizers = [torch.optim.SGD([parameter], lr=rate) for parameter, rate in pairs]
        return OptimizerWrapper(optimizers, ParallelModel(Layout.of_model(module)), SinglePlugin())

    saved = several((0.1, 0.2))
    loaded = several((0.3, 0.4))
    loaded.load_state_dict(saved.state_dict())
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.2]
    refused(ValueError, "2 optimizers|1 were", plain.load_state_dict, saved.state_dict())
    refused(RuntimeError, "2 optimizers", saved.unwrap)


# -- what a plugin says for the whole Booster


def one_step(plugin):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    booster = Booster(plugin=plugin)
    before = model.weight.detach().clone()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(torch.ones(2, 4)).square().sum(), optimizer)
    optimizer.step()
    weights = booster.state_dict(model)
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
    moved = (weights["weight"] - before).norm().item() if weights else None
    return booster.dtype, scale, moved


def is_resharded(plugin):
    """Whether a block is sharded again between its forward and its backward pass."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1)
    model, *_ = Booster(plugin=plugin).boost(encoder, torch.optim.SGD(encoder.parameters(), lr=1.0))
    outputs = model(torch.ones(1, 2, 4))
    return isinstance(encoder.layers[0].linear1.weight, DTensor) and outputs.requires_grad


def steps_of_plugins():
    assert is_resharded(LowLevelZeroPlugin(stage=3))
    for plugin in (LowLevelZeroPlugin(stage=2, param_dtype="bf16"), TorchFSDPPlugin(False)):
        assert not is_resharded(plugin)
    for options in ({"param_dtype": "bf16"}, {"cpu_offload": True}):
        words = "cpu_offload|zero_stage 2 and 3"
        refused(ValueError, words, LowLevelZeroPlugin, stage=1, **options)
    refused(ValueError, "zero_stage|not 7", HybridParallelPlugin, zero_stage=7)
    refused(ValueError, "1, 2 or 3", LowLevelZeroPlugin, stage=0)
    odd = {"pp_size": 2, "schedule": "interleaved_1f1b", "num_microbatches": 5}
    refused(ValueError, "num_microbatches=5|multiple of 2", HybridParallelPlugin, **odd)
    return [
        one_step(plugin)
        for plugin in (
            LowLevelZeroPlugin(stage=1),
            LowLevelZeroPlugin(stage=1, max_norm=0.1),
            LowLevelZeroPlugin(stage=2, max_norm=0.1),
            HybridParallelPlugin(tp_size=1, pp_size=1, max_norm=0.1, precision="bf16"),
            HybridParallelPlugin(precision="fp16", initial_scale=2**4),
        )
    ]


on_ranks = pytest.mark.xdist_group("steps of plugins")  # the ranks run once


@cache
def on_two_ranks():
    return run_ranks(steps_of_plugins, 2)[0]


@on_ranks
def test_max_norm_comes_from_the_plugin():
    free, first, second, half, _ = on_two_ranks()
    assert free[2] > 1.0
    # The bias takes its share of the norm, the same in each.
    assert 0.05 < first[2] < 0.1
    assert abs(first[2] - second[2]) < 1e-6
    assert 0.05 < half[2] < 0.1


@on_ranks
def test_the_precision_comes_from_the_plugin():
    _, _, _, half, scaled = on_two_ranks()
    assert half[0] is torch.bfloat16
    assert scaled[0] is torch.float16


@on_ranks
def test_the_scale_of_the_loss_comes_from_the_plugin():
    *_, scaled = on_two_ranks()
    assert scaled[1] == 2.0**4
