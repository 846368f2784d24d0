"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

A mean of means would give a short microbatch, or one full of ignored targets, the weight of a full
one. So each contributes its *sum*, which is divided by the items of the whole window before the
backward pass, and so before clipping.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.booster.batch import Calls, batch_size, mapped, named_parts, not_readable, targets_of
from runner.clip import Number, transfer
from runner.data.dataset import IGNORED
from runner.parallel.hooks import held_tensors

Criterion = Callable[[Any, Any], Tensor]

_SUMMABLE = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
_SUMMABLE_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_LOGITS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)


class Count(NamedTuple):
    items: float  # number, or summed weight: what the mean of the criterion divides by
    samples: int
    tokens: int  # targets that are not ignored if targets are sequences, else 0


class WindowLoss:
    """Sum a criterion over microbatches, and count the items that its mean divides by.

    torch's cross entropy and negative log-likelihood are summed exactly. The mean of any other
    criterion is multiplied with the items: the samples, or the class targets that are not ignored,
    or what its method ``loss_items(targets)`` returns. Nothing divides ``reduction="sum"``.

    Without a criterion, the loss is the model's ``loss(outputs, batch)``, or a mean in its outputs,
    as of transformers, whose items are the labels that are not ignored and not shifted away, or
    its ``loss_items(batch)``; else the cross entropy over the last dimension of the outputs.
    """

    def __init__(self, model: nn.Module, criterion: Criterion | None = None) -> None:
        own: Any = getattr(model, "loss", None)
        self.takes_batch = criterion is None and inspect.ismethod(own)
        self.ignored: int = _option(criterion, "ignore_index", IGNORED)
        reduction = _option(criterion, "reduction", "mean")
        if reduction == "none":
            raise ValueError(
                "the criterion has reduction='none' and returns a loss for each item: use "
                "reduction='mean', or 'sum' for steps that are not divided by the batch"
            )
        self.binary = _binary_outputs(criterion)
        self._averages, self._given = reduction != "sum", criterion is not None
        self._may_return = not self._given and not self.takes_batch
        function = getattr(model, "loss_function", None)
        causal = getattr(function, "__name__", "") == "ForCausalLMLoss"
        decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        # Causal models of transformers compare each output with the label after it, unless an
        # encoder reads the inputs and a decoder the shifted labels.
        self._shifts = self._may_return and causal and not decodes
        self.call = Calls(model, whole=self.takes_batch, labelled=criterion is None).of
        self._divisor: Callable[[Any], Any] | None
        self._divisor = getattr(model if criterion is None else criterion, "loss_items", None)
        in_sum = _cross_entropy_sum if self._may_return else _summed(criterion)
        self._classes = in_sum is not None
        self._criterion: Criterion = in_sum or (own if criterion is None else criterion)
        self._weight: Tensor | None = _option(criterion, "weight", None) if self._classes else None
        self._sums = self._classes or not self._averages
        self.unproved = not self._sums and self._divisor is None  # that the mean is over the items

    def items(self, batch: Any) -> Count:
        targets, named = self._labels(batch), named_parts(batch) is not None
        if targets is None:
            if not (self.takes_batch or (self._may_return and named)):
                raise not_readable(batch)
            return Count(self._stated(batch, samples := batch_size(batch)), samples, 0)
        numbers, graded = targets.is_floating_point(), 0
        if not numbers and targets.numel() <= 128:  # a list costs less than an array
            graded = targets.numel() - targets.flatten().tolist().count(self.ignored)
        elif not numbers:
            graded = int(np.count_nonzero(targets.cpu().numpy() != self.ignored))
        items: float = graded
        if numbers:
            items = len(targets)
            if self._classes and not (self._may_return and (named or targets.ndim == 1)):
                # Class probabilities: one item for each vector.
                dim = min(1 if self._given else -1, targets.ndim - 1)
                items = targets.numel() // targets.shape[dim]
        elif self._weight is not None:
            self._weight = self._weight.to(targets.device)  # copied once, not in each step
            counted = targets[targets != self.ignored]
            items = float(self._weight[counted].sum(dtype=torch.float64))
        return Count(self._stated(batch, items), len(targets), graded if targets.ndim > 1 else 0)

    def _labels(self, batch: Any) -> Tensor | None:
        """Return the targets of a batch; without the first of each sequence if the model shifts."""
        targets = targets_of(batch)
        shifts = targets is not None and self._shifts and named_parts(batch) is not None
        return targets[..., 1:] if shifts else targets  # type: ignore[index]

    def _stated(self, batch: Any, items: float) -> float:
        """Return the items that ``loss_items`` states; ``items`` if it states none."""
        if self._divisor is None or (self._may_return and named_parts(batch) is None):
            return items
        return float(self._divisor(targets_of(batch) if self._given else batch))

    def divisor(self, items: float) -> float:
        """Return what the summed loss of a window with ``items`` is divided by."""
        return (items or 1.0) if self._averages else 1.0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs; their ``logits``, if there are any and no loss."""
        args, kwargs = self.call(batch)
        outputs = model(*args, **kwargs)
        if self._may_return and returned_loss(outputs) is not None:
            return outputs
        return logits_of(outputs)

    def sum(self, outputs: Any, batch: Any, items: float | None) -> Tensor:
        """Sum the item losses of a microbatch; 0, with a gradient of zeros, if it has no weight."""
        own = returned_loss(outputs) if self._may_return else None
        if items is None or (items == 0 and not (self._sums and own is None)):
            numbers = [one for one in held_tensors(outputs) if one.is_floating_point()]
            # A mean over no items is NaN, and so would be its gradient.
            rest = [one for one in numbers if one is not own] or numbers
            assert rest, "the model returned no tensor"
            return torch.stack([one.sum() * 0.0 for one in rest]).sum()
        if own is not None:
            return own * items
        loss = self._criterion(*self._compared(outputs, batch))
        return loss if self._sums else loss * items

    def correct(self, outputs: Any, batch: Any) -> tuple[Number, Number] | None:
        """Count items whose largest logit is the target's, and all; None without classes."""
        if (classified := self.classified(outputs, batch)) is None:
            return None
        logits, targets = classified
        graded = targets != self.ignored
        return transfer.count((logits.argmax(-1) == targets) & graded), transfer.count(graded)

    def classified(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Return logits [..., classes] and their classes [...]; None for other targets."""
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

    def adds_up(self, outputs: Tensor, batch: Any) -> bool:
        """Return whether the summed loss is that of the first sample plus the rest's, if known."""
        if batch_size(batch) < 2 or len(outputs) != batch_size(batch):
            return True
        sums: list[float] = []
        try:
            probe = copy.copy(self)
            probe._criterion = copy.deepcopy(self._criterion)  # so that its buffers do not change
            with torch.no_grad():
                for at in (slice(None), slice(1), slice(1, None)):
                    part = mapped(batch, itemgetter(at))
                    sums.append(float(probe.sum(outputs[at], part, self.items(part).items)))
        except Exception:
            return True  # The criterion does not take a part of a batch.
        off, rounding = abs(sums[1] + sums[2] - sums[0]), torch.finfo(outputs.dtype).eps ** 0.5
        return not math.isfinite(sums[0]) or off <= rounding * max(map(abs, sums))


def _option(criterion: Any, name: str, default: Any) -> Any:
    """Return an attribute of a criterion, or a keyword argument of a ``functools.partial``."""
    keywords = getattr(criterion, "keywords", None) or {}
    return keywords.get(name, getattr(criterion, name, default))


def _binary_outputs(criterion: Any) -> Literal["logits", "probabilities"] | None:
    """Return what a criterion compares with labels of 0 and 1, if it does."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    if isinstance(criterion, nn.BCELoss) or function is functional.binary_cross_entropy:
        return "probabilities"
    logits = isinstance(criterion, _LOGITS)
    return "logits" if logits or function is functional.binary_cross_entropy_with_logits else None


def _summed(criterion: Any) -> Criterion | None:
    """Return ``criterion`` with ``reduction="sum"``; None if it is not a loss of torch."""
    if isinstance(criterion, nn.Module) and type(criterion).forward in _SUMMABLE:
        criterion = copy.copy(criterion)
        criterion.reduction = "sum"
        return criterion  # type: ignore[no-any-return]
    bound = isinstance(criterion, partial) and not criterion.args
    function = criterion.func if bound else criterion
    return partial(criterion, reduction="sum") if function in _SUMMABLE_FUNCTIONS else None


def _cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    return functional.cross_entropy(
        outputs.flatten(0, -2), flat, ignore_index=IGNORED, reduction="sum"
    )


def returned_loss(outputs: Any) -> Tensor | None:
    """Return the loss in outputs: their ``loss``, the only one of a tuple, or the output itself."""
    several = outputs if isinstance(outputs, tuple | list) else [outputs]
    losses: list[Tensor] = [*filter(_is_loss, several)]
    if len(losses) != 1:
        losses = [*filter(_is_loss, [_part(outputs)])]
    return losses[0] if losses else None


def logits_of(outputs: Any) -> Any:
    """Return the attribute or entry ``logits`` of outputs; the outputs if there is none."""
    if isinstance(outputs, Tensor):
        return outputs
    loss = returned_loss(outputs) if isinstance(outputs, tuple | list) else None
    if loss is not None:
        return next((each for each in outputs if each is not loss), outputs)
    found = _part(outputs, "logits")
    return outputs if found is None else found


def _part(outputs: Any, name: str = "loss") -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _is_loss(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim == 0 and part.is_floating_point()
