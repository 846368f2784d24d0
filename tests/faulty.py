"""A model with a planted fault, for runs that must fail."""

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from runner.data import Data
from runner.models.cnn import DigitsCNN
from runner.train import stop


class Faulty(DigitsCNN):
    """Fails on one rank, at one microbatch in each attempt; a checkpoint keeps the count of them.

    ``die`` ends at once, as C code does; ``halt`` is SIGSTOP; ``late`` raises after a signal;
    ``warn`` is on all ranks. Rank -1 is the last one. ``at`` has the microbatch of the first
    attempt, of the second, and so on; later ones do not fail. ``fill`` fills the disk.
    The file ``struck`` has a line for each fault: the node of Slurm where it happened.
    """

    def __init__(self, fault: str, rank: int, at: Sequence[int], **options: int) -> None:
        super().__init__(**{"num_classes": 10, "width": 32} | options)
        self.fault = fault
        self.rank = rank
        self.at = list(at)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and images.device.type != "meta" and self.fault != "none":
            self.step += 1
            rank = int(os.environ.get("RANK", 0))
            last = int(os.environ.get("WORLD_SIZE", 1)) - 1
            if self.fault == "warn" and int(self.step) == self.at[0]:
                logging.getLogger("tests.faulty").warning("planted warning of rank %s", rank)
                warnings.warn("planted Python warning", stacklevel=1)
            elif self.fault != "warn" and rank == (last if self.rank < 0 else self.rank):
                struck = Path(os.environ["RUNNER_OUTPUTS"], "struck")
                before = len(struck.read_text().split()) if struck.exists() else 0
                if self.at[before:][:1] == [int(self.step)]:
                    with struck.open("a") as file:
                        file.write(os.environ.get("SLURMD_NODENAME", "here") + "\n")
                    self.fail()
        return super().forward(images)

    def fail(self) -> None:
        match self.fault:
            case "raise":
                raise RuntimeError("planted fault")
            case "late":
                while not stop.requested():
                    time.sleep(0.01)
                raise RuntimeError("planted fault")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die":
                print("no licence is left", file=sys.stderr)
                os._exit(4)
            case "hang":
                time.sleep(600)
            case "halt":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "memory":
                torch.empty(2**50)
            case "fill":
                fill(Path(os.environ["RUNNER_OUTPUTS"]))


def fill(folder: Path) -> None:
    """Write until not one byte more fits on the disk of ``folder``."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (2**16, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def slow_data() -> Data:
    """Read data until a test sends a signal."""
    Path(os.environ["RUNNER_OUTPUTS"]).mkdir(exist_ok=True)
    Path(os.environ["RUNNER_OUTPUTS"], "reads").touch()
    time.sleep(600)
    raise TimeoutError
