"""Under data parallelism a stream is divided, or a loader of the whole of it is refused."""

import re
from functools import cache
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from runner import Booster, GradientClipping, Log, Trainer
from tests.against_torch.conditions import PLUGINS, network, sgd
from tests.against_torch.plain import clip
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SAMPLES, BATCH, STEPS, THRESHOLD = 20, 8, 5, 0.3
DATA_PARALLEL, MODEL_PARALLEL = ("ddp", "fsdp", "zero1"), ("tensor", "pipeline")
"""Ranks of the latter read the whole stream."""


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(6, (SAMPLES,), generator=generator)


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
    net = network("")
    optimizer = sgd(net)
    norms = []
    while len(norms) < STEPS:
        for inputs, targets in DataLoader(TensorDataset(*data()), BATCH):
            nn.functional.cross_entropy(net(inputs), targets).backward()
            norms.append(clip(net, THRESHOLD))
            optimizer.step()
            optimizer.zero_grad()
            if len(norms) == STEPS:
                break
    return dict(net.named_parameters()), norms


def fit(plugin, loader, accumulation=1):
    net, rows = network(""), Rows()
    trainer = Trainer(
        net,
        loader,
        f"{STEPS}ba",
        GradientClipping("norm", THRESHOLD),
        optimizers=sgd(net),
        booster=Booster(plugin=plugin),
        accumulation_steps=accumulation,
        log=Log([rows]),
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


def refused_by(plugin):
    """Loaders that would count samples twice, or end one rank before the other."""
    rank, size = plugin.data_rank, plugin.data_size
    half = BATCH // size
    same = TensorDataset(torch.zeros(SAMPLES, 4).double(), torch.zeros(SAMPLES).long())
    sampler = DistributedSampler(same, size, rank)
    fit(plugin, DataLoader(same, half, sampler=sampler))  # Equal samples, split over the ranks.
    return [
        refusal(plugin.prepare_dataloader, Stream(), half, shuffle=True),
        refusal(fit, plugin, plugin.prepare_dataloader(ByRank(), half)),
        refusal(fit, plugin, DataLoader(Stream(), half)),
        refusal(fit, plugin, DataLoader(TensorDataset(*data()), half)),
        refusal(fit, plugin, DataLoader(Stream(rank, size), half + rank)),
        # One window, of two microbatches on one rank and of three on the other.
        refusal(fit, plugin, DataLoader(Stream(rank, size), half + rank), 3),
    ]


SAID = (
    "Stream has its own order: shuffle=False",
    "set shards_itself = True",
    *["all 2 data-parallel ranks read the same first batch.*DistributedSampler"] * 2,
    *["has ended before"] * 2,
)


def on_ranks():
    found = {}
    for name in (*DATA_PARALLEL, *MODEL_PARALLEL):
        make = PLUGINS[name].make
        plugin = make()
        size, half = plugin.data_size, BATCH // plugin.data_size
        loaders = [DataLoader(Stream(plugin.data_rank, size), half)]
        streams = (Stream(), Sharded(), Declared()) if size > 1 else (Stream(),)
        loaders += [plugin.prepare_dataloader(stream, half) for stream in streams]
        refused = refused_by(plugin) if size > 1 else []
        found[name] = refused, [fit(make(), loader) for loader in loaders]
    return found


def test_a_stream_that_each_data_parallel_rank_reads_whole_is_refused_and_one_by_rank_is_right():
    wanted, norms = by_torch()
    for rank, results in enumerate(run_ranks(on_ranks, 2)):
        for name, (refused, fits) in results.items():
            for (kind, message), said in zip(refused, SAID if refused else (), strict=True):
                assert kind, name
                assert re.search(said, message, re.DOTALL), message
            assert len(fits) == (4 if name in DATA_PARALLEL else 2)
            for weights, ours, samples in fits:
                assert ours == pytest.approx(norms, rel=1e-9), name
                assert samples == 2 * SAMPLES - (SAMPLES - 2 * BATCH), name
                for key, tensor in wanted.items() if rank == 0 else ():
                    torch.testing.assert_close(
                        weights[key], tensor.detach(), rtol=1e-9, atol=1e-11, msg=name
                    )
