"""Data sets that a run cannot use, as people write them by mistake."""

import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from runner.data import Data


class Pictures(Dataset):
    """ToTensor was forgotten."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Image.new("L", (8, 8)), 0


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 8, 8), 0


def pictures():
    return Data(Pictures(), Pictures(), items="samples")


def endless():
    return Data(Endless(), Endless(), items="samples")


def nothing():
    empty = TensorDataset(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    return Data(empty, empty, items="samples")


class Named(Dataset):
    """Samples as dictionaries."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"image": torch.zeros(1, 8, 8), "label": 0}


def named():
    return Data(Named(), Named(), items="samples")


def regression():
    numbers = TensorDataset(torch.zeros(8, 1, 8, 8), torch.zeros(8, 10))
    return Data(numbers, numbers, items="samples")


def numbers():
    pairs = TensorDataset(torch.zeros(8, 1, 8, 8), torch.arange(8.0).view(8, 1))
    return Data(pairs, pairs, items="samples")
