"""What the tests of Colossal-AI's Booster and of its checkpoints ask for, against plain PyTorch."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from runner import (
    Booster,
    HybridAdam,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.booster import OptimizerWrapper
from tests.ranks import run_ranks

LIMIT = 0.05
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, initial_scale=2**5),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, initial_scale=2**5),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1),
}


class Images(nn.Module):
    """Two convolutions with a norm, and a classifier."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.GELU())
        self.pool = nn.Sequential(nn.Conv2d(6, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(16, 5)

    def forward(self, inputs):
        return self.head(self.pool(self.body(inputs)))


class Words(nn.Module):
    """A transformer whose output layer has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def batch_for(kind, seed=3):
    generator = torch.Generator().manual_seed(seed)
    if kind is Words:
        return torch.randint(19, (4, 7), generator=generator)
    return torch.rand(4, 3, 8, 8, generator=generator)


def build(kind):
    torch.manual_seed(5)
    return kind()


def loss_of(outputs):
    return outputs.square().mean()


# -- Plugins --------------------------------------------------------------------------------------


def step_under(name, kind):
    """Clip and step once, as the test of each plugin does for every model that it knows."""
    booster = Booster(plugin=PLUGINS[name]())
    model = build(kind)
    model, optimizer, criterion, _, _ = booster.boost(model, SGD(model.parameters(), 1.0), loss_of)
    assert isinstance(optimizer, OptimizerWrapper)
    if name == "ddp":
        assert isinstance(model.module, DistributedDataParallel)
    if name in ("fsdp", "zero2"):
        assert isinstance(model.module, FSDPModule)
    part = batch_for(kind).chunk(dist.get_world_size())[dist.get_rank()]
    booster.backward(criterion(model(part)), optimizer)
    norm = optimizer.clip_grad_by_norm(LIMIT)
    optimizer.step()
    assert isinstance(optimizer.get_grad_norm(), float)
    assert optimizer.get_grad_norm() == pytest.approx(norm.item())
    return booster.state_dict(model), norm.item()


def every_plugin():
    return {key: step_under(*key) for key in itertools.product(PLUGINS, (Images, Words))}


def test_every_plugin_clips_and_steps_as_one_process():
    first, second = run_ranks(every_plugin, 2)
    for kind in (Images, Words):
        model = build(kind)
        loss_of(model(batch_for(kind))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        assert norm > LIMIT
        SGD(model.parameters(), 1.0).step()
        wanted = model.state_dict()
        for name in PLUGINS:
            weights, measured = first[name, kind]
            assert measured == pytest.approx(norm, rel=1e-5), (name, kind)
            assert second[name, kind][1] == measured
            assert weights.keys() == wanted.keys()
            for key, tensor in wanted.items():
                torch.testing.assert_close(weights[key], tensor, rtol=1e-6, atol=1e-6)


def synchronisation():
    """Gradients of one weight after a microbatch under no_sync and after the last one."""
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    model = nn.Linear(1, 1, bias=False)
    loader = plugin.prepare_dataloader(torch.arange(10.0).reshape(10, 1), batch_size=2)
    model, optimizer, criterion, loader, _ = booster.boost(
        model, SGD(model.parameters(), lr=1e-3), torch.mean, loader
    )
    found = []
    for number, batch in zip(range(2), loader, strict=False):
        with booster.no_sync(model) if number == 0 else nullcontext():
            booster.backward(criterion(model(batch)), optimizer)
        found.append(next(model.parameters()).grad.item())
    read = [
        index.item()
        for [each] in plugin.prepare_dataloader(TensorDataset(torch.arange(10)), batch_size=2)
        for index in each
    ]
    return found, read


def test_gradients_differ_under_no_sync_and_ranks_read_other_samples():
    (first, read), (second, other) = run_ranks(synchronisation, 2)
    # Samples 0, 1 and 2, 3 first; then 4, 5 and 6, 7.
    assert (first[0], second[0]) == (0.5, 2.5)
    assert first[1] == second[1] == pytest.approx((0.5 + 4.5 + 2.5 + 6.5) / 2)
    assert sorted(read + other) == list(range(10))
    assert len(read) == len(other)


# -- Mixed precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Images, Words])
def test_fp16_is_torch_amp(kind):
    plain = build(kind)
    theirs, scaler = torch.optim.Adam(plain.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    booster = Booster(mixed_precision="fp16")
    model = build(kind)
    model, ours, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    taken = 0
    for seed in range(6):
        with torch.autocast("cpu", torch.float16):
            outputs = plain(batch_for(kind, seed))
        scaler.scale(loss_of(outputs.float())).backward()
        scaler.unscale_(theirs)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
        scale = scaler.get_scale()
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        booster.backward(loss_of(model(batch_for(kind, seed))), ours)
        measured = ours.clip_grad_by_norm(LIMIT)
        if norm.isfinite():
            assert measured.item() == pytest.approx(norm.item(), rel=1e-5)
        assert ours.step() is (scaler.get_scale() == scale)
        taken += scaler.get_scale() == scale
        ours.zero_grad()
        assert ours.loss_scale.scale == scaler.get_scale()
    assert taken >= 3
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.unwrap().state_dict()[name], tensor, rtol=1e-6, atol=1e-6)


# -- Checkpoints ----------------------------------------------------------------------------------


def boosted(name, make, rate):
    booster = Booster(plugin=None if name is None else PLUGINS[name]())
    model = build(Words)
    optimizer = make(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def train(booster, model, optimizer, scheduler):
    booster.backward(loss_of(model(batch_for(Words))), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return booster.state_dict(model)


def write(name, folder, shard, **options):
    """Train a step, save, and return the weights then and after one more step."""
    booster, model, optimizer, scheduler = boosted(name, HybridAdam, 0.001)
    saved = train(booster, model, optimizer, scheduler)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    booster.save_model(model, folder / "model", shard=shard, **options)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=shard, use_async=True)
    booster.save_lr_scheduler(scheduler, folder / "scheduler")
    return saved, train(booster, model, optimizer, scheduler)


def read(name, folder):
    """Load what was saved into objects that differ, and return as write() does."""
    booster, model, optimizer, scheduler = boosted(name, AdamW, 0.01)
    booster.load_model(model, folder / "model", low_cpu_mem_mode=False)
    loaded = booster.state_dict(model)
    booster.load_optimizer(optimizer, folder / "optimizer")
    booster.load_lr_scheduler(scheduler, folder / "scheduler")
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    assert scheduler.last_epoch == 1
    return loaded, train(booster, model, optimizer, scheduler)


PAIRS = [("ddp", "fsdp"), ("fsdp", "ddp"), ("zero1", "zero1")]


def checkpoints(folder):
    found = {}
    for (first, second), shard in itertools.product(PAIRS, (False, True)):
        at = folder / f"{first}{second}{shard}"
        found[first, second, shard] = (
            write(first, at, shard, size_per_shard=32),
            read(second, at),
            write(second, folder / f"{at.name}again", shard),
        )
    return found


def require_same(written, loaded):
    for before, after in zip(written, loaded, strict=True):
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            torch.testing.assert_close(after[key], tensor, rtol=1e-6, atol=1e-6)
    moved = [not torch.equal(written[0][key], written[1][key]) for key in written[0]]
    assert all(moved), "a step after loading changes each weight"


def test_plugins_read_their_own_files_and_those_of_others(tmp_path):
    first = run_ranks(checkpoints, 2, tmp_path)[0]
    assert len(first) == 2 * len(PAIRS)
    for case, (written, loaded, _) in first.items():
        require_same(written, loaded)
        # One file is what torch.load reads; a plain model takes it.
        *names, shard = case
        if not shard:
            plain = build(Words)
            held = torch.load(tmp_path / f"{''.join(names)}False" / "model", weights_only=True)
            plain.load_state_dict(held)
            require_same(written, (plain.state_dict(), loaded[1]))


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_one_process_reads_its_own_files(tmp_path, shard, use_safetensors):
    written = write(None, tmp_path, shard, use_safetensors=use_safetensors)
    require_same(written, read(None, tmp_path))
