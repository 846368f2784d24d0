"""Which requests for one clipping call a boosted model answers, in one process."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster, LossScale, StepOrderError
from runner.booster.step_order import StepState
from runner.clip import Layout, ParamShard, Units
from runner.clip.boosted import clip_boosted, register

OF_SEVERAL = (
    "these parameters are not all of one boosted model: clip each boosted model by itself, or "
    "boost them together: booster.boost([first, second], optimizer)"
)
REPLACED = (
    "these parameters were replaced when the model was boosted: give the boosted model, or its "
    "parameters() of now"
)
WITHOUT = (
    "this model was boosted without its optimizer, which synchronises gradients before they are "
    "clipped: booster.boost(model, optimizer)"
)
SOME = (
    "these are some of the parameters that were boosted together, whose gradients lie on several "
    "ranks: clip all of them, by apply_gradient_clipping(boosted_model, ...) or by "
    "optimizer.clip_grad_by_norm(max_norm)"
)


def boosted():
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    booster = Booster(loss_scale=LossScale(scale=64.0))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    booster.backward(model(torch.ones(3, 4)).square().sum(), optimizer)
    return raw, model, optimizer


def norm_of(parameters):
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))


def refused(given, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        apply_gradient_clipping(given, "norm", 0.5)
    assert str(raised.value) == message


@pytest.mark.parametrize("ask", ["boosted", "raw", "parameters"])
def test_a_whole_boosted_model_is_clipped_by_its_optimizer(ask):
    """Unscaled first, once a step."""
    raw, model, optimizer = boosted()
    given = {"boosted": model, "raw": raw, "parameters": raw.parameters()}[ask]
    scaled = norm_of(raw.parameters())
    outcome = apply_gradient_clipping(given, "norm", 0.5)
    assert outcome.norm == pytest.approx(scaled / 64.0, rel=1e-5)
    assert norm_of(raw.parameters()) == pytest.approx(0.5, rel=1e-5)
    assert optimizer.stage is StepState.CLIPPED
    with pytest.raises(StepOrderError, match="already"):
        apply_gradient_clipping(model, "norm", 0.5)


def test_adaptive_clipping_leaves_out_the_head_of_a_boosted_model():
    raw, model, optimizer = boosted()
    optimizer.unscale()
    head = raw[1].weight.grad.clone()
    assert apply_gradient_clipping(model, "adaptive", 1e-3).fraction == 1.0
    assert torch.equal(raw[1].weight.grad, head)


def test_parameters_that_do_not_train_need_not_be_given():
    raw, _, optimizer = boosted()
    raw[0].bias.requires_grad_(False)
    rest = [p for p in raw.parameters() if p.requires_grad]
    apply_gradient_clipping(rest, "norm", 0.5)
    assert optimizer.stage is StepState.CLIPPED


def test_in_one_process_a_part_is_clipped_by_itself():
    raw, _, optimizer = boosted()
    others = [p.grad / 64.0 for p in raw[1].parameters()]
    apply_gradient_clipping(raw[0], "norm", 0.5)
    assert norm_of(raw[0].parameters()) == pytest.approx(0.5, rel=1e-5)
    for parameter, gradient in zip(raw[1].parameters(), others, strict=True):
        assert torch.equal(parameter.grad, gradient)
    apply_gradient_clipping(raw[1], "norm", 0.25)
    assert norm_of(raw[1].parameters()) == pytest.approx(0.25, rel=1e-5)
    assert optimizer.stage is StepState.READY


def test_requests_that_no_optimizer_answers_say_what_to_write():
    raw, model, optimizer = boosted()
    other, _, others = boosted()
    free = nn.Parameter(torch.ones(2))
    refused([*raw.parameters(), free], OF_SEVERAL)
    refused([*raw.parameters(), *other.parameters()], OF_SEVERAL)
    alone = nn.Linear(2, 2)
    register(None, [alone, *alone.parameters()])
    for given in (alone, alone.parameters()):
        refused(given, WITHOUT)
    assert apply_gradient_clipping(model, "norm", 0.5).clipped == 1.0
    assert (optimizer.stage, others.stage) == (StepState.CLIPPED, StepState.READY)


def test_a_part_of_what_lies_on_several_ranks_is_refused():
    """Also what a plugin replaced when it spread the model."""
    first, second, old = (nn.Parameter(torch.ones(2)) for _ in range(3))
    shards = [ParamShard("first", first, Units((0,))), ParamShard("second", second, Units((0,)))]
    clipper = Mock(layout=Layout(shards, group=Mock()))
    register(clipper, [first, second, old])
    refused([first], SOME)
    refused([old], REPLACED)
    clipper.begin_clip.assert_not_called()
    mode = Mock()
    assert clip_boosted([first, second], mode) is clipper.clip.return_value
    mode.bind.assert_called_once_with(clipper.layout)
    clipper.clip.assert_called_once_with(mode)


def test_a_model_whose_optimizer_is_gone_is_a_plain_one():
    raw, model, optimizer = boosted()
    del optimizer
    model.optimizer = None
    assert clip_boosted(list(raw.parameters()), Mock()) is None
    norm = apply_gradient_clipping(raw, "norm", math.inf).norm
    assert norm == pytest.approx(norm_of(raw.parameters()), rel=1e-6)
