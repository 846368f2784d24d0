"""Every step reads the same samples, however its batch is split over ranks and microbatches."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

from runner.data import PartitionedBatches, TensorPairs, collate_pairs

LENGTHS = (1, 2, 7, 8, 9, 23, 31, 32, 33, 1437)


def sampler_of(length, batch_size, rank=0, world_size=1, *, shuffle=True, drop_last=False, seed=0):
    return PartitionedBatches(length, batch_size, rank, world_size, shuffle, drop_last, seed)


def ranks(length, batch_size, world, **options):
    return [sampler_of(length, batch_size, rank, world, **options) for rank in range(world)]


def real_batches(sampler):
    """What a rank reads in an epoch, with nothing where its part is weightless."""
    return [[] if sampler.weightless(m) else list(batch) for m, batch in enumerate(sampler)]


def steps_of(length, batch_size, world, steps, epoch):
    """The samples of each optimizer step of an epoch, over all ranks and microbatches."""
    samplers = ranks(length, batch_size, world)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(chain(*parts)) for parts in zip(*map(real_batches, samplers), strict=True)]
    return [
        sorted(chain(*batches[first : first + steps])) for first in range(0, len(batches), steps)
    ]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_step_reads_the_same_samples_however_its_batch_is_split(length):
    for epoch in (0, 3):
        whole = steps_of(length, 8, 1, 1, epoch)
        assert sorted(chain(*whole)) == list(range(length))
        for split in ((4, 2, 1), (2, 4, 1), (1, 8, 1), (2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 4, 2)):
            assert steps_of(length, *split, epoch) == whole, split
    # The parts of ranks in a row are the slice of one process, the longer ones first.
    for world in (2, 3, 5):
        whole = list(sampler_of(length, 4 * world))
        samplers = ranks(length, 4, world)
        assert {len(sampler) for sampler in samplers} == {len(whole)}
        for number, parts in enumerate(zip(*map(real_batches, samplers), strict=True)):
            assert list(chain(*parts)) == whole[number]
            assert samplers[0].parts(number) == [*parts]
            sizes = list(map(len, parts))
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1


def test_each_epoch_of_each_seed_has_an_order_of_its_own():
    def order(seed, epoch):
        sampler = sampler_of(100, 8, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(orders.count(batches) == 1 for batches in orders)  # not just of their sum


def test_an_epoch_that_runs_keeps_its_order():
    sampler = sampler_of(100, 8)
    running = iter(sampler)
    first = next(running)
    sampler.set_epoch(2)
    assert [first, *running] == list(sampler_of(100, 8))


def test_without_a_shuffle_samples_are_in_a_row():
    sampler = sampler_of(5, 2, shuffle=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("length", "kept"), [(16, 2), (17, 2), (23, 2), (7, 0), (0, 0)])
def test_a_batch_that_is_not_full_can_be_left_out(length, kept):
    for sampler in ranks(length, 4, 2, drop_last=True):
        assert [len(batch) for batch in sampler] == [4] * kept
        assert len(sampler) == kept


@pytest.mark.parametrize("workers", [0, 1])
def test_a_start_skips_microbatches_of_one_epoch(workers):
    data = TensorPairs(torch.arange(50.0), torch.arange(50))
    sampler = sampler_of(50, 4, rank=1, world_size=2)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate_pairs, num_workers=workers)
    whole = list(map(list, sampler))
    for start in (0, 5, 7):
        sampler.set_start(start)
        assert len(sampler) == len(loader) == 7, "a start leaves the length"
        assert [targets.tolist() for _, targets in loader] == whole[start:]
    assert [targets.tolist() for _, targets in loader] == whole


def test_an_empty_part_holds_a_weightless_stand_in():
    samplers = ranks(10, 2, 4)
    first, second, *empty = samplers[0].parts(1)
    assert empty == [[], []]
    assert [list(sampler)[1] for sampler in samplers] == [first, second, first, first]
    assert [sampler.weightless(1) for sampler in samplers] == [False, False, True, True]


@pytest.mark.parametrize("sizes", [(-1, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1), (1, 1, -1, 2)])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"at least|is not one of"):
        sampler_of(*sizes)


def test_a_start_after_the_last_microbatch_is_refused():
    with pytest.raises(ValueError, match="microbatch 4 is not one of 0 to 3"):
        sampler_of(9, 4).set_start(4)
