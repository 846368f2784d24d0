"""Small data and networks for trainings that tests compare, and what keeps their rows."""

from typing import Any

import torch
from torch import nn

from runner.data.dataset import IGNORED, TensorPairs


class Rows:
    """A sink that keeps rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self, summary: Any, exit_code: int) -> None:
        pass


def images(samples: int, dtype: torch.dtype = torch.float32) -> TensorPairs:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 1, 8, 8, generator=generator)
    return TensorPairs(inputs.to(dtype), torch.randint(10, (samples,), generator=generator))


def tokens(samples: int) -> TensorPairs:
    """Sequences with very different shares of ignored tokens; one has no token that counts."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(16, (samples, 12), generator=generator)
    targets = torch.randint(16, (samples, 12), generator=generator)
    share = torch.rand(samples, 1, generator=generator)
    targets[torch.rand(samples, 12, generator=generator) < share] = IGNORED
    targets[3] = IGNORED
    return TensorPairs(inputs, targets)


def of_images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(3 * 49, 10),
    )
