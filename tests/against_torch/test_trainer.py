"""Streams are divided over ranks, or refused; several optimizers and schedulers step together."""

import re
from functools import cache
from itertools import chain, islice

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from runner import Booster, Trainer
from tests.against_torch.conditions import PLUGINS, network, sgd
from tests.against_torch.plain import fit, step_by_torch
from tests.ranks import run_ranks

SAMPLES, BATCH, STEPS = 20, 8, 5
DATA_PARALLEL = ("ddp", "fsdp", "zero1")
MODEL_PARALLEL = ("tensor", "pipeline")
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


def stepped(net, several):
    """One optimizer, or two and their schedulers."""
    if not several:
        return {"optimizers": [sgd(net)]}
    first = SGD(net[0].parameters(), lr=0.3, momentum=0.9)
    pair = [first, AdamW(net[1:].parameters(), lr=0.02, weight_decay=0.1)]
    return {"optimizers": pair, "schedulers": [StepLR(optimizer, 2, 0.5) for optimizer in pair]}


def by_torch(several):
    """Weights after the steps, and the norms, of one process."""
    net = network("")
    loader = DataLoader(TensorDataset(*data()), BATCH)
    losses = (F.cross_entropy(net(x), y) for x, y in islice(chain(loader, loader), STEPS))
    steps = step_by_torch(net, losses, *chain.from_iterable(stepped(net, several).values()))
    return dict(net.named_parameters()), [norm for _, norm in steps]


def trained(plugin, loader, accumulation=1, several=False):
    net = network("")
    options = stepped(net, several) | {"accumulation_steps": accumulation}
    weights, rows, samples = fit(plugin, net, loader, STEPS, **options)
    return weights, [row["grad/norm"] for row in rows], samples


def refusal(call, *args, **options):
    with pytest.raises((TypeError, ValueError)) as error:
        call(*args, **options)
    return str(error.value)


def refused_by(plugin):
    """Loaders that would count samples twice, or end one rank before the other."""
    rank = plugin.data_rank
    size = plugin.data_size
    half = BATCH // size
    same = TensorDataset(torch.zeros(SAMPLES, 4).double(), torch.zeros(SAMPLES).long())
    sampler = DistributedSampler(same, size, rank)
    trained(plugin, DataLoader(same, half, sampler=sampler))  # Equal samples, split over the ranks.
    return [
        refusal(plugin.prepare_dataloader, Stream(), half, shuffle=True),
        refusal(trained, plugin, plugin.prepare_dataloader(ByRank(), half)),
        refusal(trained, plugin, DataLoader(Stream(), half)),
        refusal(trained, plugin, DataLoader(TensorDataset(*data()), half)),
        refusal(trained, plugin, DataLoader(Stream(rank, size), half + rank)),
        # One window, of two microbatches on one rank and of three on the other.
        refusal(trained, plugin, DataLoader(Stream(rank, size), half + rank), 3),
    ]


SAID = (
    "Stream has its own order: shuffle=False",
    "set shards_itself = True",
    *["all 2 data-parallel ranks read the same first batch.*DistributedSampler"] * 2,
    *["has ended before"] * 2,
)


def on_ranks(*names):
    """Loaders that are refused; and trainings, the last one by several optimizers."""
    results = {}
    for name in names:
        make = PLUGINS[name].make
        plugin = make()
        size = plugin.data_size
        half = BATCH // plugin.data_size
        loaders = [DataLoader(Stream(plugin.data_rank, size), half)]
        streams = (Stream(), Sharded(), Declared()) if size > 1 else (Stream(),)
        loaders += [plugin.prepare_dataloader(stream, half) for stream in streams]
        whole = plugin.prepare_dataloader(TensorDataset(*data()), half // 2)
        results[name] = (
            refused_by(plugin) if size > 1 else [],
            [
                *(trained(make(), loader) for loader in loaders),
                trained(make(), whole, 2, several=True),
            ],
        )
    return results


@cache
def results_of_ranks():
    """What one process and each of two ranks found, by plugin."""
    return [on_ranks("single"), *run_ranks(on_ranks, 2, *DATA_PARALLEL, *MODEL_PARALLEL)]


once = pytest.mark.xdist_group("streams of ranks")  # the ranks run once


@once
def test_a_stream_that_each_data_parallel_rank_reads_whole_is_refused():
    for results in results_of_ranks():
        for name, (messages, _) in results.items():
            assert bool(messages) == (name in DATA_PARALLEL), name
            for message, expected in zip(messages, SAID if messages else (), strict=True):
                assert re.search(expected, message, re.DOTALL), (name, message)


@once
def test_a_stream_that_is_divided_over_data_parallel_ranks_is_right():
    single = by_torch(False)
    with_two_optimizers = by_torch(True)
    for rank, results in enumerate(results_of_ranks()):
        for name, (_, trainings) in results.items():
            assert len(trainings) == (5 if name in DATA_PARALLEL else 3), name
            references = [*[single] * (len(trainings) - 1), with_two_optimizers]
            for training, reference in zip(trainings, references, strict=True):
                weights, norms, samples = training
                expected_weights, expected_norms = reference
                assert norms == pytest.approx(expected_norms, rel=1e-12), name
                assert samples == 2 * SAMPLES - (SAMPLES - 2 * BATCH), name
                if rank < 2:
                    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


def test_a_script_that_trains_in_phases_makes_a_new_trainer_for_each():
    model = network("")
    boosted, *_ = Booster().boost(model, sgd(model))
    with pytest.raises(ValueError, match=r"boosted already: .*\[first, second\]"):
        Booster().boost(boosted, sgd(model))
    del boosted
    Booster().boost(model, sgd(model))


def test_what_belongs_to_no_module_is_named():
    model = network("")
    loose = nn.Parameter(torch.zeros(4))
    optimizer = SGD([{"params": model.parameters()}, {"params": [loose]}], lr=1.0)
    for boost in (Booster().boost, lambda model, each: Trainer(model, [], optimizers=each)):
        with pytest.raises(ValueError, match=r"param_groups\[1\]\['params'\]\[0\] of SGD, of shap"):
            boost(model, optimizer)


def test_a_criterion_may_hold_the_model():
    model = nn.Linear(3, 2)
    criterion = nn.Module()
    criterion.model = model
    _, optimizer, *_ = Booster().boost(model, sgd(model), criterion)
    assert optimizer.layout.names == ["weight", "bias"]
    model = criterion.model = nn.Linear(3, 2)
    criterion.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"the criterion has parameters \(scale\)"):
        Booster().boost(model, None, criterion)
