"""A model with a planted fault, for runs that must fail."""

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from runner.data import Data
from runner.data.digits import digits
from runner.models.cnn import DigitsCNN
from runner.train import stop


class Faulty(DigitsCNN):
    """Raises, dies or hangs on one rank, in its n-th forward pass.

    Args:
        fault: ``raise``, ``kill`` (SIGKILL to itself), ``exit``, ``exit_0``, ``exit_none``,
            ``die`` (at once, as C code does), ``hang``, ``loop``, ``halt`` (SIGSTOP to itself),
            ``late`` (raises after a signal), ``apart`` (waits for a message that nobody sends),
            ``memory``, ``slow`` (each forward pass of all ranks), ``none``, or ``warn`` (all
            ranks).
        rank: where.
        at: in which forward pass.
    """

    def __init__(
        self, num_classes: int, width: int, fault: str = "raise", rank: int = 0, at: int = 5
    ) -> None:
        super().__init__(num_classes=num_classes, width=width)
        self.fault, self.rank, self.at, self.seen = fault, rank, at, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += images.device.type != "meta"
        if self.fault == "slow" and images.device.type != "meta":
            time.sleep(0.2)
        if self.seen == self.at and self.fault == "warn":
            rank = os.environ.get("RANK", 0)
            logging.getLogger("tests.faulty").warning("planted warning of rank %s", rank)
            warnings.warn("planted Python warning", stacklevel=1)
        elif self.seen == self.at and int(os.environ.get("RANK", 0)) == self.rank:
            Path(os.environ["RUNNER_OUTPUTS"], "struck").touch()  # its time is that of the fault
            match self.fault:
                case "raise":
                    raise RuntimeError("planted fault")
                case "late":
                    while not stop.requested():
                        time.sleep(0.01)
                    raise RuntimeError("planted fault")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    sys.exit(3)
                case "exit_0":
                    sys.exit(0)
                case "exit_none":
                    sys.exit()
                case "die":
                    print("no licence is left", file=sys.stderr)
                    os._exit(4)
                case "hang":
                    time.sleep(600)
                case "loop":
                    while True:
                        pass
                case "halt":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "apart":
                    torch.distributed.recv(torch.zeros(1), src=1 - self.rank)
                case "memory":
                    torch.empty(2**50)
        return super().forward(images)


def slow_data(test_fraction: float, seed: int, seconds: float = 6.0) -> Data:
    """The digits, after some seconds."""
    Path(os.environ["RUNNER_OUTPUTS"]).mkdir(exist_ok=True)
    Path(os.environ["RUNNER_OUTPUTS"], "reads").touch()
    time.sleep(seconds)
    return digits(test_fraction, seed)
