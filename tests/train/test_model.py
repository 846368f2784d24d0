"""The model is made on the first rank, and each other rank gets its part: the same bits."""

import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.booster import Booster
from runner.gradients.shard import local
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from runner.train.model import make_on_first
from tests.distributed.cases import PLUGINS, SHAPE
from tests.ranks import run_ranks

SEED = 5


class Rotary(nn.Module):
    """Block with buffers of every kind, a parameter computed from others, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 6, bias=False)
        with torch.no_grad():
            self.second.weight.copy_(torch.linalg.qr(self.first.weight)[0].T)
        self.scale = nn.Parameter(self.first.weight.std(1).detach())
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.frozen.kind = "frozen"
        self.register_buffer("angles", torch.rand(5).cumsum(0), persistent=False)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("shared", self.mask)
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))


class Stack(nn.Sequential):
    def __init__(self):
        blocks = [Rotary() for _ in range(4)]
        blocks[3].second.weight = blocks[0].second.weight  # tied, also across stages
        super().__init__(nn.ModuleList(blocks[:0]), *blocks)
        del self[0]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Rotary() for _ in range(3))
        self.recurrent = nn.LSTM(4, 3)
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)


def tied():
    return GPT(**SHAPE, tied=True, bias=True)


def experts():
    return MixtureGPT(**SHAPE, tied=False, bias=True, experts=5, top_k=2)


SPLITS = [
    ("fsdp", Blocks),
    ("tensor", tied),
    ("1f1b", Stack),
    ("moe_zero3", experts),
    ("hybrid_fsdp_tp", tied),
    ("hybrid_fsdp_pp", tied),
]


def differing():
    """Return what is not the model of one process after boost, by plugin."""
    problems = []
    for plugin, make in SPLITS:
        torch.manual_seed(SEED)
        expected = make()
        made_on = []

        def noting(make=make, made_on=made_on):
            made_on.append(torch.get_default_device().type)
            return make()

        model, reason = make_on_first(noting, SEED)
        attributes = [vars(parameter) for parameter in model.parameters()]
        assert attributes == [vars(parameter) for parameter in expected.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        booster = Booster(plugin=PLUGINS[plugin]())
        wrapper, *_ = booster.boost(model, optimizer)
        state = booster.state_dict(wrapper)
        if dist.get_rank() == 0:
            stored = expected.state_dict()
            assert state.keys() == stored.keys()
            problems += [(plugin, n) for n in state if not torch.equal(state[n], stored[n])]
        buffers = dict(expected.named_buffers())
        for name, buffer in wrapper.module.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                problems.append((plugin, name))
        if made_on != ["cpu" if dist.get_rank() == 0 else "meta"] or reason:
            problems.append((plugin, made_on, reason))
    return problems


def test_each_rank_gets_its_part_of_the_model_of_one_process_to_the_bit():
    assert run_ranks(differing, 4) == [[]] * 4


class Reads(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.largest = self.weight.max().item()


class Keeps(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        table = torch.randn(3)
        self.table = lambda: table


class Draws(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.generator = torch.Generator().manual_seed(1)
        nn.init.normal_(self.weight, generator=self.generator)


class Shares(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("part", self.table[:2])


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.weight.register_hook(torch.neg)


class Differs(nn.Linear):
    def __init__(self):
        super().__init__(3, 2 if torch.get_default_device().type == "cpu" else 4)


ORDINARY = {
    Reads: "on the meta device it raises RuntimeError: Tensor.item",
    Keeps: "it keeps tensors that are no parameters or buffers",
    Draws: "it keeps a random generator",
    Shares: "table and part share memory",
    Hooked: "weight has a hook",
    Differs: "it is another model on the meta device",
}


def made_everywhere():
    reasons = []
    for make in ORDINARY:
        torch.manual_seed(SEED)
        expected = make()
        model, reason = make_on_first(make, SEED)
        assert all(map(torch.equal, model.parameters(), expected.parameters())), make
        reasons.append(reason)
    return reasons


def test_a_model_that_needs_its_values_is_made_on_every_rank():
    for reasons in run_ranks(made_everywhere, 2):
        for reason, expected in zip(reasons, ORDINARY.values(), strict=True):
            assert reason.startswith(expected)


LARGE = {"vocabulary": 2048, "context": 64, "layers": 16, "heads": 16, "width": 1024}
MIB = 2**20
M_MMAP_THRESHOLD = -3  # of malloc.h


def resident(key):
    """Return a line of /proc/self/status in bytes: VmRSS is memory now, VmHWM its peak."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def growth(plugin):
    """Return by how much the memory of this process grew at most, its part, and the model's size.

    The part is that after boost; all in bytes.
    """
    # Freed memory returns to the system at once: glibc would keep several hundred MB of it.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    before = resident("VmRSS")

    def make():
        return GPT(**LARGE, tied=False, bias=True, dropout=0.0)

    model, _ = make_on_first(make, SEED)
    size = sum(parameter.nbytes for parameter in model.parameters())
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer, *_ = Booster(plugin=PLUGINS[plugin]()).boost(model, optimizer)
    peak = resident("VmHWM") - before
    part = sum(local(parameter).nbytes for parameter in model.parameters())
    dist.barrier()
    return peak, part, block, size


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["fsdp", "tensor", "1f1b"])
def test_a_rank_of_a_large_model_needs_the_memory_of_its_part(plugin):
    for rank, (peak, part, block, size) in enumerate(run_ranks(growth, 4, plugin)):
        figures = [round(bytes_ / MIB) for bytes_ in (peak, part, block, size)]
        print(f"{plugin} rank {rank}: peak, part, block, model in MiB: {figures}")
        assert part < size / 3
        if rank > 0:
            assert peak < part + block + 300 * MIB
