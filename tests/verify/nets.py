"""Models of other people, for verification: named by ``_target_``."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from runner.data import Data
from runner.data.synthetic import synthetic


class Normed(nn.Module):
    """A convolution, batch norm, and a linear head over [B, 1, 8, 8]."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__()
        self.chance = chance
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(images)
        # Under a name that nobody could know it by.
        return self.head(nn.functional.dropout(hidden, self.chance, self.training))


class Spare(Normed):
    """The same, and a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Single(nn.Module):
    """A model that computes in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1).to(torch.float32))


class Chain(nn.Sequential):
    """Layers that a pipeline can be cut between, batch norm among them."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)
        )


class Constant(nn.Module):
    """Logits that its weight has no part in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :10] + 0.0 * self.weight


class Broken(Constant):
    """Logits that are not finite, and neither is the gradient of its weight."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :10] * self.weight * math.nan


class Fails(Constant):
    """A model that fails where it is not merely tried out."""

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_meta:
            dtype = {"images": images.dtype}["imagse"]
            return images.to(dtype)
        return super().forward(images)


class Noisy(Dataset[Any]):
    """Samples that are not the same when they are read again."""

    def __init__(self, clean: Any) -> None:
        self.clean = clean

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.clean[index]
        return inputs + torch.randn_like(inputs), target


class Images(IterableDataset[Any]):
    """A stream of 100 images [C, 8, 8] with one of ten classes."""

    def __init__(self, channels: int = 1) -> None:
        self.channels = channels

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        draw = torch.Generator().manual_seed(5)
        for number in range(100):
            yield torch.randn(self.channels, 8, 8, generator=draw), number % 10


class Tempered(nn.Module):
    """Cross entropy at a temperature that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inverse = nn.Parameter(torch.tensor(2.0))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits * self.inverse, targets)


def noisy(**options: Any) -> Data:
    """``runner.data.synthetic`` with noise that is drawn anew for each sample."""
    data = synthetic(**options)
    return Data(Noisy(data.train), data.test, data.items)
