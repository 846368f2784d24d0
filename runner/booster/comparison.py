"""What the outputs of a model are compared with: logits with classes, numbers with numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runner.booster.batch import BatchError, not_readable, targets_of
from runner.booster.items import ItemCounter, LossForm
from runner.booster.outputs import logits_of, not_reduced, returned_loss, unreduced_loss


def shape_of(tensor: Tensor) -> str:
    """Return the shape of a tensor of samples, whose number is B: ``[B, 3]``."""
    return f"[{', '.join(['B', *(str(size) for size in tensor.shape[1:])])}]"


class Comparison:
    """Brings outputs and targets to the shapes in which a loss and metrics compare them.

    Args:
        name: how a message names the loss.
        form: how the loss is computed.
        counter: knows which labels count.
        by_element: whether the loss compares outputs and targets of one shape.
    """

    def __init__(
        self, name: str, form: LossForm, counter: ItemCounter, *, by_element: bool = False
    ) -> None:
        self._name = name
        self._form = form
        self._counter = counter
        self._by_element = by_element

    def correct(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Count items whose largest logit is the target's, and all; None without classes."""
        classified = self.classified(outputs, batch)
        if classified is None:
            return None
        logits, targets = classified
        graded = targets != self._counter.labels.ignored
        return ((logits.argmax(-1) == targets) & graded).sum(), graded.sum()

    def classified(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Return logits [..., classes] and their classes [...]; None for other targets."""
        logits = logits_of(outputs)
        targets = self._counter.labels.of(batch)
        if targets is None or not isinstance(logits, Tensor) or targets.is_floating_point():
            return None
        if targets.shape != targets_of(batch).shape:  # type: ignore[union-attr]
            logits = logits[..., :-1, :]
        return (logits, targets) if logits.shape[:-1] == targets.shape else None

    def classes(self, outputs: Any, batch: Any) -> int | None:
        """Return how many classes torch's cross entropy finds in the outputs; else None.

        None too if the targets are no numbers of classes, or the loss is in the outputs.
        """
        targets = targets_of(batch)
        if not self._form.compares_classes or targets is None or targets.is_floating_point():
            return None
        if self._form.may_return and returned_loss(outputs) is not None:
            return None
        compared, _ = self.arguments(outputs, batch)
        if not isinstance(compared, Tensor) or compared.ndim == 0:
            return None
        dim = 1 if self._form.has_criterion and compared.ndim > 1 else -1
        return int(compared.shape[dim])

    def paired(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Return outputs and targets that are numbers [...] of one shape; else None."""
        numbers = logits_of(outputs)
        targets = targets_of(batch)
        if targets is None or not isinstance(numbers, Tensor) or not targets.is_floating_point():
            return None
        if numbers.shape[1:] == (1,) and targets.ndim == 1:
            numbers = numbers[:, 0]
        return (numbers, targets) if numbers.shape == targets.shape else None

    def unequal(self, outputs: Any, batch: Any) -> str:
        """Return the shapes that a loss by element would broadcast; empty if there are none."""
        numbers = logits_of(outputs)
        targets = targets_of(batch)
        if not self._by_element or targets is None or not isinstance(numbers, Tensor):
            return ""
        if numbers.shape == targets.shape:
            return ""
        shapes = f"outputs {shape_of(numbers)} with targets {shape_of(targets)}"
        return f"{shapes}, which would be broadcast, or refused by torch"

    def arguments(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """Return what a criterion, or the method of a model, is called with.

        Raises:
            BatchError: the outputs are no logits, or the loss would broadcast them: [B, 1] with
                targets [B] would compare each output with all targets.
        """
        if self._form.takes_batch:
            return outputs, batch
        unreduced = unreduced_loss(outputs) if self._form.may_return else None
        if unreduced is not None:
            raise BatchError(not_reduced(self._name, unreduced))
        targets = targets_of(batch)
        if targets is None:
            raise not_readable(batch)
        if self._form.may_return and not isinstance(logits_of(outputs), Tensor):
            raise BatchError(
                f"{self._name} returned no loss and no logits for a batch of the form (x, y), as "
                "it was not given y: let the DataLoader yield dictionaries with the names of its "
                'forward, such as {"x": x, "targets": y} or {"input_ids": x, "labels": y}'
            )
        classified = self.classified(outputs, batch) if self._form.compares_classes else None
        if classified is None:
            unequal = self.unequal(outputs, batch)
            if unequal:
                raise BatchError(f"{self._name} compares {unequal}: give both the same shape")
            return outputs, targets
        if not self._form.has_criterion:
            return classified
        # torch's criteria have the classes in dimension 1.
        shape = classified[0].shape
        if targets.ndim > 1 and (shape[0], *shape[2:]) != targets.shape:
            return classified[0].flatten(0, -2), targets.flatten()
        return outputs, targets
