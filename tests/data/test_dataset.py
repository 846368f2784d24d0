import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from runner.data import DataUnavailable, TensorPairs, collate_pairs


def pairs(count: int = 10) -> TensorPairs:
    return TensorPairs(torch.arange(count * 3.0).view(count, 3), torch.arange(count))


def test_a_batch_holds_the_samples_of_its_indices_in_their_order():
    data = pairs()
    inputs, targets = data.__getitems__([7, 2, 2])
    assert targets.tolist() == [7, 2, 2]
    for row, index in zip(inputs, [7, 2, 2], strict=True):
        assert torch.equal(row, data[index][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_what_collating_single_samples_gives(workers):
    class OneByOne(Dataset):
        """The same samples without `__getitems__`."""

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index):
            return pairs()[index]

    batches = [[3, 1, 4], [1, 5], [9]]
    whole = DataLoader(
        pairs(), batch_sampler=batches, collate_fn=collate_pairs, num_workers=workers
    )
    single = DataLoader(OneByOne(), batch_sampler=batches, collate_fn=collate_pairs)
    for (x, y), (x_single, y_single) in zip(whole, single, strict=True):
        assert torch.equal(x, x_single)
        assert torch.equal(y, y_single)


def test_inputs_and_targets_must_pair():
    with pytest.raises(ValueError, match="3 inputs do not pair with 2 targets"):
        TensorPairs(torch.zeros(3, 1), torch.zeros(2))


def test_missing_data_is_reported_across_processes():
    error = pickle.loads(pickle.dumps(DataUnavailable("data.root is empty")))
    assert isinstance(error, DataUnavailable)
    assert str(error) == "data.root is empty"
