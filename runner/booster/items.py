"""Count the items of a batch: what the mean of a loss divides by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runner.booster.batch import batch_size, named_parts, not_readable, targets_of
from runner.booster.candidates import Candidates
from runner.booster.criterion import Criterion, averages_elements, name_of, option_of
from runner.booster.divisor import LABELS, NOTHING, Divisor, positions_inside
from runner.data.dataset import IGNORED


class DivisorError(ValueError):
    """The mean of a loss is over something else than the items that are counted."""


@dataclass(frozen=True)
class Loss:
    """A criterion, and what the mean of the loss divides by.

    Args:
        criterion: loss of (outputs, targets); None for the model's own loss, or cross entropy.
        items: ``auto`` reads it off the loss, or measures it before the first step. ``samples``
            and ``labels`` (class targets that are neither negative nor ignored) state it. ``none``
            takes the plain mean over microbatches, whatever they hold, as other trainers do.
    """

    criterion: Criterion | None = None
    items: Literal["auto", "samples", "labels", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.items not in ("auto", "samples", "labels", "none"):
            raise ValueError(f"items must be auto, samples, labels or none, not {self.items!r}")


class LossForm(NamedTuple):
    """How a loss is computed.

    Attributes:
        has_criterion: a criterion compares outputs and targets.
        takes_batch: the model has a method ``loss(outputs, batch)``.
        may_return: the loss may be in the model's outputs.
        compares_classes: the loss is torch's cross entropy, or its negative log-likelihood.
    """

    has_criterion: bool
    takes_batch: bool
    may_return: bool
    compares_classes: bool


class Count(NamedTuple):
    items: float  # number, or summed weight: what the mean of the criterion divides by
    samples: int
    tokens: int  # targets that are not ignored if targets are sequences, else 0


@dataclass
class Labels:
    """Which targets of a batch are compared.

    Attributes:
        ignored: label that is left out.
        shifts: whether the model compares each output with the label after it.
    """

    ignored: int
    shifts: bool

    def of(self, batch: Any) -> Tensor | None:
        """Return the targets of a batch; without the first of each sequence if the model shifts."""
        targets = targets_of(batch)
        shifts = targets is not None and self.shifts and named_parts(batch) is not None
        return targets[..., 1:] if shifts else targets  # type: ignore[index]

    def use(self, divisor: Divisor) -> None:
        """Take from what was found which labels of the targets a mean counts."""
        if divisor.counts == LABELS and not divisor.name:
            self.ignored = int(divisor.ignored)
            self.shifts = divisor.shifts


class ItemCounter:
    """Counts items as they are stated, were found by a measurement, or are likely.

    Attributes:
        is_stated: whether ``loss_items`` or ``loss.items`` says what is counted.
    """

    def __init__(self, model: nn.Module, stated: Loss, form: LossForm) -> None:
        criterion = stated.criterion
        self._name = name_of(criterion, model)
        self._form = form
        self._stated = stated.items
        ignored = option_of(criterion, "ignore_index", IGNORED)
        self._likely = Labels(
            ignored=ignored if isinstance(ignored, int) else IGNORED,
            shifts=form.may_return and _shifts_labels(model),
        )
        self.labels = replace(self._likely)
        self._weight: Tensor | None = None
        if form.compares_classes:
            self._weight = option_of(criterion, "weight", None)
        self._averages_elements = averages_elements(criterion)
        self._loss_items: Callable[[Any], Any] | None = None
        if stated.items == "auto":
            owner = model if criterion is None else criterion
            self._loss_items = getattr(owner, "loss_items", None)
        self.is_stated = self._loss_items is not None or stated.items != "auto"

    def use(self, candidates: Candidates | None) -> None:
        """Count by what a measurement found; None for what is likely."""
        self.labels = replace(self._likely)
        if candidates is not None:
            self.labels.use(candidates.divisor)

    def described(self, batch: Any) -> str:
        """Return what a message calls the items that are likely."""
        targets = targets_of(batch)
        if targets is None or targets.is_floating_point():
            return "the samples"
        shifted = ", without the first of each sequence" if self.labels.shifts else ""
        return f"the labels that are not {self.labels.ignored}{shifted}"

    def count(self, batch: Any, candidates: Candidates | None) -> Count:
        """Count a batch."""
        targets = self.labels.of(batch)
        if targets is None:
            named = named_parts(batch) is not None
            if not (self._form.takes_batch or (self._form.may_return and named)):
                raise not_readable(batch)
            return Count(self._items(batch, None, candidates), batch_size(batch), 0)
        counts_tokens = targets.ndim > 1 and not targets.is_floating_point()
        tokens = self._graded(targets) if counts_tokens else 0
        return Count(self._items(batch, targets, candidates), len(targets), tokens)

    def _items(self, batch: Any, targets: Tensor | None, candidates: Candidates | None) -> float:
        """Count the items as they are stated, were found, or are likely."""
        if self._stated == "samples":
            return batch_size(batch)
        if self._stated == "none":
            return 1.0
        of_batch = not (self._form.may_return and named_parts(batch) is None)
        if self._loss_items is not None and of_batch:
            return float(self._loss_items(targets_of(batch) if self._form.has_criterion else batch))
        if candidates is not None and candidates.divisor.counts != NOTHING:
            return candidates.items(batch)
        return self._likely_items(batch, targets)

    def _likely_items(self, batch: Any, targets: Tensor | None) -> float:
        """Count samples, class targets, their weights, or the elements of other targets."""
        if targets is None:
            return self._samples(batch)
        if not targets.is_floating_point():
            return self._graded(targets) if self._weight is None else self._weights_of(targets)
        is_returned = self._form.may_return
        in_outputs = is_returned and (named_parts(batch) is not None or targets.ndim == 1)
        if self._form.compares_classes and not in_outputs:
            # Class probabilities: one item for each vector.
            dim = min(1 if self._form.has_criterion else -1, targets.ndim - 1)
            return targets.numel() // targets.shape[dim]
        return targets.numel() if self._averages_elements else len(targets)

    def _weights_of(self, targets: Tensor) -> float:
        assert self._weight is not None
        self._weight = self._weight.to(targets.device)  # copied once, not in each step
        counted = targets[targets != self.labels.ignored]
        return float(self._weight[counted].sum(dtype=torch.float64))

    def _graded(self, targets: Tensor) -> int:
        """Count the targets that are not ignored; of classes those that are not negative too."""
        form = self._form
        # Negative labels are no classes: what does not ignore them by a number selects the others.
        counts_classes = form.compares_classes or form.takes_batch or self._stated == "labels"
        least = 0 if counts_classes else -math.inf
        array = targets.cpu().numpy()
        ignores_none = counts_classes and self.labels.ignored < 0 and array.size > 0
        if ignores_none and array.min() >= 0:  # the usual case, in half the time
            return array.size
        return int(np.count_nonzero((array != self.labels.ignored) & (array >= least)))

    def _samples(self, batch: Any) -> float:
        """Return the samples; of question answering those whose positions are in the inputs.

        transformers ignores the others, in two means, one of starts and one of ends.
        """
        inside = positions_inside(batch)
        if inside is None:
            return batch_size(batch)
        starts, ends = inside
        if starts != ends:
            raise DivisorError(
                f"{self._name} is a mean over {starts} start positions plus one over {ends} "
                "end positions, as the others lie outside of the inputs: leave such samples out, "
                "set both positions to 0, or use loss.items=none, the plain mean over microbatches"
            )
        return starts


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether a model compares each output with the label after it.

    Causal models of transformers do, unless an encoder reads the inputs and a decoder the shifted
    labels.
    """
    function = getattr(model, "loss_function", None)
    causal = getattr(function, "__name__", "") == "ForCausalLMLoss"
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return causal and not decodes
