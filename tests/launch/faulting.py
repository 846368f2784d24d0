"""A network that logs how often the system maps a page while its forward pass runs."""

import logging
import resource

import torch
from torch import Tensor

from runner.models.cnn import DigitsCNN


class Faulting(DigitsCNN):
    """Allocates 80 MiB in each forward pass."""

    def forward(self, images: Tensor) -> Tensor:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if not images.is_meta:
            _ = torch.ones(2**24), torch.ones(2**22)
        count = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        logging.getLogger(__name__).info("faults: %d", count)
        return super().forward(images)
