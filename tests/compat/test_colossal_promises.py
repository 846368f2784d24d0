"""What the tests of Colossal-AI's Booster ask for, against plain PyTorch."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from runner import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tests.ranks import run_ranks

LIMIT = 0.05
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, initial_scale=2**5),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, initial_scale=2**5),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1),
}
KINDS = {"ddp": DistributedDataParallel, "fsdp": FSDPModule, "zero2": FSDPModule}


def build():
    """A network over [B, 3, 8, 8]."""
    torch.manual_seed(5)
    body = [nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv2d(6, 4, 3)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))


def batch_for(seed=3):
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(outputs):
    return outputs.square().mean()


def step_under(name):
    """Clip and step once; the weights and the norm."""
    booster, model = Booster(plugin=PLUGINS[name]()), build()
    model, optimizer, criterion, _, _ = booster.boost(model, SGD(model.parameters(), 1.0), loss_of)
    assert isinstance(model.module, KINDS.get(name, nn.Module))
    part = batch_for().chunk(dist.get_world_size())[dist.get_rank()]
    booster.backward(criterion(model(part)), optimizer)
    norm = optimizer.clip_grad_by_norm(LIMIT)
    optimizer.step()
    return booster.state_dict(model), norm.item()


def gradients_under_no_sync():
    """Gradients of one weight after a microbatch under no_sync and after the last one."""
    plugin = TorchDDPPlugin()
    booster, model = Booster(plugin=plugin), nn.Linear(1, 1, bias=False)
    loader = plugin.prepare_dataloader(torch.arange(10.0).reshape(10, 1), batch_size=2)
    model, optimizer, criterion, loader, _ = booster.boost(
        model, SGD(model.parameters(), lr=1e-3), torch.mean, loader
    )
    found = []
    for number, batch in zip(range(2), loader, strict=False):
        with booster.no_sync(model) if number == 0 else nullcontext():
            booster.backward(criterion(model(batch)), optimizer)
        found.append(next(model.parameters()).grad.item())
    return found


def on_ranks():
    return {name: step_under(name) for name in PLUGINS}, gradients_under_no_sync()


def test_every_plugin_clips_and_steps_as_one_process_and_no_sync_keeps_gradients_apart():
    (found, first), (others, second) = run_ranks(on_ranks, 2)
    model = build()
    loss_of(model(batch_for())).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
    assert norm > LIMIT
    SGD(model.parameters(), 1.0).step()
    wanted = model.state_dict()
    for name, (weights, measured) in found.items():
        assert measured == pytest.approx(norm, rel=1e-5), name
        assert others[name][1] == measured
        assert weights.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-6, atol=1e-6)
    # Samples 0, 1 and 2, 3 first; then 4, 5 and 6, 7.
    assert (first[0], second[0]) == (0.5, 2.5)
    assert first[1] == second[1] == pytest.approx((0.5 + 4.5 + 2.5 + 6.5) / 2)


def test_fp16_is_torch_amp():
    plain, model = build(), build()
    theirs, scaler = torch.optim.Adam(plain.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    booster = Booster(mixed_precision="fp16")
    model, ours, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    taken = 0
    for seed in range(6):
        factor = 1e6 if seed == 2 else 1.0  # one step overflows
        with torch.autocast("cpu", torch.float16):
            outputs = plain(batch_for(seed))
        scaler.scale(factor * loss_of(outputs.float())).backward()
        scaler.unscale_(theirs)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
        scale = scaler.get_scale()
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        booster.backward(factor * loss_of(model(batch_for(seed))), ours)
        measured = ours.clip_grad_by_norm(LIMIT)
        if norm.isfinite():
            assert measured.item() == pytest.approx(norm.item(), rel=1e-5)
        assert ours.step() is (scaler.get_scale() == scale)
        taken += scaler.get_scale() == scale
        ours.zero_grad()
        assert ours.loss_scale.scale == scaler.get_scale()
    assert taken == 5
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.unwrap().state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
