"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

A mean of means would give a short microbatch, or one full of ignored targets, the weight of a full
one. So each contributes its *sum*, which is divided by the items of the whole window before the
backward pass, and so before clipping.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.booster.batch import Calls, batch_size, mapped, targets_of
from runner.booster.broadcast import BroadcastError, BroadcastWatch, is_compiled, would_broadcast
from runner.booster.candidates import Candidates, is_zero
from runner.booster.checks import Checks, Unshown
from runner.booster.comparison import Comparison, shape_of
from runner.booster.criterion import (
    Criterion,
    binary_outputs,
    compares_elements,
    cross_entropy_mean,
    cross_entropy_sum,
    is_of_torch,
    name_of,
    option_of,
    summed,
)
from runner.booster.divisor import NOTHING
from runner.booster.graph_places import NotLinear
from runner.booster.items import Count, DivisorError, ItemCounter, Loss, LossForm
from runner.booster.outputs import (
    as_leaf,
    holds_numbers,
    logits_of,
    not_reduced,
    nothing_of,
    returned_loss,
    sum_of,
    with_scalar_loss,
)
from runner.booster.variety import Variety
from runner.gradients.transfer import start_gather
from runner.parallel.collectives import from_all

__all__ = ["Count", "DivisorError", "Loss", "WindowLoss"]

WAYS_OUT = (
    'give it a method loss_items({}) that returns what its mean divides by, or reduction="sum", or '
    "set loss.items=samples, labels or none (the plain mean over microbatches, as in other "
    "trainers), which is Trainer(criterion=Loss(items=...)) in a script"
)


class WindowLoss:
    """Sum a criterion over microbatches, and count the items that its mean divides by.

    torch's cross entropy and negative log-likelihood are summed exactly. The mean of any other
    criterion is multiplied with the items: the samples, the elements of the targets if a criterion
    of torch averages these, the class targets that are not ignored, or what its method
    ``loss_items(targets)`` returns. Nothing divides ``reduction="sum"``.

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
        on_accelerator: whether the host waits for a loss that it reads.
        compares: brings outputs and targets to the shapes in which they are compared.
        variety: the kinds of values that no measured batch had; None if no batch may show more.
        measured: the last batch that was measured.
        look: measures a batch whose loss has something new; set by ``settle``. It returns whether
            later losses may have it too.
        is_zero_so_far: whether the losses of all batches so far were 0, up to penalties.
        tries: how many batches told nothing.
        warnings: what was warned of.
    """

    def __init__(self, model: nn.Module, criterion: Criterion | Loss | None = None) -> None:
        stated = criterion if isinstance(criterion, Loss) else Loss(criterion)
        criterion = stated.criterion
        self.name = name_of(criterion, model)
        self._stated_loss = stated
        self._averages = _is_a_mean(stated)
        method: Any = getattr(model, "loss", None)
        takes_batch = criterion is None and inspect.ismethod(method)
        may_return = criterion is None and not takes_batch
        self.call = Calls(model, whole=takes_batch, labelled=criterion is None).of
        self.binary = binary_outputs(criterion)

        # What is compared, and summed where that is exact
        in_sum = cross_entropy_sum if may_return else summed(criterion)
        exact = in_sum is not None and stated.items in ("auto", "labels")
        mean = cross_entropy_mean if may_return else criterion or method
        self._criterion: Criterion = in_sum if exact else mean  # type: ignore[assignment]
        self._watched = is_compiled(criterion)  # whether it was seen not to broadcast
        self._sums = exact or not self._averages
        self._form = LossForm(
            has_criterion=criterion is not None,
            takes_batch=takes_batch,
            may_return=may_return,
            compares_classes=in_sum is not None,
        )

        # What is counted
        self._counter = ItemCounter(model, stated, self._form)
        # The binary ones refuse other shapes themselves.
        by_element = compares_elements(criterion) and self.binary is None
        self.compares = Comparison(self.name, self._form, self._counter, by_element=by_element)
        by_construction = criterion is not None and (self._sums or is_of_torch(criterion))
        self.unproved = not (self._counter.is_stated or by_construction)
        self.is_zero_so_far = False
        self.tries = 0
        self.warnings: list[str] = []
        self.candidates: Candidates | None = None
        self.variety: Variety | None = None
        self.measured: Any = None
        self.look: Callable[[Any, Unshown], bool] | None = None
        self._checks: Checks | None = None
        self._scale = 1.0
        self._epsilon = 0.0
        self.alone = True
        self.on_accelerator = False
        self._refusal = ""
        self._total: Callable[[], Count] | None = None

    @property
    def takes_batch(self) -> bool:
        """Whether the model has a method ``loss(outputs, batch)``."""
        return self._form.takes_batch

    @property
    def may_return(self) -> bool:
        """Whether the loss may be in the model's outputs."""
        return self._form.may_return

    @property
    def ignored(self) -> int:
        """The label that is left out."""
        return self._counter.labels.ignored

    @property
    def criterion(self) -> Criterion:
        """What :meth:`sum` compares outputs and targets by, if the outputs hold no loss."""
        return self._criterion

    @property
    def is_settled(self) -> bool:
        """Whether no batch can tell more of what the mean divides by."""
        if self.unproved:
            return False
        if self.variety is not None and not self.variety.is_complete:
            return False
        return self.candidates is None or self.candidates.is_settled

    @property
    def compares_returned(self) -> bool:
        """Whether losses that the model returns are compared with their items."""
        return self._form.may_return and self._checks is not None

    @property
    def ways_out(self) -> str:
        """What to change if the mean is over something else than the items."""
        return WAYS_OUT.format("targets" if self._form.has_criterion else "batch")

    def mean(self, outputs: Any, batch: Any) -> Tensor:
        """Return what the criterion returns for a batch."""
        loss = self._called(outputs, batch)
        if loss.numel() != 1:
            raise DivisorError(not_reduced(self.name, loss))
        return loss.reshape(()) if loss.ndim else loss

    def counted_as(self, batch: Any) -> str:
        """Return what a message calls the items of a batch."""
        if self.candidates is not None:
            return self.candidates.divisor.described()
        return self._counter.described(batch)

    def reads_batch(self, batch: Any) -> bool:
        """Return whether the model can return a loss for such a batch.

        A model that gets one tensor and no targets returns logits, or a mean over samples.
        """
        args, kwargs = self.call(batch)
        return len(args) != 1 or bool(kwargs) or not isinstance(args[0], Tensor)

    def use(self, candidates: Candidates) -> None:
        """Count from now on what a measurement found that the mean divides by."""
        self.candidates = candidates
        self._checks = Checks(candidates)
        self._checks.begin_window()
        self._scale = candidates.scale
        self._epsilon = candidates.epsilon
        self.unproved = False
        self.is_zero_so_far = False
        self._averages = candidates.divisor.counts != NOTHING
        self._counter.use(candidates)

    def forget(self) -> None:
        """Forget what a loss of 0 was taken for, before another window is measured."""
        self.candidates = None
        self.is_zero_so_far = False
        self.variety = None
        self._checks = None
        self._scale = 1.0
        self._epsilon = 0.0
        self._averages = _is_a_mean(self._stated_loss)
        self._counter.use(None)

    @property
    def epsilon(self) -> float:
        """What the mean adds to the items that it divides by."""
        return self._epsilon

    def begin_window(self, total: Callable[[], Count] | None = None) -> None:
        """Begin to compare the losses of a window, or of an evaluation, with their items.

        ``total`` waits for the count of all microbatches of the window, over all ranks.
        """
        self._total = total
        if self._checks is not None:
            self._checks.begin_window()

    def confirm(self) -> None:
        """Compare the losses of a window, or of an evaluation, over all ranks; a collective.

        Raises:
            DivisorError: the loss of a rank divides by something else, on every rank.
        """
        checks = self._checks
        if checks is None or self.alone or not checks.reads(self.on_accelerator):
            return
        row = [float(bool(self._refusal)), *checks.row()]
        rows = start_gather(torch.tensor(row, dtype=torch.float64), None)().tolist()
        if any(refused for refused, *_ in rows):
            self.raise_refusal()
        shown = [numbers for _, shows, *numbers in rows if shows]
        if all(numbers == shown[0] for numbers in shown):
            return
        problem = checks.confirm()
        if problem:
            raise DivisorError(
                f"{self.name} is no mean over the same items: {problem}: {self.ways_out}"
            )

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
            state["variety"] = None if self.variety is None else self.variety.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, unless what a mean divides by is known here."""
        if not self.unproved:
            return
        is_known = "candidates" in state and "forms" in state["candidates"]
        if "divisor" in state or ("candidates" in state and not is_known):
            return  # An earlier version found it in another way: it is measured again.
        if "candidates" in state:
            self.use(Candidates.from_state_dict(state["candidates"]))
            variety = state["variety"]
            self.variety = None if variety is None else Variety.from_state_dict(variety)
        self.unproved = state["unproved"]

    def items(self, batch: Any) -> Count:
        """Count a batch."""
        count = self._counter.count(batch, self.candidates)
        if self.is_zero_so_far:
            return count._replace(items=0.0)
        return count

    def divisor(self, items: float) -> float:
        """Return what the summed loss of a window with ``items`` is divided by."""
        if not self._averages:
            return 1.0
        return (items or self._scale) + self._epsilon

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs; their ``logits``, if there are any and no loss."""
        args, kwargs = self.call(batch)
        outputs = model(*args, **kwargs)
        if self._form.may_return:
            outputs = with_scalar_loss(outputs)
            if returned_loss(outputs) is not None:
                return outputs
        return logits_of(outputs)

    def sum(self, outputs: Any, batch: Any, items: float | None) -> Tensor:
        """Sum the item losses of a microbatch; 0, with a gradient of zeros, if it has no weight.

        Raises:
            DivisorError: the loss divides by something else than the items that were counted.
        """
        returned = returned_loss(outputs) if self._form.may_return else None
        if items is None:
            return nothing_of(returned, outputs)
        try:
            return self._summed(returned, outputs, batch, items)
        except DivisorError as error:
            if self.alone:
                raise
            self._refusal = self._refusal or str(error)
            return sum_of(outputs) * math.nan

    def _summed(self, returned: Tensor | None, outputs: Any, batch: Any, items: float) -> Tensor:
        is_sum = not self._averages or (self._sums and returned is None)
        if items == 0 and not is_sum:
            return self._of_no_items(returned, outputs, batch)
        if is_sum and self._averages:
            return self._called(outputs, batch)  # summed exactly
        loss = self._loss_with_graph(outputs, batch) if returned is None else returned
        counted = self._scale if is_sum else items
        multiplier = self._multiplier(loss, counted, batch, outputs)
        if multiplier is None:
            return self._refused(loss, counted)
        return loss if is_sum else loss * multiplier

    def _of_no_items(self, returned: Tensor | None, outputs: Any, batch: Any) -> Tensor:
        """Return the summed loss of a batch without items: mostly 0, or NaN as a mean over none."""
        if self.candidates is not None and self.candidates.known:
            return nothing_of(returned, outputs)
        loss = self._loss_with_graph(outputs, batch) if returned is None else returned
        if self.is_zero_so_far and not bool(loss.isfinite()):
            return loss  # its step is skipped
        if is_zero(loss):
            return nothing_of(returned, outputs)
        if self.unproved and self.candidates is None and not self.is_zero_so_far:
            return loss  # the only microbatch of a step, which nothing is weighed against
        multiplier: float | None = 0.0
        if not self.is_zero_so_far:
            multiplier = self._multiplier(loss, 0.0, batch, outputs)
        if multiplier is None or loss.grad_fn is None:
            return self._refused(loss, 0.0)
        if multiplier:
            return loss * multiplier
        # A penalty of parameters. Microbatches with items count it already, if there are any.
        total = None if self._total is None else self._total()
        if total is None or total.items:
            return nothing_of(returned, outputs)
        return loss * (self.divisor(0.0) * batch_size(batch) / total.samples)

    def _loss_with_graph(self, outputs: Any, batch: Any) -> Tensor:
        """Return what the criterion returns, with a graph, which tells what it divides by."""
        if not torch.is_grad_enabled() and not holds_numbers(outputs):  # as in an evaluation
            outputs = mapped(outputs, as_leaf)
        with torch.enable_grad():
            return self.mean(outputs, batch)

    def _called(self, outputs: Any, batch: Any) -> Tensor:
        """Return what the criterion returns, watched in its first call.

        Raises:
            BroadcastError: it compares outputs [B, 1] with targets [B], each with all.
        """
        arguments = self.compares.arguments(outputs, batch)
        if self._watched:
            return self._criterion(*arguments)
        numbers = logits_of(outputs)
        targets = targets_of(batch)
        if targets is None or not would_broadcast(numbers, targets):
            self._watched = targets is None or targets.numel() > 1
            return self._criterion(*arguments)
        with BroadcastWatch(numbers, targets) as watch:
            loss = self._criterion(*arguments)
        if watch.broadcast:
            shapes = f"outputs {shape_of(numbers)} with targets {shape_of(targets)}"
            raise BroadcastError(
                f"{self.name} compares {shapes}, so each output with all targets: give both the "
                "same shape"
            )
        self._watched = True
        return loss

    def _multiplier(self, loss: Tensor, items: float, batch: Any, outputs: Any) -> float | None:
        """Return what makes a mean a sum over its items; None if it is not over these."""
        checks = self._checks
        if checks is None:
            return items
        try:
            terms = checks.read(loss, outputs)
        except NotLinear:
            return None
        if terms is None:
            return checks.expected(items)
        unshown = checks.unshown(terms)
        if unshown is not None:
            is_shown = self.look is None or self.look(batch, unshown)
            checks.accept(terms, once=not is_shown)
        return checks.multiplier(loss, terms, items, batch)

    def _refused(self, loss: Tensor, items: float) -> Tensor:
        """Refuse a loss that divides by something else than the items that were counted.

        One that is not finite tells nothing of its divisor: its step is skipped.
        """
        if not loss.detach().isfinite().all():
            return loss * math.nan
        text = "this batch has no items, and its loss is not 0"
        if self._checks is not None and loss.grad_fn is not None:
            text = self._checks.described(loss, items)
        unshown = f"{self.name} divides by something that earlier batches did not show"
        raise DivisorError(f"{unshown}: {text}: {self.ways_out}")


def _is_a_mean(stated: Loss) -> bool:
    """Return whether the loss is a mean, not a sum, unless it is one of torch for each item."""
    reduction = option_of(stated.criterion, "reduction", "mean")
    if reduction == "none" and is_of_torch(stated.criterion):
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
