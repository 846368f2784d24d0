"""A model that fails at given steps, each time that a run is started."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from runner.models.cnn import DigitsCNN


class Failing(DigitsCNN):
    """Raises, exits or is killed on one rank, at one step in each attempt.

    Args:
        fault: ``raise``, ``kill`` (SIGKILL to itself), ``exit``, or ``none``.
        rank: where.
        steps: the step of the first attempt, of the second, and so on; none in later attempts.
    """

    def __init__(
        self,
        num_classes: int,
        width: int,
        fault: str = "none",
        rank: int = 0,
        steps: Sequence[int] = (),
    ) -> None:
        super().__init__(num_classes=num_classes, width=width)
        self.fault, self.rank, self.steps = fault, rank, list(steps)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and images.device.type != "meta":
            self.step += 1
            here = int(os.environ.get("RANK", 0)) == self.rank
            struck = Path(os.environ["RUNNER_OUTPUTS"], "struck")
            before = len(struck.read_text()) if struck.exists() else 0
            if here and self.fault != "none" and self.steps[before:][:1] == [int(self.step)]:
                with struck.open("a") as file:
                    file.write("x")
                if self.fault == "raise":
                    raise RuntimeError("planted fault")
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.exit(3)
        return super().forward(images)
