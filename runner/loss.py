"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

Items are samples, or the tokens that are not ignored. A mean of means would weigh a short
microbatch, or one full of ignored tokens, like a full one; so a microbatch contributes its *sum*,
and the window's items divide it, before the backward pass and therefore before clipping.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.dataset import IGNORED

Criterion = Callable[[Any, Any], Tensor]


class WindowLoss:
    """Sums and counts what a criterion averages.

    Args:
        model: the user's model. One with a method ``loss(outputs, batch)`` is called with the whole
            batch and needs no criterion.
        criterion: mean loss of (outputs, targets); cross entropy over the last dimension of the
            outputs by default. Cross entropy and negative log-likelihood are summed exactly; of any
            other criterion the mean is taken times the items.
    """

    def __init__(self, model: nn.Module, criterion: Criterion | None = None) -> None:
        own = getattr(model, "loss", None)
        self.takes_batch = criterion is None and inspect.ismethod(own)
        given = getattr(criterion, "keywords", {}).get("ignore_index", IGNORED)
        self.ignored = getattr(criterion, "ignore_index", given)
        if getattr(criterion, "reduction", "mean") != "mean":
            raise ValueError("the criterion must be a mean: Trainer weighs it by the items itself")
        self._sums = False
        if self.takes_batch:
            assert callable(own)
            self._criterion: Criterion = own
        elif criterion is None:
            self._criterion, self._sums = _cross_entropy_sum, True
        elif (
            isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
            and criterion.reduction == "mean"
            and criterion.weight is None
        ):
            self._criterion, self._sums = copy.copy(criterion), True
            self._criterion.reduction = "sum"
        else:
            self._criterion = criterion

    def items(self, batch: Any) -> tuple[int, int, int]:
        """Items, samples and tokens of a microbatch; 0 tokens where targets are not sequences."""
        targets = batch[1]
        samples = len(targets)
        if targets.is_floating_point():
            return samples, samples, 0
        if targets.device.type == "cpu":
            counted = int(np.count_nonzero(targets.numpy() != self.ignored))
        else:
            counted = int((targets != self.ignored).sum())
        return counted, samples, counted if targets.ndim > 1 else 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs: logits where it returns a structure that has them."""
        outputs = model(batch) if self.takes_batch else model(batch[0])
        return getattr(outputs, "logits", outputs)

    def sum(self, outputs: Any, batch: Any, items: int) -> Tensor:
        """Σ item losses of a microbatch that holds ``items``; 0, with a gradient, for none."""
        if items == 0:
            nothing: Tensor = outputs.sum() * 0.0
            return nothing
        loss = self._criterion(outputs, batch if self.takes_batch else batch[1])
        summed: Tensor = loss if self._sums else loss * items
        return summed

    def correct(self, outputs: Any, batch: Any) -> int | None:
        """Items whose largest logit is the target's; None where that has no meaning."""
        targets = batch[1]
        if not isinstance(outputs, Tensor) or targets.is_floating_point():
            return None
        if outputs.shape[:-1] != targets.shape:
            return None
        right = (outputs.argmax(-1) == targets) & (targets != self.ignored)
        return int(right.sum())


def _cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits ``(..., classes)`` and targets ``(...)``, summed."""
    return torch.nn.functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
