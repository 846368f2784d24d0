"""Networks of recipes and tests, each in its own file, and `Classifier`, which adds a loss to any.

`conf/model/*.yaml` names them in full (`runner.models.gpt.GPT`), as it does classes of torchvision
or timm, or your own.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Add a cross-entropy loss to a network; a batch is a pair (inputs, targets).

    Follows the protocol of Composer's `ComposerClassifier`: `forward` takes the whole batch, `loss`
    takes the output of `forward` and the batch.

    Args:
        module: network that maps inputs [B, ...] to logits [B, num_classes, ...].
        num_classes: expected number of logits; None for any.
    """

    def __init__(self, module: nn.Module, num_classes: int | None = None) -> None:
        super().__init__()
        self.module = module
        self.num_classes = num_classes

    def forward(self, batch: tuple[Any, Tensor]) -> Tensor:
        """Return the logits of the batch's inputs."""
        inputs, _ = batch
        logits: Tensor = self.module(inputs)
        return logits

    def loss(self, outputs: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        """Return the mean cross entropy of the logits against the batch's targets, a scalar.

        Raises:
            ValueError: the number of logits is not `num_classes`.
        """
        _, targets = batch
        if self.num_classes is not None and outputs.shape[1] != self.num_classes:
            raise ValueError(
                f"the network gives {outputs.shape[1]} logits a sample, num_classes is "
                f"{self.num_classes}"
            )
        return F.cross_entropy(outputs, targets)
