"""Under data parallelism no sample of a stream counts twice.

The plugin divides it, or a loader that reads it whole on each rank is refused.
"""

from functools import cache
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from runner import GradientClipping, Trainer
from runner.booster.plugin import (
    LowLevelZeroPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SAMPLES, BATCH, STEPS, THRESHOLD = 20, 8, 5, 0.3
DATA_PARALLEL = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": LowLevelZeroPlugin,
}
MODEL_PARALLEL = {
    "tensor": lambda: TensorParallelPlugin(tp_plan={"0": "colwise", "2": "rowwise"}),
    "pipeline": PipelineParallelPlugin,
}


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (SAMPLES,), generator=generator)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Stream(IterableDataset):
    """All samples, or every ``step``-th from ``first`` on."""

    def __init__(self, first=0, step=1):
        self.first, self.step = first, step

    def __iter__(self):
        return islice(zip(*data(), strict=True), self.first, None, self.step)


class Sharded(Stream):
    """A stream that can be divided."""

    def shard(self, num_shards, index):
        return Stream(index, num_shards)


class ByRank(Stream):
    """A stream that divides itself, as scripts do that were written for no plugin."""

    def __iter__(self):
        return iter(Stream(dist.get_rank(), dist.get_world_size()))


class Declared(ByRank):
    shards_itself = True


@cache
def by_torch():
    """Weights after the steps, and the norms, of one process."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, weight_decay=0.5)
    norms = []
    while len(norms) < STEPS:
        for inputs, targets in DataLoader(TensorDataset(*data()), BATCH):
            nn.functional.cross_entropy(network(inputs), targets).backward()
            norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
            for parameter in network.parameters():
                parameter.grad *= min(1.0, THRESHOLD / float(norm))
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(norm))
            if len(norms) == STEPS:
                break
    return dict(network.named_parameters()), norms


def fit(plugin, loader, accumulation=1):
    network, rows = model(), Rows()
    trainer = Trainer(
        network,
        loader,
        f"{STEPS}ba",
        GradientClipping("norm", THRESHOLD),
        optimizers=torch.optim.AdamW(network.parameters(), lr=0.05, weight_decay=0.5),
        plugin=plugin,
        accumulation_steps=accumulation,
        sinks=[rows],
    )
    summary = trainer.fit()
    norms = [row["grad/norm"] for row in rows.rows]
    return trainer.booster.state_dict(trainer.model), norms, summary["samples"]


def refusal(call, *args, **options):
    try:
        call(*args, **options)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def on_data_parallel_ranks(names):
    found = []
    for name in names:
        plugin = DATA_PARALLEL[name]()
        rank, size = plugin.data_rank, plugin.data_size
        half = BATCH // size
        refused = [
            refusal(plugin.prepare_dataloader, Stream(), half, shuffle=True),
            refusal(fit, plugin, plugin.prepare_dataloader(ByRank(), half)),
            refusal(fit, plugin, DataLoader(Stream(), half)),
            refusal(fit, plugin, DataLoader(TensorDataset(*data()), half)),
            refusal(fit, plugin, DataLoader(Stream(rank, size), half + rank)),
            # One window, of two microbatches on one rank and of three on the other.
            refusal(fit, plugin, DataLoader(Stream(rank, size), half + rank), 3),
        ]
        same = TensorDataset(torch.zeros(SAMPLES, 6).double(), torch.zeros(SAMPLES).long())
        sampler = DistributedSampler(same, size, rank)
        fit(
            plugin, DataLoader(same, half, sampler=sampler)
        )  # The same samples, split over the ranks.
        loaders = [DataLoader(Stream(rank, size), half)]
        loaders += [
            plugin.prepare_dataloader(stream, half) for stream in (Stream(), Sharded(), Declared())
        ]
        found.append((refused, [fit(plugin, loader) for loader in loaders]))
    return found


def test_a_stream_that_each_data_parallel_rank_reads_whole_is_refused_and_one_by_rank_is_right():
    wanted, norms = by_torch()
    everywhere = run_ranks(on_data_parallel_ranks, 2, list(DATA_PARALLEL))
    for number, name in enumerate(DATA_PARALLEL):
        for results in everywhere:
            refused, fits = results[number]
            shuffled, by_rank, stream, mapped, *uneven = refused
            assert shuffled == ("ValueError", "Stream has its own order: shuffle=False"), name
            assert by_rank[0] == "ValueError", name
            assert "set shards_itself = True" in by_rank[1]
            for kind, message in (stream, mapped):
                assert kind, name
                assert "islice(samples, plugin.data_rank, None, plugin.data_size)" in message
                assert "torch.utils.data.DataLoader" in message
            for kind, message in (stream, mapped):
                assert kind == "ValueError"
                assert "all 2 data-parallel ranks read the same first batch" in message
                assert "plugin.prepare_dataloader" in message
            assert all("has ended before" in message for _, message in uneven)
            assert len(fits) == 4
            for _, ours, samples in fits:
                assert ours == pytest.approx(norms, rel=1e-9), name
                assert samples == 2 * SAMPLES - (SAMPLES - 2 * BATCH), name
        for weights, *_ in everywhere[0][number][1]:
            for key, tensor in wanted.items():
                got = weights[key]
                torch.testing.assert_close(got, tensor.detach(), rtol=1e-9, atol=1e-11, msg=name)


def on_one_data_parallel_rank(names):
    found = []
    for name in names:
        plugin = MODEL_PARALLEL[name]()
        mine = fit(MODEL_PARALLEL[name](), DataLoader(Stream(), BATCH))
        found.append((mine, fit(plugin, plugin.prepare_dataloader(Stream(), BATCH))))
    return found


def test_ranks_that_share_a_model_read_the_whole_stream():
    wanted, norms = by_torch()
    everywhere = run_ranks(on_one_data_parallel_rank, 2, list(MODEL_PARALLEL))
    for number, name in enumerate(MODEL_PARALLEL):
        for weights, ours, samples in everywhere[0][number]:
            assert ours == pytest.approx(norms, rel=1e-9), name
            assert samples == 2 * SAMPLES - (SAMPLES - 2 * BATCH), name
            for key, tensor in wanted.items():
                torch.testing.assert_close(
                    weights[key], tensor.detach(), rtol=1e-9, atol=1e-11, msg=name
                )
