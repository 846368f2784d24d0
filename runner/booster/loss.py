"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

A mean of means would give a short microbatch, or one full of ignored targets, the weight of a full
one. So each contributes its *sum*, which is divided by the items of the whole window before the
backward pass, and so before clipping.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from runner.booster.batch import (
    BatchError,
    Calls,
    batch_size,
    mapped,
    named_parts,
    not_readable,
    targets_of,
)
from runner.booster.candidates import Candidates, is_zero
from runner.booster.checks import Checks
from runner.booster.criterion import (
    Criterion,
    binary_outputs,
    cross_entropy_mean,
    cross_entropy_sum,
    is_of_torch,
    name_of,
    option_of,
    summed,
)
from runner.booster.divisor import LABELS, NOTHING, positions_inside
from runner.booster.loss_graph import GraphError, terms_of
from runner.booster.outputs import as_leaf, holds_numbers, logits_of, returned_loss, zero_of
from runner.data.dataset import IGNORED
from runner.parallel.collectives import from_all
from runner.parallel.hooks import held_tensors

WAYS_OUT = (
    'give it a method loss_items({}) that returns what its mean divides by, or reduction="sum", or '
    "set loss.items=samples, labels or none (the plain mean over microbatches, as in other "
    "trainers), which is Trainer(criterion=Loss(items=...)) in a script"
)


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
    :func:`runner.booster.measurement.settle` replaces it by ``candidates``, the ways to count that
    agree with what the loss has divided by. :class:`Loss` states it.

    A rank among several goes on after a loss that it refuses, which is NaN then: all ranks see that
    the step, or the evaluation, is not finite, and call :meth:`raise_refusal`.

    Attributes:
        alone: whether there is one process, which raises at once.
    """

    def __init__(self, model: nn.Module, criterion: Criterion | Loss | None = None) -> None:
        stated = criterion if isinstance(criterion, Loss) else Loss(criterion)
        criterion = stated.criterion
        self.name = name_of(criterion, model)
        self._stated_loss = stated
        self._stated = stated.items
        self._averages = _is_a_mean(stated)
        self._given = criterion is not None
        own: Any = getattr(model, "loss", None)
        self.takes_batch = criterion is None and inspect.ismethod(own)
        self._may_return = not self._given and not self.takes_batch
        self.call = Calls(model, whole=self.takes_batch, labelled=criterion is None).of
        self.binary = binary_outputs(criterion)

        # What is compared, and summed where that is exact
        in_sum = cross_entropy_sum if self._may_return else summed(criterion)
        self._classes = in_sum is not None
        exact = in_sum is not None and stated.items in ("auto", "labels")
        mean = cross_entropy_mean if self._may_return else criterion or own
        self._criterion: Criterion = in_sum if exact else mean  # type: ignore[assignment]
        self._sums = exact or not self._averages

        # What is counted
        ignored = option_of(criterion, "ignore_index", IGNORED)
        self.ignored: int = ignored if isinstance(ignored, int) else IGNORED
        self._shifts = self._may_return and _shifts_labels(model)
        self._weight: Tensor | None = None
        if self._classes:
            self._weight = option_of(criterion, "weight", None)
        # Negative labels are no classes: what does not ignore them by a number selects the others.
        self._counts_classes = self._classes or self.takes_batch or stated.items == "labels"
        self._loss_items: Callable[[Any], Any] | None = None
        if stated.items == "auto":
            owner = model if criterion is None else criterion
            self._loss_items = getattr(owner, "loss_items", None)
        stated_here = self._loss_items is not None or stated.items != "auto"
        by_construction = self._given and (self._sums or is_of_torch(criterion))
        self.unproved = not (stated_here or by_construction)
        self.tries = 0
        self.candidates: Candidates | None = None
        self._checks: Checks | None = None
        self._scale = 1.0
        self._epsilon = 0.0
        self._guess = (self.ignored, self._shifts)
        self._trains = True
        self.alone = True
        self._refusal = ""

    @property
    def may_return(self) -> bool:
        """Whether the loss may be in the model's outputs."""
        return self._may_return

    @property
    def criterion(self) -> Criterion:
        """What :meth:`sum` compares outputs and targets by, if the outputs hold no loss."""
        return self._criterion

    @property
    def is_settled(self) -> bool:
        """Whether no batch can tell more of what the mean divides by."""
        return not self.unproved and (self.candidates is None or self.candidates.is_settled)

    @property
    def ways_out(self) -> str:
        """What to change if the mean is over something else than the items."""
        return WAYS_OUT.format("batch" if self.takes_batch or self._may_return else "targets")

    def mean(self, outputs: Any, batch: Any) -> Tensor:
        """Return what the criterion returns for a batch."""
        return self._criterion(*self._compared(outputs, batch))

    def counted_as(self, batch: Any) -> str:
        """Return what a message calls the items of a batch."""
        if self.candidates is not None:
            return self.candidates.divisor.described()
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
        return len(args) != 1 or bool(kwargs) or not isinstance(args[0], Tensor)

    def use(self, candidates: Candidates) -> None:
        """Count from now on what a measurement found that the mean divides by.

        The losses of ranks have to be confirmed again, as they are compared by this count.
        """
        self.candidates = candidates
        self._checks = Checks(candidates)
        self._checks.begin_window(self._trains, self.alone)
        self._scale = candidates.scale
        self._epsilon = candidates.epsilon
        self.unproved = False
        divisor = candidates.divisor
        self._averages = divisor.counts != NOTHING
        self.ignored, self._shifts = self._guess
        if divisor.counts == LABELS and not divisor.name:
            self.ignored = int(divisor.ignored)
            self._shifts = divisor.shifts

    def forget(self) -> None:
        """Forget what a loss of 0 was taken for, before another window is measured."""
        self.candidates = None
        self._checks = None
        self._scale = 1.0
        self._epsilon = 0.0
        self._averages = _is_a_mean(self._stated_loss)
        self.ignored, self._shifts = self._guess

    @property
    def is_confirmed(self) -> bool:
        """Whether :meth:`confirm` has nothing to compare; the same on all ranks."""
        return self.unproved or self._checks is None or self._checks.is_confirmed

    @property
    def epsilon(self) -> float:
        """What the mean adds to the items that it divides by."""
        return self._epsilon

    def begin_window(self, trains: bool) -> None:
        """Begin to compare the losses of a window, or of an evaluation, with their items.

        ``trains``: whether it is a window, of which :meth:`confirm` compares the first one.
        """
        self._trains = trains
        if self._checks is not None:
            self._checks.begin_window(trains, self.alone)

    def confirm(self) -> None:
        """Compare the losses of the first window over all ranks; a collective.

        Raises:
            DivisorError: the loss of a rank divides by something else, on every rank.
        """
        self.raise_refusal()
        problem = "" if self._checks is None else self._checks.confirm()
        if problem:
            raise DivisorError(f"{self.name} is refused, as {problem}: {self.ways_out}")

    def raise_refusal(self) -> None:
        """Raise the error of the first rank that has refused a loss; a collective."""
        for refusal in from_all(self._refusal):
            if refusal:
                raise DivisorError(refusal)

    def counted(self, batch: Any) -> Count:
        """Count a batch; NaN items if it is refused and other ranks have to learn of it."""
        try:
            return self.items(batch)
        except DivisorError as error:
            if self.alone:
                raise
            self._refusal = self._refusal or str(error)
            return Count(math.nan, batch_size(batch), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what was found, so that a training that continues need not measure again."""
        state: dict[str, Any] = {"unproved": self.unproved}
        if self.candidates is not None:
            state["candidates"] = self.candidates.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, unless what a mean divides by is known here."""
        if not self.unproved:
            return
        if "divisor" in state:
            return  # An earlier version found it in another way: it is measured again.
        if "candidates" in state:
            self.use(Candidates.from_state_dict(state["candidates"]))
        self.unproved = state["unproved"]

    def items(self, batch: Any) -> Count:
        """Count a batch."""
        targets = self._labels(batch)
        if targets is None:
            named = named_parts(batch) is not None
            if not (self.takes_batch or (self._may_return and named)):
                raise not_readable(batch)
            return Count(self._counted(batch, None), batch_size(batch), 0)
        counts_tokens = targets.ndim > 1 and not targets.is_floating_point()
        tokens = self._graded(targets) if counts_tokens else 0
        return Count(self._counted(batch, targets), len(targets), tokens)

    def _counted(self, batch: Any, targets: Tensor | None) -> float:
        """Count the items as they are stated, were found, or are guessed."""
        if self._stated == "samples":
            return batch_size(batch)
        if self._stated == "none":
            return 1.0
        of_batch = not (self._may_return and named_parts(batch) is None)
        if self._loss_items is not None and of_batch:
            return float(self._loss_items(targets_of(batch) if self._given else batch))
        if self.candidates is not None and self.unproved and not self._averages:
            return 0.0  # the losses so far are 0
        if self.candidates is not None and self._averages:
            return self.candidates.items(batch)
        return self._guessed(batch, targets)

    def _guessed(self, batch: Any, targets: Tensor | None) -> float:
        """Count samples, class targets, or their weights."""
        if targets is None:
            return self._samples(batch)
        if not targets.is_floating_point():
            return self._graded(targets) if self._weight is None else self._weights_of(targets)
        in_outputs = self._may_return and (named_parts(batch) is not None or targets.ndim == 1)
        if self._classes and not in_outputs:
            # Class probabilities: one item for each vector.
            dim = min(1 if self._given else -1, targets.ndim - 1)
            return targets.numel() // targets.shape[dim]
        return len(targets)

    def _weights_of(self, targets: Tensor) -> float:
        assert self._weight is not None
        self._weight = self._weight.to(targets.device)  # copied once, not in each step
        return float(self._weight[targets[targets != self.ignored]].sum(dtype=torch.float64))

    def _graded(self, targets: Tensor) -> int:
        """Count the targets that are not ignored; of classes those that are not negative too."""
        least = 0 if self._counts_classes else -math.inf
        array = targets.cpu().numpy()
        return int(np.count_nonzero((array != self.ignored) & (array >= least)))

    def _labels(self, batch: Any) -> Tensor | None:
        """Return the targets of a batch; without the first of each sequence if the model shifts."""
        targets = targets_of(batch)
        shifts = targets is not None and self._shifts and named_parts(batch) is not None
        return targets[..., 1:] if shifts else targets  # type: ignore[index]

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
                f"{self.name} is a mean over {starts} start positions plus one over {ends} "
                "end positions, as the others lie outside of the inputs: leave such samples out, "
                "set both positions to 0, or use loss.items=none, the plain mean over microbatches"
            )
        return starts

    def divisor(self, items: float) -> float:
        """Return what the summed loss of a window with ``items`` is divided by."""
        if not self._averages:
            return 1.0
        return (items or self._scale) + self._epsilon

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs; their ``logits``, if there are any and no loss."""
        args, kwargs = self.call(batch)
        outputs = model(*args, **kwargs)
        if self._may_return and returned_loss(outputs) is not None:
            return outputs
        return logits_of(outputs)

    def sum(self, outputs: Any, batch: Any, items: float | None) -> Tensor:
        """Sum the item losses of a microbatch; 0, with a gradient of zeros, if it has no weight.

        Raises:
            DivisorError: the loss divides by something else than the items that were counted.
        """
        own = returned_loss(outputs) if self._may_return else None
        is_sum = not self._averages or (self._sums and own is None)
        if items is None:
            return _nothing(own, outputs)
        if items == 0 and not is_sum:
            return self._of_no_items(own, outputs, batch)
        if is_sum and self._averages:
            return self._criterion(*self._compared(outputs, batch))  # summed exactly
        loss = self._loss_with_graph(outputs, batch) if own is None else own
        counted = self._scale if is_sum else items
        multiplier = self._multiplier(loss, counted)
        if multiplier is None:
            return self._refused(loss, counted)
        return loss if is_sum else loss * multiplier

    def _of_no_items(self, own: Tensor | None, outputs: Any, batch: Any) -> Tensor:
        """Return the summed loss of a batch without items: mostly 0, or NaN as a mean over none."""
        if self.candidates is not None and self.candidates.known:
            return _nothing(own, outputs)
        loss = self._loss_with_graph(outputs, batch) if own is None else own
        if is_zero(loss):
            return _nothing(own, outputs)
        if self.unproved and self.candidates is None:
            return loss  # the only microbatch of a step, which nothing is weighed against
        multiplier = None if self.candidates is None else self._multiplier(loss, 0.0)
        if multiplier is not None and loss.grad_fn is not None:
            return loss * multiplier
        if self.alone and _is_penalty_alone(loss, own, outputs):
            return _nothing(own, outputs)
        return self._refused(loss, 0.0)

    def _loss_with_graph(self, outputs: Any, batch: Any) -> Tensor:
        """Return what the criterion returns, with a graph, which tells what it divides by."""
        if not torch.is_grad_enabled() and not holds_numbers(outputs):  # as in an evaluation
            outputs = mapped(outputs, as_leaf)
        with torch.enable_grad():
            return self._criterion(*self._compared(outputs, batch))

    def _multiplier(self, loss: Tensor, items: float) -> float | None:
        """Return what makes a mean a sum over its items; None if it is not over these."""
        return items if self._checks is None else self._checks.multiplier(loss, items)

    def _refused(self, loss: Tensor, items: float) -> Tensor:
        """Refuse a loss that divides by something else than the items that were counted.

        One that is not finite tells nothing of its divisor: its step is skipped.
        """
        if not loss.detach().isfinite().all():
            return loss * math.nan
        text = f"{self.name} divides by something that earlier batches did not show: "
        divides = "is not 0"
        if self.candidates is not None and loss.grad_fn is not None:
            divides = _described(loss, self.candidates)
        if self._averages:
            counted = f"this one counts {items:g} items as the earlier ones do, and the loss"
        else:
            counted = "they show a sum, and this loss"
        refusal = f"{text}{counted} {divides}: {self.ways_out}"
        if self.alone:
            raise DivisorError(refusal)
        self._refusal = self._refusal or refusal
        return loss * math.nan

    def correct(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Count items whose largest logit is the target's, and all; None without classes."""
        if (classified := self.classified(outputs, batch)) is None:
            return None
        logits, targets = classified
        graded = targets != self.ignored
        return ((logits.argmax(-1) == targets) & graded).sum(), graded.sum()

    def classified(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Return logits [..., classes] and their classes [...]; None for other targets."""
        logits, targets = logits_of(outputs), self._labels(batch)
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
        if not self._classes or targets is None or targets.is_floating_point():
            return None
        if self._may_return and returned_loss(outputs) is not None:
            return None
        compared, _ = self._compared(outputs, batch)
        if not isinstance(compared, Tensor) or compared.ndim == 0:
            return None
        return int(compared.shape[1 if self._given and compared.ndim > 1 else -1])

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


def _described(loss: Tensor, candidates: Candidates) -> str:
    """Return what a loss does to what it has summed."""
    try:
        numbers = candidates.read(terms_of(loss))
    except GraphError as error:
        return f"is no mean over items, as {error}"
    return "divides by " + " and ".join(f"{number:g}" for number in dict.fromkeys(numbers))


def _nothing(own: Tensor | None, outputs: Any) -> Tensor:
    """Return 0, with a gradient of zeros for outputs; the gradient of a mean over none is NaN."""
    numbers = [tensor for tensor in held_tensors(outputs) if tensor.is_floating_point()]
    others = [tensor for tensor in numbers if tensor is not own] or numbers
    assert others, "the model returned no tensor"
    return zero_of(others)


def _is_penalty_alone(loss: Tensor, own: Tensor | None, outputs: Any) -> bool:
    """Return whether the gradient of a loss with respect to all outputs is 0."""
    tensors = [tensor for tensor in held_tensors(outputs) if tensor.requires_grad]
    others = [tensor for tensor in tensors if tensor is not own]
    if loss.grad_fn is None or not others:
        return False
    gradients = torch.autograd.grad(loss, others, retain_graph=True, allow_unused=True)
    return not any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _is_a_mean(stated: Loss) -> bool:
    """Return whether the loss is a mean, not a sum, unless it does not reduce."""
    reduction = option_of(stated.criterion, "reduction", "mean")
    if reduction == "none":
        raise ValueError(
            "the criterion has reduction='none' and returns a loss for each item: use "
            "reduction='mean', or 'sum' for steps that are not divided by the batch"
        )
    if reduction == "sum" and stated.criterion is not None and stated.items != "auto":
        raise ValueError(
            f"nothing divides a criterion with reduction='sum': leave loss.items={stated.items}"
            " out, or use reduction='mean'"
        )
    return bool(reduction != "sum")


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether a model compares each output with the label after it.

    Causal models of transformers do, unless an encoder reads the inputs and a decoder the shifted
    labels.
    """
    function = getattr(model, "loss_function", None)
    causal = getattr(function, "__name__", "") == "ForCausalLMLoss"
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return causal and not decodes
