"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

Items are what the criterion's mean divides by: samples, targets that are not ignored, or the sum of
their class weights. A mean of means would give a short microbatch, or one full of ignored targets,
the weight of a full one. Therefore each microbatch contributes its *sum*, which is divided by the
items of the whole window before the backward pass, and so before clipping.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.booster.batch import (
    Calls,
    ModelCall,
    batch_size,
    mapped,
    named_parts,
    not_readable,
    targets_of,
)
from runner.booster.criterion import (
    CachedCopy,
    Criterion,
    NoCollectives,
    binary_outputs,
    cross_entropy_sum,
    option,
    summed,
    zero_with_gradient,
)
from runner.booster.own_loss import logits_of, returned_loss, shifts_labels, without_loss
from runner.clip import Number, transfer
from runner.data.dataset import IGNORED

log = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference, by dtype, that rounding explains between the loss of a batch and the
sum over its parts."""

_FEW = 512
"""Number of targets up to which a list counts them in less time than an array."""


class Count(NamedTuple):
    """Counts of one microbatch.

    Attributes:
        items: number, or summed weight, of items: what the mean of the criterion divides by.
        samples: number of samples.
        tokens: number of targets that are not ignored if targets are sequences, else 0.
    """

    items: float
    samples: int
    tokens: int


class WindowLoss:
    """Sum a criterion over microbatches, and count the items that its mean divides by.

    Cross entropy and negative log-likelihood, modules or functions, with class weights, label
    smoothing or class probabilities, are summed exactly. Any other criterion returns a mean, which
    is multiplied with the items: the samples, or the class targets that are not ignored. A
    criterion (or a model with a ``loss``) whose mean divides by something else has a method
    ``loss_items(targets)`` (a model: ``loss_items(batch)``) that returns this divisor.

    A criterion with ``reduction="sum"`` is not divided by anything: a step takes the gradient of
    the sum over its whole batch, as plain PyTorch does.

    Without a criterion, the loss is what the model says it is: its method ``loss(outputs, batch)``,
    or a mean loss in its outputs (see :mod:`runner.booster.own_loss`), as those of transformers
    have. The items of such a mean are the labels of the batch that are not ignored, but the first
    of each sequence where the model shifts them, or what its method ``loss_items(batch)`` returns.
    Otherwise it is the cross entropy over the last dimension of the outputs.
    """

    def __init__(
        self, model: nn.Module, criterion: Criterion | None = None, checked: bool = False
    ) -> None:
        own: Any = getattr(model, "loss", None)
        self.takes_batch = criterion is None and inspect.ismethod(own)
        self.ignored: int = option(criterion, "ignore_index", IGNORED)
        reduction = option(criterion, "reduction", "mean")
        if reduction == "none":
            raise ValueError(
                "the criterion has reduction='none' and returns a loss for each item: use "
                "reduction='mean', or 'sum' for steps that are not divided by the batch"
            )
        self.averages = reduction != "sum"
        self._given = criterion is not None
        self.binary = binary_outputs(criterion)
        self._may_return = not self._given and not self.takes_batch
        self._shifts = self._may_return and shifts_labels(model)
        self._calls = Calls(model, whole=self.takes_batch, labelled=criterion is None)
        owner = model if self.takes_batch else criterion
        self._owner = owner if isinstance(owner, nn.Module) else None
        stated = model if criterion is None else criterion
        self._divisor: Callable[[Any], Any] | None = getattr(stated, "loss_items", None)
        in_sum = None if criterion is None else summed(criterion)
        if criterion is None and not self.takes_batch:
            in_sum = cross_entropy_sum
        mean: Criterion = own if criterion is None else criterion
        self._criterion = mean if in_sum is None else in_sum
        self._classes = in_sum is not None
        self._class_dim = -1 if criterion is None else 1
        self._weight = CachedCopy(option(criterion, "weight", None) if self._classes else None)
        self._sums = self._classes or not self.averages
        self.checked = checked and not self._sums
        self.unproved = not self._sums and self._divisor is None

    def items(self, batch: Any) -> Count:
        """Count the items, samples and tokens of a microbatch."""
        targets, named = self._labels(batch), named_parts(batch) is not None
        if targets is None:
            if not (self.takes_batch or (self._may_return and named)):
                raise not_readable(batch)
            samples = batch_size(batch)
            return Count(self._stated(batch, samples), samples, 0)
        graded = self._graded(targets)
        items: float = graded
        if targets.is_floating_point():
            items = len(targets)
            if self._classes and not (self._may_return and (named or targets.ndim == 1)):
                # Class probabilities: one item for each vector.
                dim = min(self._class_dim, targets.ndim - 1)
                items = targets.numel() // targets.shape[dim]
        elif (weight := self._weight.on(targets.device)) is not None:
            counted = targets[targets != self.ignored]
            items = float(weight[counted].sum(dtype=torch.float64))
        return Count(self._stated(batch, items), len(targets), graded if targets.ndim > 1 else 0)

    def graded(self, batch: Any) -> int:
        """Count the class targets of a microbatch that are not ignored; 0 for other targets."""
        targets = self._labels(batch)
        return 0 if targets is None else self._graded(targets)

    def _labels(self, batch: Any) -> Tensor | None:
        """Return the targets of a batch; without the first of each sequence if the model shifts."""
        targets = targets_of(batch)
        if targets is None or not self._shifts or named_parts(batch) is None:
            return targets
        return targets[..., 1:]

    def _graded(self, targets: Tensor) -> int:
        if targets.is_floating_point():
            return 0
        if targets.numel() <= _FEW and targets.device.type == "cpu":
            return targets.numel() - targets.flatten().tolist().count(self.ignored)
        if targets.device.type == "cpu":
            return int(np.count_nonzero(targets.numpy() != self.ignored))
        return int((targets != self.ignored).sum())

    def divisor(self, items: float) -> float:
        """Return what the summed loss of a window with ``items`` is divided by."""
        return (items or 1.0) if self.averages else 1.0

    def call(self, batch: Any) -> ModelCall:
        """Return what the model is called with for a batch."""
        return self._calls.of(batch)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs; their ``logits``, if there are any and no loss."""
        args, kwargs = self._calls.of(batch)
        outputs = model(*args, **kwargs)
        if self._may_return and returned_loss(outputs) is not None:
            return outputs
        return logits_of(outputs)

    def sum(self, outputs: Any, batch: Any, items: float | None) -> Tensor:
        """Sum the item losses of a microbatch."""
        own = returned_loss(outputs) if self._may_return else None
        if items is None or (items == 0 and not (self._sums and own is None)):
            return zero_with_gradient(outputs if own is None else without_loss(outputs))
        if own is not None:
            return own * items
        loss = self._criterion(*self._compared(outputs, batch))
        if self._sums:
            return loss
        if self.checked:
            self.checked = False
            self._check(outputs, batch, loss.detach(), items)
        return loss * items

    def correct(self, outputs: Any, batch: Any) -> Number | None:
        """Count items whose largest logit is the target's; None if targets are not classes.

        The host does not wait for an accelerator.
        """
        if (classified := self.classified(outputs, batch)) is None:
            return None
        logits, targets = classified
        right = (logits.argmax(-1) == targets) & (targets != self.ignored)
        return transfer.count(right)

    def classified(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Return logits [..., classes] and the classes [...] that belong to them.

        None if the targets are not classes, or outputs of another shape belong to them.
        """
        logits, targets = logits_of(outputs), self._labels(batch)
        if targets is None or not isinstance(logits, Tensor) or targets.is_floating_point():
            return None
        if targets.shape != targets_of(batch).shape:  # type: ignore[union-attr]
            logits = logits[..., :-1, :]
        return (logits, targets) if logits.shape[:-1] == targets.shape else None

    def paired(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Return outputs and targets that are numbers [...] of one shape; else None."""
        numbers, targets = logits_of(outputs), targets_of(batch)
        if targets is None or not isinstance(numbers, Tensor) or not targets.is_floating_point():
            return None
        if numbers.shape[1:] == (1,) and targets.ndim == 1:
            numbers = numbers[:, 0]
        return (numbers, targets) if numbers.shape == targets.shape else None

    def _compared(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """Return what the criterion compares."""
        if self.takes_batch:
            return outputs, batch
        if (targets := targets_of(batch)) is None:
            raise not_readable(batch)
        classified = self.classified(outputs, batch) if self._classes else None
        if classified is None:
            return outputs, targets
        if self._given:  # torch's criteria have the classes in dimension 1.
            shape = classified[0].shape
            if targets.ndim > 1 and (shape[0], *shape[2:]) != targets.shape:
                return classified[0].flatten(0, -2), targets.flatten()
            return outputs, targets
        return classified

    def _stated(self, batch: Any, items: float) -> float:
        """Return the items that ``loss_items`` states; ``items`` if it states none."""
        if self._divisor is None or (self._may_return and named_parts(batch) is None):
            return items
        return float(self._divisor(targets_of(batch) if self._given else batch))

    def _check(self, outputs: Any, batch: Any, loss: Tensor, items: float) -> None:
        """Warn if the summed loss of a batch is not that of its first sample plus that of the rest.

        On this rank alone.
        """
        if not self.adds_up(outputs, batch, loss, items):
            log.warning(
                "the loss of a batch is not the mean over the items of its parts: a step depends on"
                " how its batch is divided into microbatches and over ranks. %s. Where samples "
                "depend on each other (a contrastive loss, say), this cannot be avoided",
                self.advice,
            )

    @property
    def advice(self) -> str:
        """What to do where the loss of a batch is not that of its parts."""
        if self.takes_batch:
            return "Give the model a method loss_items(batch) that returns what the mean divides by"
        return (
            "Give the criterion a method loss_items(targets) that returns what its mean "
            "divides by, or use torch.nn.CrossEntropyLoss, whose divisor is known"
        )

    def adds_up(
        self, outputs: Any, batch: Any, loss: Tensor | None = None, items: float | None = None
    ) -> bool:
        """Return whether the summed loss of a batch is that of its first sample plus the rest's.

        A copy of the criterion computes them, so the buffers and attributes of the criterion do
        not change. True where that cannot be found out: a criterion that communicates, say.
        """
        samples = batch_size(batch)
        if samples < 2 or not isinstance(outputs, Tensor) or len(outputs) != samples:
            return True
        held = [] if self._owner is None else list(self._owner.parameters())
        if any(isinstance(each, DTensor) for each in [outputs, *held]):
            return True  # Its loss may wait for other ranks.
        on = [outputs.device] if outputs.device.type == "cuda" else []
        sums: list[float] = []
        try:
            with torch.no_grad(), torch.random.fork_rng(on), NoCollectives():  # type: ignore[no-untyped-call]
                # Parameters may be large, and no loss writes to them: the copy shares them.
                criterion = copy.deepcopy(self._criterion, {id(each): each for each in held})
                items = self.items(batch).items if items is None else items
                if loss is None:
                    loss = criterion(*self._compared(outputs, batch))
                for at in (slice(1), slice(1, None)):
                    part = mapped(batch, itemgetter(at))
                    if batch_size(part) == samples:
                        return True  # Its tensors are in a structure of its own.
                    here = self.items(part).items
                    if here:
                        sums.append(float(criterion(*self._compared(outputs[at], part))) * here)
        except Exception:
            return True  # The criterion does not take a part of a batch.
        whole = float(loss) * items  # The only read of the loss, which may wait for the device.
        rounding = _ROUNDING.get(outputs.dtype, 2e-2)  # Others have half precision.
        size = max(abs(whole), *map(abs, sums), 0.0)
        return not math.isfinite(whole) or abs(sum(sums) - whole) <= rounding * size
