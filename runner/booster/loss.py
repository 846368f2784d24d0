"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

A mean of means would give a short microbatch, or one full of ignored targets, the weight of a full
one. So each contributes its *sum*, which is divided by the items of the whole window before the
backward pass, and so before clipping.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.booster.batch import (
    BatchError,
    Calls,
    batch_size,
    named_parts,
    not_readable,
    targets_of,
)
from runner.booster.divisor import NOTHING, Divisor
from runner.clip import Number, transfer
from runner.data.dataset import IGNORED
from runner.parallel.hooks import held_tensors

Criterion = Callable[[Any, Any], Tensor]

_SUMMABLE = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
_SUMMABLE_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_LOGITS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)


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

    What a mean divides by is a guess while ``unproved`` is true:
    :func:`runner.booster.measurement.settle` replaces it by what it finds. :class:`Loss` states it.
    """

    def __init__(self, model: nn.Module, criterion: Criterion | Loss | None = None) -> None:
        stated = criterion if isinstance(criterion, Loss) else Loss(criterion)
        criterion, self._stated_items = stated.criterion, stated.items
        own: Any = getattr(model, "loss", None)
        self.takes_batch = criterion is None and inspect.ismethod(own)
        ignored = _option(criterion, "ignore_index", IGNORED)
        self.ignored: int = ignored if isinstance(ignored, int) else IGNORED
        reduction = _option(criterion, "reduction", "mean")
        if reduction == "none":
            raise ValueError(
                "the criterion has reduction='none' and returns a loss for each item: use "
                "reduction='mean', or 'sum' for steps that are not divided by the batch"
            )
        if reduction == "sum" and criterion is not None and stated.items != "auto":
            raise ValueError(
                f"nothing divides a criterion with reduction='sum': leave loss.items={stated.items}"
                " out, or use reduction='mean'"
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
        self._divisor: Callable[[Any], Any] | None = None
        if stated.items == "auto":
            self._divisor = getattr(model if criterion is None else criterion, "loss_items", None)
        in_sum = _cross_entropy_sum if self._may_return else _summed(criterion)
        self._classes = in_sum is not None
        mean = _cross_entropy_mean if self._may_return else criterion or own
        exact = in_sum is not None and stated.items in ("auto", "labels")
        self._criterion: Criterion = in_sum if exact else mean  # type: ignore[assignment]
        self._weight: Tensor | None = _option(criterion, "weight", None) if self._classes else None
        self._sums = exact or not self._averages
        self.name = _name_of(criterion, model)
        stated_here = self._divisor is not None or stated.items != "auto"
        by_construction = self._given and (self._sums or _is_of_torch(criterion))
        self.unproved = not (stated_here or by_construction)
        self._found: Divisor | None = None
        # Negative labels are no classes: what does not ignore them by a number selects the others.
        self._counts_classes = self._classes or self.takes_batch or stated.items == "labels"

    @property
    def may_return(self) -> bool:
        """Whether the loss may be in the model's outputs."""
        return self._may_return

    @property
    def criterion(self) -> Criterion:
        """What :meth:`sum` compares outputs and targets by, if the outputs hold no loss."""
        return self._criterion

    def mean(self, outputs: Any, batch: Any) -> Tensor:
        """Return what the criterion returns for a batch."""
        return self._criterion(*self._compared(outputs, batch))

    def counted_as(self, batch: Any) -> str:
        """Return what a message calls the items of a batch."""
        targets = targets_of(batch)
        if targets is None or targets.is_floating_point():
            return "the samples"
        shifted = ", without the first of each sequence" if self._shifts else ""
        return f"the labels that are not {self.ignored}{shifted}"

    def reads_batch(self, batch: Any) -> bool:
        """Return whether the model can return a loss for such a batch.

        A model that gets one tensor and no targets returns logits, or a mean over samples.
        """
        args, kwargs = self.call(batch)
        return len(args) != 1 or bool(kwargs)

    def use(self, divisor: Divisor) -> None:
        """Count from now on what a measurement found that the mean divides by."""
        self._found = divisor
        if divisor.counts == NOTHING:
            self._averages = False
        elif divisor.entry is None:
            self.ignored, self._shifts = divisor.ignored, divisor.shifts
        self.unproved = False

    def state_dict(self) -> dict[str, Any]:
        """Return what was found, so that a training that continues need not measure again."""
        state: dict[str, Any] = {"unproved": self.unproved}
        if self._found is not None:
            divisor = self._found._asdict()
            state["divisor"] = {name: value for name, value in divisor.items() if value is not None}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, unless what a mean divides by is known here."""
        if not self.unproved:
            return
        if "divisor" in state:
            self.use(Divisor(**state["divisor"]))
        self.unproved = state["unproved"]

    def items(self, batch: Any) -> Count:
        targets, named = self._labels(batch), named_parts(batch) is not None
        if targets is None:
            if not (self.takes_batch or (self._may_return and named)):
                raise not_readable(batch)
            samples = batch_size(batch)
            return Count(self._stated(batch, self._positions(batch, samples)), samples, 0)
        numbers = targets.is_floating_point()
        graded = 0 if numbers else self._graded(targets)
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

    def _graded(self, targets: Tensor) -> int:
        """Count the targets that are not ignored; of classes those that are not negative too."""
        least = 0 if self._counts_classes else -math.inf
        if targets.numel() <= 128:  # a list costs less than an array
            labels = targets.flatten().tolist()
            return sum(label >= least and label != self.ignored for label in labels)
        array = targets.cpu().numpy()
        return int(np.count_nonzero((array != self.ignored) & (array >= least)))

    def _labels(self, batch: Any) -> Tensor | None:
        """Return the targets of a batch; without the first of each sequence if the model shifts."""
        targets = targets_of(batch)
        shifts = targets is not None and self._shifts and named_parts(batch) is not None
        return targets[..., 1:] if shifts else targets  # type: ignore[index]

    def _positions(self, batch: Any, samples: int) -> float:
        """Return the samples; of question answering those whose positions are in the inputs.

        transformers ignores the others, in two means, one of starts and one of ends.
        """
        named = named_parts(batch) or {}
        starts, ends = named.get("start_positions"), named.get("end_positions")
        inputs = named.get("input_ids", named.get("inputs_embeds"))
        if not (isinstance(starts, Tensor) and isinstance(ends, Tensor)):
            return samples
        if not isinstance(inputs, Tensor) or inputs.ndim < 2:
            return samples
        inside = [int((positions < inputs.shape[1]).sum()) for positions in (starts, ends)]
        if inside[0] != inside[1]:
            raise DivisorError(
                f"{self.name} is a mean over {inside[0]} start positions plus one over {inside[1]} "
                "end positions, as the others lie outside of the inputs: leave such samples out, "
                "set both positions to 0, or use loss.items=none, the plain mean over microbatches"
            )
        return inside[0]

    def _stated(self, batch: Any, items: float) -> float:
        """Return the items that are stated or were found; else ``items``."""
        if self._stated_items == "samples":
            return batch_size(batch)
        if self._stated_items == "none":
            return 1.0
        found = self._found
        if found is not None and not (found.is_plain and named_parts(batch) is not None):
            return found.items(batch)
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
        is_sum = not self._averages or (self._sums and own is None)
        if items is None or (items == 0 and not is_sum):
            numbers = [one for one in held_tensors(outputs) if one.is_floating_point()]
            # A mean over no items is NaN, and so would be its gradient.
            others = [one for one in numbers if one is not own] or numbers
            assert others, "the model returned no tensor"
            return zero_of(others)
        if own is not None:
            return own if is_sum else own * items
        loss = self._criterion(*self._compared(outputs, batch))
        return loss if is_sum else loss * items

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
        if self._may_return and not isinstance(logits_of(outputs), Tensor):
            raise BatchError(
                f"{self.name} returned no loss and no logits for a batch of the form (x, y), as it "
                "was not given y: let the DataLoader yield dictionaries with the names of its "
                'forward, such as {"x": x, "targets": y} or {"input_ids": x, "labels": y}'
            )
        classified = self.classified(outputs, batch) if self._classes else None
        if classified is None:
            return outputs, targets
        if self._given:  # torch's criteria have the classes in dimension 1.
            shape = classified[0].shape
            if targets.ndim > 1 and (shape[0], *shape[2:]) != targets.shape:
                return classified[0].flatten(0, -2), targets.flatten()
            return outputs, targets
        return classified


def zero_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return 0 with a gradient of zeros for each tensor, also where elements are infinite."""
    return torch.stack([tensor.reshape(-1)[:0].sum() for tensor in tensors]).sum()


def _option(criterion: Any, name: str, default: Any) -> Any:
    """Return an attribute, an argument of a ``functools.partial``, or a default of a function."""
    keywords = getattr(criterion, "keywords", None) or {}
    if name in keywords:
        return keywords[name]
    if hasattr(criterion, name):
        return getattr(criterion, name)
    function = criterion.func if isinstance(criterion, partial) else criterion
    if not inspect.isfunction(function):
        return default
    parameter = inspect.signature(function).parameters.get(name)
    has_default = parameter is not None and parameter.default is not parameter.empty
    return parameter.default if parameter is not None and has_default else default


def _is_of_torch(criterion: Any) -> bool:
    """Return whether a criterion is one of torch, whose mean is over samples of equal size."""
    if isinstance(criterion, nn.Module):
        return type(criterion).forward.__module__ == nn.modules.loss.__name__
    function = criterion.func if isinstance(criterion, partial) else criterion
    weighted = isinstance(criterion, partial) and "weight" in criterion.keywords
    return getattr(function, "__module__", "") == functional.__name__ and not weighted


def _name_of(criterion: Any, model: nn.Module) -> str:
    """Return how a message names a loss."""
    if criterion is None:
        return f"the loss of {type(model).__name__}"
    function = criterion.func if isinstance(criterion, partial) else criterion
    return f"the criterion {getattr(function, '__name__', type(function).__name__)}"


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


def _cross_entropy_sum(outputs: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    return functional.cross_entropy(
        outputs.flatten(0, -2), flat, ignore_index=IGNORED, reduction=reduction
    )


def _cross_entropy_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy_sum(outputs, targets, "mean")


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
