"""Models and data of a user: dictionaries, regression, two inputs, a data set and a stream."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from runner.data import Data


class Tagger(nn.Module):
    """Takes a dictionary, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens, labels=None):
        logits = self.head(self.embed(tokens))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 2)
        self.right = nn.Linear(8, 2)

    def forward(self, left, right):
        return self.left(left) - self.right(right)


class Samples(Dataset):
    def __init__(self, kind: str, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        x, partners = torch.randn(2, count, 8, generator=draw)
        tokens = torch.randint(50, (count, 12), generator=draw)
        labels = (tokens % 3).masked_fill(tokens > 40, -100)
        self.samples = {
            "tags": [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)],
            "line": [{"x": a, "y": a[:1] - a[1:2]} for a in x],
            "pairs": [(a, b, (a.sum() > b.sum()).long()) for a, b in zip(x, partners, strict=True)],
        }[kind]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


def made(kind: str) -> Data:
    return Data(train=Samples(kind, 500, 0), test=Samples(kind, 100, 1), items="samples")


class Flow(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.inputs = torch.randn(samples, 20, generator=torch.Generator().manual_seed(0))

    def __iter__(self):
        return ((inputs, (inputs.sum() > 0).long()) for inputs in self.inputs)
