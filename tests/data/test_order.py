from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

from runner.data import EmptyPart, PartitionedBatches, TensorPairs, collate_pairs


def sampler_of(length, batch_size, rank=0, world_size=1, *, shuffle=True, drop_last=False, seed=0):
    return PartitionedBatches(length, batch_size, rank, world_size, shuffle, drop_last, seed)


def ranks(length, batch_size, world_size, **options):
    return [
        sampler_of(length, batch_size, rank, world_size, **options) for rank in range(world_size)
    ]


def real_batches(sampler):
    """What a rank reads in an epoch, with nothing where its part is weightless."""
    return [[] if sampler.weightless(m) else list(batch) for m, batch in enumerate(sampler)]


def windows(length, batch_size, world_size, steps, epoch=0):
    """The samples of each optimizer step of an epoch, over all ranks and microbatches."""
    samplers = ranks(length, batch_size, world_size)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    microbatches = [list(chain(*parts)) for parts in zip(*map(real_batches, samplers), strict=True)]
    return [
        sorted(chain(*microbatches[start : start + steps]))
        for start in range(0, len(microbatches), steps)
    ]


LENGTHS = [1, 2, 7, 8, 9, 23, 31, 32, 33, 1437]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("batch_size", "world_size", "steps"),
    [(4, 2, 1), (2, 4, 1), (1, 8, 1), (2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 4, 2)],
)
def test_a_step_reads_the_same_samples_however_its_batch_is_split(
    length, batch_size, world_size, steps
):
    for epoch in (0, 3):
        assert windows(length, batch_size, world_size, steps, epoch) == windows(
            length, 8, 1, 1, epoch
        )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_parts_of_the_ranks_in_a_row_are_the_slice_of_one_process(length, world_size):
    whole = list(sampler_of(length, 4 * world_size))
    samplers = ranks(length, 4, world_size)
    for microbatch, batch in enumerate(whole):
        parts = [real_batches(sampler)[microbatch] for sampler in samplers]
        assert list(chain(*parts)) == batch
        assert samplers[0].parts(microbatch) == parts
    assert all(len(sampler) == len(whole) for sampler in samplers)


def test_parts_are_balanced_with_the_longer_ones_first():
    # Microbatches of 4 ranks times 4: the last holds 22 - 16 = 6 samples.
    sampler = sampler_of(22, 4, world_size=4)
    assert [len(part) for part in sampler.parts(0)] == [4, 4, 4, 4]
    assert [len(part) for part in sampler.parts(1)] == [2, 2, 1, 1]


def test_a_rank_without_a_sample_gets_one_of_the_microbatch_marked_weightless():
    samplers = ranks(9, 4, 2)
    assert samplers[0].parts(1)[1] == []
    batch = list(samplers[1])[1]
    assert isinstance(batch, EmptyPart)
    assert batch.weightless
    assert batch == samplers[0].parts(1)[0]
    assert [sampler.weightless(1) for sampler in samplers] == [False, True]
    assert not samplers[1].weightless(0)


def test_an_epoch_reads_every_sample_once_and_epochs_differ():
    sampler = sampler_of(100, 8)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(list(chain(*sampler)))
        assert sorted(orders[-1]) == list(range(100))
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_order_is_that_of_seed_and_epoch_alone():
    def order(seed, epoch):
        sampler = sampler_of(100, 8, seed=seed)
        list(sampler)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    # Adding the two would make these pairs the same.
    assert order(0, 1) != order(1, 0)
    assert order(1, 2) != order(2, 1)


def test_without_shuffle_samples_keep_their_order_in_every_epoch():
    sampler = sampler_of(5, 2, shuffle=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("length", "kept"), [(16, 2), (17, 2), (23, 2), (7, 0), (0, 0)])
def test_drop_last_leaves_whole_microbatches_only(length, kept):
    for sampler in ranks(length, 4, 2, drop_last=True):
        batches = list(sampler)
        assert len(batches) == len(sampler) == kept
        assert all(len(batch) == 4 for batch in batches)


def test_a_start_skips_microbatches_once_and_leaves_the_length():
    sampler = sampler_of(50, 8)
    whole = list(sampler)
    sampler.set_start(5)
    assert len(sampler) == 7
    assert list(sampler) == whole[5:]
    assert list(sampler) == whole
    sampler.set_start(7)
    assert list(sampler) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_starts_there_with_and_without_worker_processes(workers):
    data = TensorPairs(torch.arange(50.0), torch.arange(50))
    loader = DataLoader(data, batch_sampler=sampler_of(50, 8), num_workers=workers)
    whole = [inputs.tolist() for inputs, _ in loader]
    loader.batch_sampler.set_start(5)
    assert [inputs.tolist() for inputs, _ in loader] == whole[5:]
    assert [inputs.tolist() for inputs, _ in loader] == whole


def test_an_iteration_under_way_keeps_its_epoch():
    sampler = sampler_of(50, 8)
    whole = list(sampler)
    running = iter(sampler)
    first = next(running)
    sampler.set_epoch(1)
    assert [first, *running] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_the_dealt_samples(workers):
    data = TensorPairs(torch.arange(9.0), torch.arange(9))
    sampler = sampler_of(9, 4, rank=1, world_size=2)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate_pairs, num_workers=workers)
    assert len(loader) == 2
    assert [targets.tolist() for _, targets in loader] == [list(batch) for batch in sampler]


@pytest.mark.parametrize(
    ("length", "batch_size", "rank", "world_size"),
    [(-1, 1, 0, 1), (1, 0, 0, 1), (1, 1, 0, 0), (1, 1, 1, 1), (1, 1, -1, 2)],
)
def test_sizes_out_of_range_are_refused(length, batch_size, rank, world_size):
    with pytest.raises(ValueError, match=r"at least|is not one of"):
        sampler_of(length, batch_size, rank, world_size)


def test_a_microbatch_outside_the_epoch_is_refused():
    sampler = sampler_of(9, 4)
    with pytest.raises(IndexError, match="microbatch 3 is not one of 0 to 2"):
        sampler.parts(3)
    with pytest.raises(IndexError, match="-1"):
        sampler.weightless(-1)
    with pytest.raises(ValueError, match="microbatch 4 is not one of 0 to 3"):
        sampler.set_start(4)
