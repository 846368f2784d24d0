"""A parameter group that says how it is clipped: left out, or by a threshold of its own."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from runner import apply_gradient_clipping
from runner.booster import Booster, TorchDDPPlugin, TorchFSDPPlugin
from runner.clip import build
from tests.clip.reference import norm_of, refused
from tests.ranks import run_ranks

LIMIT = 0.5  # of the mode; gradients are far above it


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)).double()


def optimizer_of(model, head, kind=SGD):
    """An optimizer whose second group, the middle layer, has ``"clip": head``."""
    outer = [*model[0].parameters(), *model[2].parameters()]
    return kind([{"params": outer}, {"params": model[1].parameters(), "clip": head}], lr=0.1)


def loss_of(model):
    inputs = torch.arange(24, dtype=torch.float64).view(6, 4) / 7
    return model(inputs).square().sum()


def boosted(head, kind=SGD, plugin=None):
    """A boosted model and optimizer with the gradients of one backward pass."""
    booster = Booster(plugin=plugin)
    model = network()
    model, optimizer, *_ = booster.boost(model, optimizer_of(model, head, kind))
    booster.backward(loss_of(model), optimizer)
    return model, optimizer


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def scaled(gradients, limit):
    """Scale gradients to a norm of at most ``limit``, in plain arithmetic."""
    factor = min(1.0, limit / norm_of(gradients.values()))
    return {name: gradient * factor for name, gradient in gradients.items()}


def clamped(gradients, limit):
    return {name: gradient.clamp(-limit, limit) for name, gradient in gradients.items()}


def divided(model):
    """The gradients of one backward pass: those of the middle layer, and the others."""
    loss_of(model).backward()
    gradients = gradients_of(model)
    head = {name: g for name, g in gradients.items() if name.startswith("1.")}
    return head, {name: g for name, g in gradients.items() if name not in head}


def require_equal(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-12, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("kind", [SGD, AdamW, Adagrad])
@pytest.mark.parametrize(("mode", "clip"), [("norm", scaled), ("value", clamped)])
def test_a_group_with_clip_false_is_not_clipped(mode, clip, kind):
    model, optimizer = boosted(False, kind)
    decision = optimizer.clip(build(mode, threshold=LIMIT), fold=True)
    head, others = divided(network())
    expected = head | clip(others, LIMIT)
    require_equal(gradients_of(model.unwrap()), expected)
    norm = norm_of([*head.values(), *others.values()])
    assert float(decision.norm) == pytest.approx(norm, rel=1e-12)
    assert float(decision.norm_clipped) == pytest.approx(norm_of(expected.values()), rel=1e-12)


@pytest.mark.parametrize(("mode", "clip"), [("norm", scaled), ("value", clamped)])
def test_a_group_with_a_threshold_is_clipped_by_it(mode, clip):
    model, optimizer = boosted(0.125)
    decision = optimizer.clip(build(mode, threshold=LIMIT), fold=True)
    head, others = divided(network())
    expected = clip(head, 0.125) | clip(others, LIMIT)
    require_equal(gradients_of(model.unwrap()), expected)
    assert float(decision.threshold) == LIMIT
    [inner] = decision.inner
    assert (inner.name, float(inner.decision.threshold)) == ("param_groups.1", 0.125)
    assert float(inner.decision.norm) == pytest.approx(norm_of(head.values()), rel=1e-12)


def test_adaptive_clipping_takes_the_threshold_of_a_group():
    model, optimizer = boosted(0.01)
    optimizer.clip(build("adaptive", threshold=0.1, exclude=[]))
    head, others = divided(network())
    weights = dict(network().named_parameters())
    for name, gradient in (head | others).items():
        limit = 0.01 if name in head else 0.1
        dims = list(range(gradient.ndim - 1, gradient.ndim))
        lengths = torch.linalg.vector_norm(gradient, dim=dims, keepdim=True)
        allowed = torch.linalg.vector_norm(weights[name], dim=dims, keepdim=True).clamp(min=1e-3)
        gradient *= (limit * allowed / lengths).clamp(max=1.0)
    require_equal(gradients_of(model.unwrap()), head | others)


def test_a_group_below_its_threshold_is_untouched_to_the_bit():
    model, optimizer = boosted(1e30)
    decision = optimizer.clip(build("norm", threshold=1e30))
    head, others = divided(network())
    for name, gradient in gradients_of(model.unwrap()).items():
        assert torch.equal(gradient, (head | others)[name])
    assert float(decision.clipped) == 0.0
    assert float(decision.norm_clipped) == float(decision.norm)


def test_a_mode_that_remembers_follows_the_norm_of_the_parameters_that_it_clips():
    _, optimizer = boosted(False)
    mode = build("percentile", threshold=50.0, min_steps=1)
    optimizer.bind(mode)
    optimizer.clip(mode)
    _, others = divided(network())
    assert mode.memory["norms"].tolist() == pytest.approx([norm_of(others.values())], rel=1e-12)


def test_the_backward_pass_clips_by_the_settings_of_groups():
    for head in (False, 0.125):
        model = network()
        booster = Booster()
        model, optimizer, *_ = booster.boost(model, optimizer_of(model, head))
        mode = build("value", threshold=LIMIT)
        optimizer.clip_in_backward(mode)
        booster.backward(loss_of(model), optimizer)
        optimizer.clip(mode)
        middle, others = divided(network())
        expected = clamped(middle, math.inf if head is False else head) | clamped(others, LIMIT)
        require_equal(gradients_of(model.unwrap()), expected)


def test_a_call_on_a_boosted_model_clips_by_the_settings_of_groups():
    model, _ = boosted(False)
    apply_gradient_clipping(model, "norm", LIMIT)
    head, others = divided(network())
    require_equal(gradients_of(model.unwrap()), head | scaled(others, LIMIT))


def test_what_a_mode_cannot_do_with_a_group_is_refused():
    for head, mode, words in (
        (0.1, build("percentile", threshold=50.0), "PercentileClip takes no threshold"),
        (0.1, build("adagc", threshold=1.05), "AdaGCClip takes no threshold"),
        (0.1, build("groups", groups={"0.*": 1.0}), "GroupsClip takes no threshold"),
        (False, build("update", threshold=1.0), "UpdateClip limits what the optimizer does"),
    ):
        _, optimizer = boosted(head, AdamW)
        refused(ValueError, words, optimizer.bind, mode)
    for head in (0, -1.0, "norm", math.nan):
        refused(ValueError, "clip of parameter group 1 is", boosted, head)


def test_a_setting_that_changes_after_boost_is_refused():
    _, optimizer = boosted(False)
    optimizer.param_groups[1]["clip"] = 0.5
    words = "clip of parameter group 1 is 0.5, but was False at boost"
    refused(ValueError, words, optimizer.clip, build("norm", threshold=LIMIT))


def test_a_loaded_state_leaves_the_settings_of_groups_as_they_are():
    _, optimizer = boosted(False)
    _, other = boosted(0.5)
    optimizer.load_state_dict(other.state_dict())
    assert [group.get("clip") for group in optimizer.param_groups] == [None, False]


def _clipped_on_ranks(kind):
    plugin = TorchDDPPlugin() if kind == "ddp" else TorchFSDPPlugin()
    results = {}
    for head in (False, 0.125):
        for mode in ("norm", "value", "adaptive"):
            options = {"exclude": []} if mode == "adaptive" else {}
            model, optimizer = boosted(head, plugin=plugin)
            decision = optimizer.clip(build(mode, threshold=0.1, **options))
            gradients = {}
            for name, parameter in model.unwrap().named_parameters():
                gradient = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                gradients[name.removeprefix("module.")] = whole
            results[head, mode] = gradients, float(decision.norm), float(decision.norm_clipped)
    return results


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_clip_groups_as_one_process_does(kind):
    of_ranks = run_ranks(_clipped_on_ranks, 2, kind)
    for head in (False, 0.125):
        for mode in ("norm", "value", "adaptive"):
            options = {"exclude": []} if mode == "adaptive" else {}
            model, optimizer = boosted(head)
            decision = optimizer.clip(build(mode, threshold=0.1, **options))
            for results in of_ranks:
                gradients, norm, norm_clipped = results[head, mode]
                require_equal(gradients, gradients_of(model.unwrap()))
                assert norm == pytest.approx(float(decision.norm), rel=1e-12)
                assert norm_clipped == pytest.approx(float(decision.norm_clipped), rel=1e-12)
