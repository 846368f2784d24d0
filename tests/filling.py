"""A model that fills the disk of its run in one forward pass, and frees it in another."""

import os
from pathlib import Path

import torch

from runner.models.cnn import DigitsCNN


def fill(folder: Path) -> None:
    """Write until not one byte more fits on the disk of ``folder``."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


class Filling(DigitsCNN):
    """Fills the disk ``$FILLED``, if there is one, in pass ``at``."""

    def __init__(self, at: int = 0, **options: int) -> None:
        super().__init__(**{"num_classes": 10, "width": 32} | options)
        self.at, self.seen = at, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        disk, first = os.environ.get("FILLED"), not int(os.environ.get("RANK", 0))
        if disk and first and self.training and images.device.type != "meta":
            self.seen += 1
            if self.seen == self.at:
                fill(Path(disk))
        return super().forward(images)
