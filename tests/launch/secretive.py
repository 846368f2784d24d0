"""A model that takes secrets, and may fail with a message that quotes them."""

import logging
from pathlib import Path

import torch

from runner.models.cnn import DigitsCNN


class Secretive(DigitsCNN):
    """DigitsCNN with arguments that a user would not want to see in a record.

    Args:
        num_classes: number of classes.
        width: number of channels.
        fails: whether the first forward pass raises.
        fails_once: file that is made by the run that fails; with it there, no run fails.
        others: the secrets, under any names.
    """

    def __init__(
        self,
        num_classes: int,
        width: int,
        fails: bool = False,
        fails_once: str = "",
        **others: object,
    ) -> None:
        super().__init__(num_classes=num_classes, width=width)
        self.fails, self.fails_once, self.others = fails, fails_once, others

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.device.type != "meta":
            logging.getLogger("model").warning("loaded with %s", self.others)
            if self.fails_once and not Path(self.fails_once).exists():
                Path(self.fails_once).touch()
                raise RuntimeError("once")
            if "***" in self.others.values():
                raise RuntimeError("a mask is no secret")
            if self.fails:
                raise RuntimeError(f"access denied: {self.others}")
        return super().forward(images)
