"""What the mean of a loss divides by, read off the losses of torch that a forward pass calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from runner.booster.batch import batch_size, named_parts, target_name, targets_of
from runner.data.dataset import IGNORED

CLASSES = (functional.cross_entropy, functional.nll_loss)
"""Losses whose mean is over the classes that are not ignored, or over their weights."""
_ELEMENTS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
_ALL = (*CLASSES, *_ELEMENTS, functional.ctc_loss)

SAMPLES, NOTHING, LABELS = "samples", "nothing", "labels that are not ignored"
COUNTED: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    LABELS: lambda targets, ignored: (targets != ignored) & (targets >= 0),
    "targets that are not NaN": lambda targets, _: ~torch.isnan(targets),
    "targets of 0 or more": lambda targets, _: targets >= 0,
}
"""Returns which targets a mean may be over, given the label that is ignored.

A negative label is no class: whoever does not ignore it by ``ignore_index`` has selected others.
"""


class Divisor(NamedTuple):
    """What the mean of a loss divides by.

    Attributes:
        counts: ``SAMPLES``, a name in ``COUNTED``, or ``NOTHING``: the loss is a sum.
        ignored: the label that is ignored.
        shifts: whether the first label of each sequence is compared with nothing.
        entry: name of the labels in a dictionary; None for the targets of the batch.
        weight: weight of each class, whose sum a mean divides by; None for the number of labels.
    """

    counts: str
    ignored: int = IGNORED
    shifts: bool = False
    entry: str | None = None
    weight: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the items are the targets that are not ignored and not shifted away."""
        return self.counts == LABELS and self.entry is None and self.weight is None

    def items(self, batch: Any) -> float:
        """Count the items of a batch."""
        labels = targets_of(batch)
        if self.entry is not None:
            labels = (named_parts(batch) or {}).get(self.entry)
        if self.counts in (SAMPLES, NOTHING) or labels is None:
            return batch_size(batch)
        if self.shifts:
            labels = labels[..., 1:]
        counted = COUNTED[self.counts](labels, self.ignored)
        if self.weight is None:
            return int(counted.sum())
        return float(self.weight.to(labels.device)[labels[counted]].sum(dtype=torch.float64))


class LossCall(NamedTuple):
    """One call of a loss of torch; ``value`` is what it returned."""

    function: Any
    reduction: str
    ignored: int
    weight: Tensor | None
    targets: Tensor
    value: Tensor

    @property
    def has_classes(self) -> bool:
        return self.function in CLASSES and not self.targets.is_floating_point()

    def place(self, batch: Any) -> tuple[str | None, bool] | None:
        """Return which labels of a batch are compared, and whether they are shifted.

        None if they are no labels of the batch, or a selection of them.
        """
        for name, labels in _labels_of(batch):
            if _equal(self.targets, labels):
                return name, False
            if labels.ndim < 2 or labels.is_floating_point():
                continue
            later = labels[..., 1:]
            padded = functional.pad(later, (0, 1), value=self.ignored)
            if _equal(self.targets, later) or _equal(self.targets, padded):
                return name, True
        return None

    def divisor(self, batch: Any) -> Divisor | None:
        """Return what this call divides by in terms of the batch; None if that is not clear."""
        if self.reduction == "sum":
            # Of one sample, a sum that is divided by the samples or the labels may be the same.
            return Divisor(NOTHING) if batch_size(batch) > 1 else None
        if self.function is functional.ctc_loss:
            return Divisor(SAMPLES)
        place = self.place(batch)
        if place is None:
            return None
        if not self.has_classes:
            return Divisor(SAMPLES)
        return Divisor(LABELS, self.ignored, place[1], place[0], self.weight)


class LossCalls(TorchFunctionMode):
    """Record the calls of torch's losses that return a mean or a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[LossCall] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        if function in _ALL:
            self._record(function, args, options, result)
        return result

    def _record(self, function: Any, args: Any, options: Any, value: Tensor) -> None:
        call = inspect.signature(function).bind(*args, **options)
        call.apply_defaults()
        given = call.arguments
        reduction = given["reduction"]
        old_options = given.get("size_average") is not None or given.get("reduce") is not None
        weight = given.get("weight")
        weighted_elements = weight is not None and function not in CLASSES
        if old_options or weighted_elements:
            return
        targets = given["targets"] if "targets" in given else given["target"]
        ignored = given.get("ignore_index", IGNORED)
        self.seen.append(LossCall(function, reduction, ignored, weight, targets, value))

    def divisor_of(self, loss: Tensor, batch: Any) -> Divisor | None:
        """Return what ``loss`` divides by, if it is what one of the calls returned; else None."""
        for call in self.seen:
            if call.value.ndim or float(call.value) != float(loss):
                continue
            divisor = call.divisor(batch)
            if divisor is not None:
                return divisor
        return None

    def ignored_targets(self, batch: Any) -> int | None:
        """Return the label that a call ignores in the targets of a batch; None if none does."""
        for call in self.seen:
            if call.has_classes and call.place(batch) in ((None, False), (None, True)):
                return call.ignored
        return None


def _labels_of(batch: Any) -> Iterator[tuple[str | None, Tensor]]:
    """Yield the tensors of a batch that may be labels, the targets first, with their names."""
    targets = targets_of(batch)
    if targets is not None:
        yield None, targets
    named = named_parts(batch) or {}
    for name, value in named.items():
        if name != target_name(named) and isinstance(value, Tensor) and value.ndim:
            yield name, value


def _equal(targets: Tensor, labels: Tensor) -> bool:
    if targets.numel() != labels.numel():
        return False
    return bool((targets.reshape(-1).double() == labels.reshape(-1).double()).all())


def is_finite(*numbers: float) -> bool:
    return all(math.isfinite(number) for number in numbers)
