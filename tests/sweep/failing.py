"""A network that raises or is killed in the runs for which a file says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from runner.models import DigitsCNN


class Net(DigitsCNN):
    """Fails while the file of its seed exists.

    Args:
        marks: folder of the files; their text is ``raise`` or ``kill``.
        seed: seed of the run.
    """

    def __init__(self, marks: str, seed: int, **options: int) -> None:
        super().__init__(**options)
        self.mark = Path(marks, str(seed))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not images.is_meta and self.mark.exists():
            if self.mark.read_text() == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this seed fails")
        return super().forward(images)
