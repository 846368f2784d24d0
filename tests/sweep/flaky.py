"""A model that fails, or whose loss is no number, in the trials it is told to."""

import torch

from runner.models.cnn import DigitsCNN


class Flaky(DigitsCNN):
    """Raises in one trial and returns NaN in another.

    Args:
        trial: the number of this run.
        fails: the run that raises.
        nan: the run whose outputs are NaN.
    """

    def __init__(
        self, num_classes: int, width: int, trial: int = -1, fails: int = -2, nan: int = -2
    ) -> None:
        super().__init__(num_classes=num_classes, width=width)
        self.fails, self.nan = trial == fails, trial == nan

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.fails and images.device.type != "meta":
            raise RuntimeError("planted fault")
        made = super().forward(images)
        return made * float("nan") if self.nan else made
