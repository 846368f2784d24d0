"""Targets that refuse arguments, each in a way of its own."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn


class Optimizer(torch.optim.SGD):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False):
        if lr < 0:
            raise ValueError("lr is negative")
        if momentum < 0:
            raise ValueError("momentum is negative")
        super().__init__(params, lr, momentum)


class Net(nn.Module):
    def __init__(
        self,
        width: int = 4,
        scale: float | None = None,
        kind: Literal["plain", "gated"] = "plain",
        widths: Sequence[int] = (),
        bias: bool = True,
        act: nn.Module | None = None,
        free=None,
    ):
        super().__init__()
        if free == "no":
            raise RuntimeError("I will not")


class Ramp(nn.Linear):
    """Reads a tensor while it is made, which the meta device cannot."""

    def __init__(self):
        super().__init__(64, 10)
        self.steps = torch.linspace(0, 1, 64).numpy()

    def forward(self, images):
        return super().forward(images.flatten(1))


def pair(first: int, second: int) -> object:
    """Both must be given."""
    if first > second:
        raise ValueError(f"second must be at least first, not {second} and {first}")
    return first, second


def listed(params, lr, **others):
    """Return no optimizer."""
    return list(params)


def silent(first: int, second: int) -> object:
    raise ValueError("no")


class Counting(torch.optim.SGD):
    """Its rate falls with the number of steps, which it counts by itself."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)
