"""Streams over ranks and workers: each sample is read once, also if some parts end early."""

import multiprocessing
import random
from collections import Counter
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from runner import Booster, CheckpointSaver, Evaluate, Trainer
from runner.booster.plugin import SinglePlugin, TorchDDPPlugin, TorchFSDPPlugin
from runner.data.stream import StreamLoader
from tests.ranks import run_ranks

SAMPLES, BATCH = 53, 4


def pair(number):
    return torch.tensor([float(number), 1.0]), number % 3


class Plain(IterableDataset):
    """Numbers in an order drawn from all three global generators."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(SAMPLES))
        random.shuffle(numbers)
        np.random.shuffle(numbers)
        yield from (pair(numbers[index]) for index in torch.randperm(SAMPLES).tolist())


class ByItself(Plain):
    """Divides itself over workers, as PyTorch's documentation shows, and over ``size`` ranks."""

    def __init__(self, rank=0, size=1):
        self.rank = rank
        self.size = size
        self.shards_itself = size > 1

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from map(pair, range(self.rank * workers + worker, SAMPLES, self.size * workers))


class Shards(Plain):
    """Divided by its method; parts have other lengths than each other."""

    def __init__(self, numbers=range(SAMPLES)):
        self.numbers = numbers

    def shard(self, num_shards, index):
        first, end = (round(SAMPLES * (part / num_shards) ** 2) for part in (index, index + 1))
        return Shards(range(first, end))

    def __iter__(self):
        yield from map(pair, self.numbers)


def loader_of(dataset, rank=0, world=1, workers=0, batch=BATCH, drop_last=False):
    options = {"rank": rank, "world_size": world, "drop_last": drop_last, "seed": 3}
    return StreamLoader(dataset, batch, num_workers=workers, **options)


def seen(loader):
    """The numbers of each microbatch of a loader; empty where this rank has none."""
    batches = [batch[0][:, 0].int().tolist() for batch in loader]
    return [[] if loader.weightless(number) else batch for number, batch in enumerate(batches)]


@pytest.mark.parametrize("kind", [Plain, ByItself])
def test_a_step_has_the_same_samples_however_a_stream_is_divided(kind):
    whole = seen(loader_of(kind(), batch=8))
    assert Counter(chain.from_iterable(whole)) == Counter(range(SAMPLES))
    for world, workers in ((2, 2), (4, 1), (8, 0)):
        parts = [seen(loader_of(kind(), r, world, workers, 8 // world)) for r in range(world)]
        groups = [*zip(*parts, strict=True)]
        assert [[*chain.from_iterable(group)] for group in groups] == whole
        assert {max(map(len, group)) - min(map(len, group)) for group in groups} <= {0, 1}


def test_an_epoch_has_an_order_of_its_own():
    loader = loader_of(Plain(), 1, 2)
    epochs = []
    for epoch in (0, 1, 0):
        loader.dataset.set_epoch(epoch)
        epochs.append(seen(loader))
    assert epochs[0] == epochs[2] != epochs[1]


def test_a_stream_leaves_the_random_numbers_of_the_training_alone():
    states = (random.getstate(), np.random.get_state()[1].tolist())
    seen(loader_of(Plain(), 1, 2))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    drawn = []
    for workers in (0, 2):
        torch.manual_seed(0)
        seen(loader_of(Plain(), workers=workers))
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


def test_a_batch_of_a_stream_that_is_not_full_can_be_left_out():
    both = [seen(loader_of(Plain(), rank, 2, drop_last=True)) for rank in (0, 1)]
    assert [len(batch) for batch in both[0] + both[1]] == [BATCH] * 2 * (SAMPLES // (2 * BATCH))


class Watched(nn.Linear):
    """Counts its forward passes."""

    passes = 0

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs / SAMPLES)


def train_on_parts():
    """For each kind of stream: samples, passes, held-out loss and weights."""
    # Ranks of tests are daemons, which may not start workers; those of the command may.
    multiprocessing.current_process()._config["daemon"] = False
    results = []
    for kind, workers, steps in ((TorchDDPPlugin, 2, 1), (TorchFSDPPlugin, 0, 3)):
        plugin = kind()
        model = Watched(2, 3)
        dataset = ByItself(plugin.data_rank, plugin.data_size) if workers else Shards()
        train = plugin.prepare_dataloader(dataset, BATCH, num_workers=workers)
        held_out = Evaluate(plugin.prepare_dataloader(dataset, BATCH), interval="99ep")
        options = {"booster": Booster(plugin=plugin), "accumulation_steps": steps}
        trainer = Trainer(model, train, "2ep", (), held_out, **options)
        summary = trainer.fit()
        weights = trainer.booster.state_dict(trainer.model)
        results.append((summary["samples"], model.passes, summary["final"]["eval/loss"], weights))
    return results


@cache
def two_ranks():
    return run_ranks(train_on_parts, 2)


@pytest.mark.xdist_group("parts of a stream")
def test_parts_of_unequal_length_count_each_sample_once():
    inputs, targets = zip(*map(pair, range(SAMPLES)), strict=True)
    for mine, theirs in zip(*two_ranks(), strict=True):
        assert mine[0] == theirs[0] == 2 * SAMPLES
        model = Watched(2, 3)
        model.load_state_dict(mine[3])
        loss = nn.functional.cross_entropy(model(torch.stack(inputs)), torch.tensor(targets))
        assert mine[2] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.xdist_group("parts of a stream")
def test_ranks_with_parts_of_unequal_length_run_the_same_number_of_passes():
    """A rank that has none would make the others wait for ever."""
    for mine, theirs in zip(*two_ranks(), strict=True):
        assert mine[1] == theirs[1]


def test_a_rank_without_any_sample_is_named():
    loader = loader_of(ByItself(60, 61), 0, 2)
    assert list(loader) == []
    with pytest.raises(ValueError, match="data-parallel rank 0 of 2 reads no sample"):
        loader.stand_in(0)


class Stated(Plain):
    """Saves its position."""

    def __init__(self, numbers=range(SAMPLES)):
        self.numbers, self.at = numbers, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        first = self.at
        self.at = 0
        for position, number in enumerate(self.numbers[first:], first + 1):
            self.at = position
            inputs, target = pair(number)
            yield inputs + random.random() + torch.rand(2) + np.random.rand(), target
        self.at = 0


class StatedShards(Stated):
    def shard(self, num_shards, index):
        return Stated(self.numbers[index * 7 :: num_shards])


def training(kind, workers, *callbacks):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    loader = SinglePlugin().prepare_dataloader(kind(), BATCH, seed=3, num_workers=workers)
    growing = {0: 1, "2ba": 2, "9ba": 3}
    return Trainer(model, loader, "17ba", accumulation_steps=growing, callbacks=callbacks)


@pytest.mark.parametrize(
    ("kind", "workers"), [(Plain, 0), (Plain, 2), (Stated, 0), (StatedShards, 2)]
)
def test_a_run_on_a_stream_continues_with_the_same_bits(kind, workers, tmp_path):
    whole = training(kind, workers, CheckpointSaver(tmp_path, "1ba", keep=20))
    whole.fit()
    for step in (3, 11):
        path = tmp_path / f"step_{step:09d}"
        second = training(kind, workers)
        second.load(path)
        second.fit()
        assert all(map(torch.equal, second.model.parameters(), whole.model.parameters())), step
    if kind is StatedShards:
        with pytest.raises(ValueError, match=r"1 ranks x 2 workers, here over 1 ranks x 1 workers"):
            training(kind, 1).load(path)
