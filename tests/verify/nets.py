"""Models of other people, for verification: named by ``_target_``."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset


class Normed(nn.Module):  # A convolution, batch norm, and a linear head over [B, 1, 8, 8]
    def __init__(self, chance=0.0, spare=False):
        super().__init__()
        self.chance = chance
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 10)
        if spare:
            self.spare = nn.Linear(3, 3)  # takes no part

    def forward(self, images):
        # Under a name that nobody could know it by.
        return self.head(F.dropout(self.body(images), self.chance, self.training))


class Single(nn.Linear):  # A model that computes in float32 alone
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, images):
        return super().forward(images.flatten(1).to(torch.float32))


class Chain(nn.Sequential):  # Layers that a pipeline can be cut between, batch norm among them
    def __init__(self):
        body = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU()
        super().__init__(nn.Flatten(), *body, nn.Linear(12, 10))


class Constant(nn.Module):  # Logits that its weight has no part in
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, images):
        return images.flatten(1)[:, :10] + 0.0 * self.weight


class Broken(Constant):  # Logits that are not finite, and neither is the gradient of its weight
    def forward(self, images):
        return images.flatten(1)[:, :10] * self.weight * math.nan


class Images(IterableDataset):  # A stream of 100 images [C, 8, 8] with one of ten classes
    def __init__(self, channels=1):
        self.size = channels, 8, 8

    def __iter__(self):
        draw = torch.Generator().manual_seed(5)
        yield from ((torch.randn(self.size, generator=draw), number % 10) for number in range(100))


class Tempered(nn.Module):  # Cross entropy at a temperature
    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", torch.tensor(2.0))

    def forward(self, logits, targets):
        return F.cross_entropy(logits * self.inverse, targets)
