"""Gradients in one buffer under data parallelism, and plugins that cannot have one."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.booster import Booster, TorchDDPPlugin
from tests.against_torch.plain import PLUGINS, network
from tests.ranks import run_ranks

STEPS, MICROBATCHES, SAMPLES = 20, 2, 8


class Branches(nn.Module):
    """One of two layers by the batch, so that ranks may use different ones; one never used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left, self.right, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, inputs):
        branch = self.left if float(inputs[:, 0].sum()) > 0 else self.right
        return branch(self.first(inputs).tanh())


def make():
    torch.manual_seed(0)
    return Branches()


def batch(step, micro):
    """Samples of both ranks; each half chooses a branch. In every fourth step none goes right."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    if step % 4 == 3:
        inputs[:, 0] = inputs[:, 0].abs()
    return inputs, torch.randn(SAMPLES, 6, generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, fused=True)


def in_plain_pytorch(max_norm):
    model = make()
    optimizer = adamw(model)
    present = []
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            for inputs, targets in zip(*(x.chunk(2) for x in batch(step, micro)), strict=True):
                (F.mse_loss(model(inputs), targets) / (2 * MICROBATCHES)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.cat([g.double().flatten() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, float(max_norm / norm)))
        present.append([n for n, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return present, model.state_dict()


def train(max_norm, flat, holds):
    plugin = TorchDDPPlugin(find_unused_parameters=True)
    booster = Booster(plugin=plugin, flat_gradients=flat)
    raw = make()
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    present, kept, shared = [], [], []
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            inputs, targets = (x.chunk(2)[plugin.data_rank] for x in batch(step, micro))
            with booster.no_sync(model) if micro < MICROBATCHES - 1 else nullcontext():
                booster.backward(F.mse_loss(model(inputs), targets) / MICROBATCHES, optimizer)
        optimizer.clip_grad_by_norm(max_norm)
        gradients = {n: p.grad for n, p in raw.named_parameters() if p.grad is not None}
        present.append(list(gradients))
        shared.append(len({g.untyped_storage().data_ptr() for g in gradients.values()}) == 1)
        if holds and plugin.rank == 0:
            kept.append(gradients["first.weight"])
        del gradients
        optimizer.step()
        optimizer.zero_grad()
    return present, {n: p.clone() for n, p in raw.state_dict().items()}, shared


def cases():
    return {
        (max_norm, flat, holds): train(max_norm, flat, holds)
        for max_norm in (0.05, 1e6)
        for flat, holds in ((True, False), (True, True), ("auto", False))
    }


def test_steps_are_those_of_one_process_and_alike_on_all_ranks():
    ranks = run_ranks(cases, 2)
    for (max_norm, flat, holds), (_, weights, shared) in ranks[0].items():
        wanted, plain = in_plain_pytorch(max_norm)
        assert all("never.weight" not in names for names in wanted)
        assert all("right.weight" not in wanted[step] for step in range(3, STEPS, 4))
        assert all(shared) if flat is True else not any(shared)
        for name, weight in plain.items():
            off = float((weights[name] - weight).norm() / weight.norm())
            assert off < 1e-6, (max_norm, flat, holds, name)
        for rank in ranks:
            found, own, _ = rank[max_norm, flat, holds]
            assert found == wanted, (flat, holds)
            assert all(torch.equal(own[name], weights[name]) for name in weights)


def refusals():
    found = {}
    for name, make_plugin in PLUGINS.items():
        if name in ("single", "ddp", "tensor_data", "pipeline_data", "hybrid"):
            continue  # the last three need four ranks
        raw = network().float()
        with pytest.raises(ValueError, match="flat_gradients=True") as error:
            Booster(plugin=make_plugin(), flat_gradients=True).boost(raw, adamw(raw))
        found[name] = str(error.value)
    views = TorchDDPPlugin(gradient_as_bucket_view=True)
    raw = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    with pytest.raises(ValueError, match="flat_gradients=True") as error:
        Booster(plugin=views, flat_gradients=True).boost(raw, adamw(raw))
    found["views"] = str(error.value)
    raw = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    assert (
        Booster(plugin=views, flat_gradients="auto").boost(raw, adamw(raw))[1].layout.flat is None
    )
    raw = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    assert (
        Booster(plugin=TorchDDPPlugin(), flat_gradients="auto")
        .boost(raw, adamw(raw))[1]
        .layout.flat
    )
    return found


def test_plugins_with_buffers_of_their_own_refuse():
    for found in run_ranks(refusals, 2):
        assert "gradient_as_bucket_view=False" in found.pop("views")
        assert found
        for message in found.values():
            assert "keeps gradients in buffers of its own" in message
