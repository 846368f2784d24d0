"""Calls in an order, or of parameters, for which no clipping would be right are refused."""

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster
from tests.distributed.by_hand import PLUGINS, SGD, Loop, batch_for, cross_entropy, make
from tests.ranks import run_ranks

FEW = "these are not the parameters of one boosted model"
HELD = "the last backward pass ran under no_sync, so its gradients are not final"
TWICE = "gradients were clipped already in this step"
LATE = "a backward pass ran after the gradients were final"
OWN_STEP = "averaged over ranks in the step of its optimizer: give boost the optimizer"
ALONE = "this model was boosted without its optimizer"


def refused(words, call, *args):
    with pytest.raises((ValueError, RuntimeError)) as error:
        call(*args)
    assert words in str(error.value), (words, str(error.value))


def loss_of(loop, model=None, net="gpt"):
    inputs, targets = map(loop.part, batch_for(net))
    return cross_entropy((model or loop.model)(inputs), targets)


def tried(plugins):
    for name in plugins:
        raw = make("gpt")
        before = list(raw.parameters())
        loop = Loop(name, raw, scale=None)
        optimizer = loop.optimizer
        whole = batch_for("gpt")
        loop.backward(*whole)
        if name not in (None, "ddp"):
            if name not in ("zero1", "1f1b", "pipeline_dp"):
                refused(FEW, apply_gradient_clipping, before, "norm", 1.0)
            refused(FEW, apply_gradient_clipping, list(raw.parameters())[:1], "norm", 1.0)
        mixed = [*raw.parameters(), nn.Parameter(torch.ones(2))]
        refused(FEW, apply_gradient_clipping, mixed, "norm", 1.0)
        with loop.booster.no_sync(loop.model):
            with loop.booster.no_sync(loop.model):
                pass
            loop.backward(*whole)
        refused(HELD, apply_gradient_clipping, loop.model, "norm", 1.0)
        refused(HELD, optimizer.clip_grad_by_norm, 1.0)
        refused(HELD, optimizer.clip_grad_by_value, 1.0)
        refused(HELD, optimizer.step)
        loop.backward(*whole)  # The next backward pass outside makes them final.
        apply_gradient_clipping(loop.model, "norm", 1.0)
        refused(TWICE, apply_gradient_clipping, loop.model, "norm", 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loop.model.pipeline is None:
            for final in (optimizer.unscale, lambda by=optimizer: by.clip_grad_by_norm(1.0)):
                loop.backward(*whole)
                final()
                loss_of(loop).backward()
                refused(LATE, optimizer.step)
                optimizer.zero_grad()
        if name in ("ddp", "zero1", "tensor_dp"):
            unstepped, *_ = Booster(plugin=PLUGINS[name]()).boost(make("odd"))
            refused(ALONE, apply_gradient_clipping, unstepped, "norm", 1.0)
            refused(OWN_STEP, loss_of(loop, unstepped, "odd").backward)
            unstepped.requires_grad_(False)  # A model that only judges others has no step.
            inputs = batch_for("odd")[0].requires_grad_()
            unstepped(inputs).sum().backward()
            assert inputs.grad.abs().sum() > 0
        if name in ("ddp", "zero1"):  # Quantized weights.
            raw = make("conv")
            codes = torch.ones(2, dtype=torch.uint8)
            raw.register_parameter("codes", nn.Parameter(codes, requires_grad=False))
            Booster(plugin=PLUGINS[name]()).boost(raw, SGD(raw[0].parameters()))


@pytest.mark.parametrize(
    ("ranks", "plugins"),
    [
        (1, [None]),
        (2, ["ddp", "fsdp", "zero1", "zero2", "tensor", "1f1b"]),
        (4, ["tensor_dp", "pipeline_dp", "hybrid"]),
    ],
)
def test_wrong_calls_are_refused(ranks, plugins):
    if ranks > 1:
        run_ranks(tried, ranks, plugins)
    else:
        tried(plugins)


def test_in_one_process_parts_can_be_clipped():
    loop = Loop(None, make("conv"))
    whole = batch_for("conv")
    with loop.booster.no_sync(loop.model):
        loop.backward(*whole)
    refused(HELD, apply_gradient_clipping, loop.raw[0], "norm", 1.0)
    loop.backward(*whole)
    # Unscaled first: the norm of the first layer is that of twice the plain gradient.
    plain = make("conv")
    cross_entropy(plain(whole[0]), whole[1]).backward()
    norm = 2 * float(torch.cat([p.grad.flatten() for p in plain[0].parameters()]).norm())
    assert apply_gradient_clipping(loop.raw[0], "norm", 0.1).norm == pytest.approx(norm, rel=1e-9)
    later_layers = list(loop.raw[2:].parameters())
    assert apply_gradient_clipping(later_layers, "norm", 0.1).norm > 0.1
    with pytest.raises(ValueError, match="no parameters to clip"):
        apply_gradient_clipping([], "norm", 1.0)


def test_parameters_that_a_model_returns_keep_no_hooks():
    loop = Loop(None, make("conv"))
    loop.raw.forward = lambda inputs: loop.raw[0].weight
    for _ in range(2):
        loop.model(None)
    assert not loop.raw[0].weight._backward_hooks
