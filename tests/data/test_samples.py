"""A sample with random augmentation depends on seed, epoch and index alone."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from runner.booster.plugin import SinglePlugin
from runner.data.dataset import own
from runner.data.order import RandomState
from runner.data.samples import SeededSamples

SAMPLES = 14


class Noisy(Dataset):
    """Numbered samples with noise of all global generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(2) + random.random() + np.random.normal()
        return torch.cat([torch.tensor([float(index)]), noise]), index


class Listed(Noisy):
    """Reads a batch as a list."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Collated(Noisy):
    """Reads a batch as tensors."""

    def __getitems__(self, indices):
        inputs, targets = zip(*[self[index] for index in indices], strict=True)
        return torch.stack(inputs), torch.tensor(targets)


class Jitter:
    def __init__(self):
        self.numbers = np.random.default_rng(1)


class WithGenerators(Noisy):
    """Draws from generators that it and its transform hold."""

    def __init__(self):
        self.python = random.Random(1)
        self.torch = torch.Generator()
        self.transform = Jitter()

    def __getitem__(self, index):
        noise = torch.rand(2, generator=self.torch) + self.python.random()
        noise = noise + self.transform.numbers.random()
        return torch.cat([torch.tensor([float(index)]), noise]), index


class Rarely(Noisy):
    """Draws for one sample only."""

    def __getitem__(self, index):
        inputs = torch.full((3,), float(index))
        return (inputs + torch.rand(()) if index == 5 else inputs), index


def part_of_own():
    return own(Noisy(), eval_fraction=0.2).train


def samples_of(dataset, batch_size, workers=0, first_epoch=0):
    """Return the inputs of each sample, by index and epoch."""
    loader = SinglePlugin().prepare_dataloader(
        dataset, batch_size, shuffle=True, seed=5, num_workers=workers
    )
    samples = {}
    for epoch in range(first_epoch, 2):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, indices in loader:
            rows = zip(indices.tolist(), inputs.tolist(), strict=True)
            samples |= {(epoch, index): row for index, row in rows}
    return samples


@pytest.mark.parametrize("make", [Noisy, Listed, Collated, WithGenerators, Rarely, part_of_own])
def test_a_sample_is_the_same_however_it_is_read(make):
    expected = samples_of(make(), 4)
    for batch_size, workers in ((3, 0), (5, 1), (2, 2)):
        random.seed(batch_size)
        np.random.seed(batch_size)
        torch.manual_seed(batch_size)
        assert samples_of(make(), batch_size, workers) == expected
    assert samples_of(make(), 4, first_epoch=1).items() <= expected.items()
    if make is not Rarely:
        assert len({row[1] for row in expected.values()}) == len(expected)


@pytest.mark.parametrize("make", [Noisy, Listed, WithGenerators, Rarely])
def test_reading_samples_leaves_the_generators_of_the_training_as_they_were(make):
    loader = SinglePlugin().prepare_dataloader(make(), 4)
    batches = iter(loader)  # draws a seed for workers, as in torch
    before = RandomState.now({}).state_dict()
    for _ in batches:
        pass
    after = RandomState.now({}).state_dict()
    assert torch.equal(after.pop("cpu"), before.pop("cpu"))
    assert after == before


def test_a_data_set_that_draws_nothing_is_read_a_batch_at_a_time():
    class Whole(Noisy):
        reads = 0

        def __getitems__(self, indices):
            self.reads += 1
            return torch.zeros(len(indices), 3), torch.tensor(indices)

    dataset = Whole()
    assert len(samples_of(dataset, 4)) == 2 * SAMPLES
    assert dataset.reads == 2 * 4
    in_memory = TensorDataset(torch.zeros(8, 3), torch.arange(8))
    for tensors in (in_memory, own(in_memory).train):
        loader = SinglePlugin().prepare_dataloader(tensors, 4)
        assert not isinstance(loader.dataset, SeededSamples)


def test_attributes_of_the_data_set_are_found_through_the_loader():
    class Named(Noisy):
        classes = ("cat", "dog")

    loader = SinglePlugin().prepare_dataloader(Named(), 4)
    assert loader.dataset.classes == ("cat", "dog")
    assert len(loader.dataset) == SAMPLES
    assert not hasattr(loader.dataset, "targets")
