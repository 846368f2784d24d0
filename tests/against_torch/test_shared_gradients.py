"""Two parameters that autograd gives one gradient are clipped once each."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from runner import apply_gradient_clipping
from runner.booster import Booster, LossScale, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from tests.ranks import run_ranks


class Merged(nn.Module):
    """A linear layer whose weight is the sum of two."""

    def __init__(self, stacked):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.stacked = stacked

    def forward(self, inputs):
        weights = [self.first, self.second]
        weight = torch.stack(weights).sum(0) if self.stacked else weights[0] + weights[1]
        return inputs @ weight.T + self.bias


def batch(step, micro):
    generator = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def expected():
    """Plain PyTorch, with weights that are added: each of them has a gradient of its own."""
    model = Merged(stacked=False)
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    for step in range(4):
        for micro in range(2):
            (model(batch(step, micro)).square().mean() / 2).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.mul_((0.3 / norm).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def boosted(plugin=None, micros=2):
    model = Merged(stacked=True)
    booster = Booster(plugin=plugin, loss_scale=LossScale(1024.0))
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    wrapped, optimizer, *_ = booster.boost(model, optimizer)
    parts = booster.plugin.data_size
    for step in range(4):
        whole = torch.cat([batch(step, 0), batch(step, 1)])
        for number, inputs in enumerate(whole.chunk(micros), 1):
            own = inputs.chunk(parts)[booster.plugin.data_rank]
            with nullcontext() if number == micros else booster.no_sync(wrapped, optimizer):
                booster.backward(wrapped(own).square().mean() / micros, optimizer)
        optimizer.clip_grad_by_norm(0.3)
        optimizer.step()
        optimizer.zero_grad()
    return booster.state_dict(wrapped)


def test_one_process():
    torch.testing.assert_close(boosted(), dict(expected()), rtol=0, atol=1e-9)


def _over_ranks():
    # Under fsdp PyTorch itself accumulates into the gathered parameter's gradient.
    return [
        boosted(TorchDDPPlugin()),
        boosted(LowLevelZeroPlugin(stage=1)),
        boosted(TorchFSDPPlugin(), micros=1),
    ]


def test_data_parallel_ranks():
    for found in run_ranks(_over_ranks, 2)[0]:
        torch.testing.assert_close(found, dict(expected()), rtol=0, atol=1e-9)


def test_clipping_by_one_call():
    model, inputs = Merged(stacked=True), batch(0, 0)
    model(inputs).square().mean().backward()
    assert model.first.grad.data_ptr() == model.second.grad.data_ptr()
    outcome = apply_gradient_clipping(model, "norm", 0.3)
    assert outcome.norm > 0.3
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.3)
