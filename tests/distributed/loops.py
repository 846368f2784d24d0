"""Training loops of other libraries that clip by one call, and the data that they share."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from runner import GradientMonitor, apply_gradient_clipping

CLIPS = {"norm": 0.3, "value": 0.02, "adaptive": 0.05}
"""Thresholds that clip in most steps."""

BATCH, MICROBATCHES, STEPS = 4, 2, 6
"""Samples of a microbatch over all ranks, microbatches of a step, and steps."""


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * MICROBATCHES * STEPS, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (len(inputs),), generator=generator))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def microbatches(rank=0, world=1):
    """For each microbatch the share of a rank, and whether it is the last one of its step."""
    for number, (inputs, targets) in enumerate(DataLoader(make_data(), BATCH), 1):
        yield inputs[rank::world], targets[rank::world], number % MICROBATCHES == 0


def sharded(model):
    """What fully_shard makes of a model."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2])
    return fully_shard(model)


def whole(model):
    """Whole weights by their own names, on every rank."""
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = full.detach().clone()
    return found


def clip_and_step(model, optimizer, monitor, mode, **measured):
    monitor.step(apply_gradient_clipping(model, mode, CLIPS[mode]), **measured)
    optimizer.step()
    optimizer.zero_grad()


def bare(kind, mode, *to):
    """A loop of PyTorch alone; kind: single, ddp or fsdp."""
    rank, world = (0, 1) if kind == "single" else (dist.get_rank(), dist.get_world_size())
    net = make_net()
    apply_gradient_clipping(net, mode, CLIPS[mode])  # what it keeps of the plain model is not used
    model = {"single": lambda m: m, "ddp": DistributedDataParallel, "fsdp": sharded}[kind](net)
    optimizer = make_optimizer(model)
    with GradientMonitor(model, *to) as monitor:
        for inputs, targets, last in microbatches(rank, world):
            if kind == "fsdp":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if kind == "ddp" and not last else nullcontext():
                loss = cross_entropy(model(inputs), targets)
                (loss / MICROBATCHES).backward()
            if last:
                samples = BATCH * MICROBATCHES
                clip_and_step(model, optimizer, monitor, mode, loss=loss, lr=0.3, samples=samples)
    return whole(net)


def fabric(kind, mode, *to):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    world = 1 if kind == "single" else _as_torchrun()
    strategies = {"single": "auto", "ddp": "ddp"}
    strategy = strategies.get(kind) or ModelParallelStrategy(lambda model, mesh: sharded(model))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    net = make_net()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(make_optimizer(model))
    with GradientMonitor(model, *to) as monitor:
        for inputs, targets, last in microbatches(fabric.global_rank, world):
            with fabric.no_backward_sync(model, enabled=not last and kind != "single"):
                loss = cross_entropy(model(inputs), targets)
                fabric.backward(loss / MICROBATCHES)
            if last:
                clip_and_step(model, optimizer, monitor, mode, loss=loss)
    return whole(net)


def accelerate(kind, mode, *to):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    world, plugin = 1 if kind == "single" else _as_torchrun(), None
    if kind == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=MICROBATCHES, fsdp_plugin=plugin
    )
    net = make_net()
    loader = DataLoader(make_data(), BATCH // world)
    model, optimizer, loader = accelerator.prepare(net, make_optimizer(net), loader)
    with GradientMonitor(model, *to) as monitor:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    clip_and_step(model, optimizer, monitor, mode, loss=loss)
    AcceleratorState._reset_state(reset_partial_state=True)
    return whole(accelerator.unwrap_model(model))


def _as_torchrun():
    """Describe this rank by the variables of torchrun, which other libraries read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody connects: the process group exists
        "TORCHELASTIC_RUN_ID": "tests",
        "GROUP_RANK": "0",
    }
    return world


LOOPS = {"bare": bare, "fabric": fabric, "accelerate": accelerate}


def run_all(name, kinds):
    """Weights and rows of every mode, by kind and mode."""
    found = {}
    for kind in kinds:
        for mode in CLIPS:
            rows = []
            found[kind, mode] = LOOPS[name](kind, mode, rows.append), rows
    return found
