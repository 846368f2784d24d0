"""The network of a run, which notes when and with how many threads it computes."""

from __future__ import annotations

import os
import time

import torch

from runner.models import DigitsCNN as Plain


class CNN(Plain):
    def __init__(self, notes: str, **options: int) -> None:
        super().__init__(**options)
        self.notes = notes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not inputs.is_meta:
            with open(self.notes, "a") as file:
                file.write(f"{time.time()} {os.getpid()} {torch.get_num_threads()}\n")
        return super().forward(inputs)
