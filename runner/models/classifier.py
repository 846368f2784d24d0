"""A classification network with its loss, as a loop takes it that has no separate criterion."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Wraps a network that turns inputs into logits; a batch is the pair (inputs, targets).

    The protocol of Composer's `ComposerClassifier`: `forward` takes the whole batch, `loss` takes
    what `forward` returned and the batch again.

    Args:
        module: inputs [B, ...] to logits [B, num_classes, ...].
        num_classes: width of the logits, checked against them; None takes any.
    """

    def __init__(self, module: nn.Module, num_classes: int | None = None) -> None:
        super().__init__()
        self.module = module
        self.num_classes = num_classes

    def forward(self, batch: tuple[Any, Tensor]) -> Tensor:
        """Logits of the batch's inputs; its targets are not looked at."""
        inputs, _ = batch
        logits: Tensor = self.module(inputs)
        return logits

    def loss(self, outputs: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        """Mean cross entropy of the logits against the batch's targets, a scalar.

        Raises:
            ValueError: when the logits are not `num_classes` wide.
        """
        _, targets = batch
        if self.num_classes is not None and outputs.shape[1] != self.num_classes:
            raise ValueError(
                f"the network gives {outputs.shape[1]} logits a sample, num_classes is "
                f"{self.num_classes}"
            )
        return F.cross_entropy(outputs, targets)
