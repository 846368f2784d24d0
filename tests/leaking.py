"""A model that keeps memory and open files of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.models.cnn import DigitsCNN


class Leaking(DigitsCNN):
    """Keeps 200 kB of each forward pass, and a file of each tenth."""

    kept: list[Any] = []  # noqa: RUF012

    def forward(self, images: Tensor) -> Tensor:
        self.kept.append(torch.ones(50_000))
        if len(self.kept) % 10 == 0:
            self.kept.append(open("/dev/null"))  # noqa: SIM115
        return super().forward(images)
