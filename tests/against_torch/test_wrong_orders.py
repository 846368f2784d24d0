"""Calls in an order, or of parameters, for which no clipping would be right are refused."""

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster, LossScale
from tests.against_torch.plain import PLUGINS, batch, mean_square, network, part
from tests.ranks import run_ranks


class Tried:
    """A boosted model."""

    def __init__(self, plugin, scale=None):
        self.booster = Booster(plugin=PLUGINS[plugin](), loss_scale=scale)
        self.raw = network()
        self.before = list(self.raw.parameters())
        adamw = torch.optim.AdamW(self.raw.parameters(), lr=0.05, weight_decay=0.5)
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, adamw)

    def loss(self, step, model=None):
        inputs, targets = (part(self.booster.plugin, whole) for whole in batch(step))
        return mean_square((model or self.model)(inputs), targets)

    def backward(self, step):
        pair = tuple(part(self.booster.plugin, whole) for whole in batch(step))
        if self.model.pipeline is None:
            self.loss(step).backward()
        else:
            self.booster.execute_pipeline(iter([pair]), self.model, mean_square, self.optimizer)

    def held(self):
        return self.booster.no_sync(self.model)

    def refused(self, key, call, *args):
        with pytest.raises((ValueError, RuntimeError)) as error:
            call(*args)
        assert SAID[key] in str(error.value), (key, str(error.value))


SAID = {
    "replaced": "these are not the parameters of one boosted model",
    "some": "these are not the parameters of one boosted model",
    "mixed": "these are not the parameters of one boosted model",
    "held": "the last backward pass ran under no_sync, so its gradients are not final",
    "twice": "gradients were clipped already in this step",
    "late": "a backward pass ran after the gradients were final",
    "own step": "averaged over ranks in the step of its optimizer: give boost the optimizer",
    "alone": "this model was boosted without its optimizer",
}


def tried(plugins):
    for name in plugins:
        wrong = Tried(name)
        raw, optimizer = wrong.raw, wrong.optimizer
        wrong.backward(0)
        if name not in ("single", "ddp"):
            if name != "zero1" and not name.startswith("pipeline"):
                wrong.refused("replaced", apply_gradient_clipping, wrong.before, "norm", 1.0)
            some = list(raw.parameters())[:1]
            wrong.refused("some", apply_gradient_clipping, some, "norm", 1.0)
        mixed = [*raw.parameters(), nn.Parameter(torch.ones(2))]
        wrong.refused("mixed", apply_gradient_clipping, mixed, "norm", 1.0)
        with wrong.held():
            with wrong.held():
                pass
            wrong.backward(0)
        wrong.refused("held", apply_gradient_clipping, wrong.model, "norm", 1.0)
        wrong.refused("held", optimizer.clip_grad_by_norm, 1.0)
        wrong.refused("held", optimizer.clip_grad_by_value, 1.0)
        wrong.refused("held", optimizer.step)
        wrong.backward(1)  # The next backward pass outside makes them final.
        apply_gradient_clipping(wrong.model, "norm", 1.0)
        wrong.refused("twice", apply_gradient_clipping, wrong.model, "norm", 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if wrong.model.pipeline is None:
            for final in (optimizer.unscale, lambda by=optimizer: by.clip_grad_by_norm(1.0)):
                wrong.backward(0)
                final()
                wrong.loss(1).backward()
                wrong.refused("late", optimizer.step)
                optimizer.zero_grad()
        if name in ("ddp", "zero1", "tensor_data"):
            unstepped, *_ = Booster(plugin=PLUGINS[name]()).boost(network())
            wrong.refused("alone", apply_gradient_clipping, unstepped, "norm", 1.0)
            wrong.refused("own step", wrong.loss(0, unstepped).backward)
            unstepped.requires_grad_(False)  # A model that only judges others has no step.
            inputs = batch(0)[0].requires_grad_()
            unstepped(inputs).sum().backward()
            assert inputs.grad.abs().sum() > 0
        if name in ("ddp", "zero1"):  # Quantized weights.
            codes = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
            raw = network()
            raw.register_parameter("codes", codes)
            Booster(plugin=PLUGINS[name]()).boost(raw, torch.optim.SGD(raw[0].parameters(), lr=1))


@pytest.mark.parametrize(
    ("ranks", "plugins"),
    [
        (1, ["single"]),
        (2, ["ddp", "fsdp", "zero1", "zero2", "tensor", "pipeline"]),
        (4, ["tensor_data", "pipeline_data", "hybrid"]),
    ],
)
def test_wrong_calls_are_refused(ranks, plugins):
    if ranks > 1:
        run_ranks(tried, ranks, plugins)
    else:
        tried(plugins)


def test_in_one_process_parts_can_be_clipped():
    part_by_part = Tried("single", scale=LossScale(1024.0))
    raw, booster, optimizer = part_by_part.raw, part_by_part.booster, part_by_part.optimizer
    with part_by_part.held():
        booster.backward(part_by_part.loss(0), optimizer)
    part_by_part.refused("held", apply_gradient_clipping, raw[0], "norm", 1.0)
    booster.backward(part_by_part.loss(0), optimizer)
    # Unscaled first: the norm of the first layer is that of twice the plain gradient.
    plain = network()
    mean_square(plain(batch(0)[0]), batch(0)[1]).backward()
    norm = 2 * float(torch.cat([p.grad.flatten() for p in plain[0].parameters()]).norm())
    assert apply_gradient_clipping(raw[0], "norm", 0.1).norm == pytest.approx(norm, rel=1e-9)
    others = list(raw[2:].parameters())
    assert apply_gradient_clipping(others, "norm", 0.1).norm > 0.1
    with pytest.raises(ValueError, match="no parameters to clip"):
        apply_gradient_clipping([], "norm", 1.0)


def test_parameters_that_a_model_returns_keep_no_hooks():
    returning = Tried("single")
    returning.raw.forward = lambda inputs: returning.raw[0].weight
    for _ in range(2):
        returning.model(None)
    assert not returning.raw[0].weight._backward_hooks
