"""Compare what each loss divides by with the items of its batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.booster.candidates import (
    Candidate,
    Candidates,
    Observed,
    is_silent,
    is_without_samples,
    near,
    numbers_of,
    of_samples_in,
    tolerance_of,
)
from runner.booster.graph_places import GraphError, NotLinear, Recorded
from runner.booster.loss_graph import terms_of
from runner.booster.terms import MASKED, Form, Term, class_weights_of, forms_of, penalties_of
from runner.parallel.collectives import from_all
from runner.parallel.hooks import held_tensors

_KEPT = 8  # losses of a window that others are compared with
_CHECKED = 64  # windows on an accelerator; later one window in 64 is checked
_MOST_ACCEPTED = 8  # batches whose weights are too much alike to tell what they depend on
_SENT = 6  # numbers of a loss that ranks compare first


class Unshown(NamedTuple):
    """What a loss has that no measured loss had.

    Attributes:
        is_part: a part, or operations that may select samples.
        changes_classes: weights of classes.
        masks: weights of single elements, some of which are 0.
        weights: weights of single elements that differ from one another.
    """

    is_part: bool
    changes_classes: bool
    masks: list[Tensor]
    weights: list[Tensor]


class _Seen(NamedTuple):
    """A loss of this window."""

    observed: Observed
    penalties: list[float]
    tolerance: float


class Checks:
    """Compares what the losses of a window divide by with the items that were counted.

    Microbatches have the right weights if each part of their losses divides by the same multiple of
    their items. The losses of a window are compared with one another alone, on all ranks, as a
    number that divides all of them, such as a temperature, may change from step to step.

    Args:
        candidates: how items are counted, and what was measured.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._scale = candidates.scale
        self._epsilon = candidates.epsilon
        self._class_weights: list[Tensor] = []
        self._window: list[_Seen] = []
        self._windows = 0
        self._accepted = 0

    def begin_window(self) -> None:
        """Begin a window of microbatches, or an evaluation."""
        self._window = []
        self._windows += 1

    def reads(self, on_accelerator: bool) -> bool:
        """Return whether losses of this window are read; to read one waits for an accelerator."""
        return not on_accelerator or self._windows <= _CHECKED or not self._windows % _CHECKED

    def row(self) -> list[float]:
        """Return numbers of a loss of this window, which are equal on all ranks in most windows."""
        for seen in self._window:
            numbers = [*_ratios(seen.observed, self._epsilon), *seen.penalties][:_SENT]
            return [1.0, *numbers, *[0.0] * (_SENT - len(numbers))]
        return [0.0] * (_SENT + 1)

    def confirm(self) -> str:
        """Compare the losses of all ranks in this window; return what is wrong; a collective."""
        before: list[_Seen] = []
        for window in from_all(self._window):
            for seen in window:
                if not self._agrees(seen, before):
                    return self._text(seen, before)
                before.append(seen)
        return ""

    def described(self, loss: Tensor, items: float) -> str:
        """Return what a loss divides by, and another one of this window, for a message."""
        try:
            terms = terms_of(loss)
        except GraphError as error:
            return f"this loss is no mean over items, as {error}"
        return self._text(self._seen(loss, terms, items, None), self._window)

    def _text(self, seen: _Seen, before: Sequence[_Seen]) -> str:
        if not before:
            return self._text_of(seen.observed)
        first = before[0]
        if not _have_equal_penalties(seen, first):
            numbers = f"{_listed(seen.penalties)}, and beside it with {_listed(first.penalties)}"
            return f"a loss multiplies a penalty of parameters with {numbers}"
        return f"{self._text_of(seen.observed)}, and beside it {self._text_of(first.observed)}"

    def _text_of(self, observed: Observed) -> str:
        items = observed.items * self._scale
        text = f"a loss of {items:g} items divides by {_listed(observed.divisors)}"
        if set(observed.factors) <= {1.0}:
            return text
        return f"{text} and multiplies with {_listed(observed.factors)}"

    def expected(self, items: float) -> float:
        """Return what makes the mean of a batch a sum over its items, if it is over these."""
        return items + self._epsilon

    def read(self, loss: Tensor, outputs: Any) -> list[Term] | None:
        """Return the parts of a loss; None if the graph does not tell, or is not read.

        A loss that is not finite tells nothing: its step is skipped.

        Raises:
            NotLinear: the loss is no mean.
        """
        if not self.reads(loss.device.type != "cpu"):
            return None
        if loss.grad_fn is None or not math.isfinite(float(loss.detach())):
            return None
        nodes = [tensor.grad_fn for tensor in held_tensors(outputs) if tensor is not loss]
        ends = frozenset(node for node in nodes if node is not None)
        try:
            return terms_of(loss, Recorded(outputs=ends))
        except NotLinear:
            raise
        except GraphError:
            return None

    def unshown(self, terms: Sequence[Term]) -> Unshown | None:
        """Return what a loss has that no measured loss had; None if that is nothing."""
        weights = class_weights_of(terms)
        if len(weights) != len(self._class_weights):
            self._class_weights = weights  # the loss has another part, or is the first one
        pairs = zip(weights, self._class_weights, strict=True)
        changes_classes = any(not (a is b or _are_equal(a, b)) for a, b in pairs)
        forms = self._unshown_forms(forms_of(terms))
        masks: list[Tensor] = []
        of_elements: list[Tensor] = []
        for term in terms:
            if MASKED in term.form and forms:
                masks += [weight for weight in term.weights if not bool(weight.all())]
            if term.weighs_unequally and not self._candidates.weighted:
                of_elements += term.weights
        is_part = any(MASKED not in form for form in forms)
        if not (forms or changes_classes or of_elements):
            return None
        return Unshown(is_part, changes_classes, masks, of_elements)

    def _unshown_forms(self, forms: Sequence[Form]) -> list[Form]:
        """Return forms that no measured loss had, or had not so often."""
        if self._candidates.outer:
            return [form for form in forms if form not in self._candidates.forms]
        return list((Counter(forms) - Counter(self._candidates.forms)).elements())

    def accept(self, terms: Sequence[Term], once: bool) -> None:
        """Take what a loss has for measured; its weights in this batch alone if ``once``."""
        self._candidates.forms = self._candidates.forms_with(forms_of(terms))
        self._class_weights = class_weights_of(terms)
        self._accepted += once
        has_weights = any(term.weighs_unequally for term in terms)
        if has_weights and (not once or self._accepted >= _MOST_ACCEPTED):
            self._candidates.weighted = True

    def multiplier(
        self, loss: Tensor, terms: Sequence[Term], items: float, batch: Any
    ) -> float | None:
        """Return what makes the mean of a batch a sum over its items; None if it is over others."""
        expected = self.expected(items)
        if self._candidates.outer and len(terms) == 1:
            return expected
        if not items and is_silent(loss, terms):
            return expected
        if not items and all(term.is_nothing for term in of_samples_in(terms)):
            return 0.0  # penalties of parameters alone
        seen = self._seen(loss, terms, items, batch)
        if not items and not seen.observed.is_zero:
            return self._divisor_of_none(seen, terms)
        agrees = bool(items) and self._is_as_the_first(seen)
        if not agrees and not self._agrees(seen, self._window):
            return None
        if len(self._window) < _KEPT and items:
            self._window.append(seen)
        return expected

    def _seen(self, loss: Tensor, terms: Sequence[Term], items: float, batch: Any) -> _Seen:
        candidates = self._candidates
        is_nothing = is_without_samples(loss, terms)
        numbers = numbers_of(batch)
        observed = candidates.observe(items / self._scale, is_nothing, terms, numbers)
        tolerance = max(candidates.tolerance, tolerance_of(loss, terms, batch))
        return _Seen(observed, penalties_of(terms), tolerance)

    def _divisor_of_none(self, seen: _Seen, terms: Sequence[Term]) -> float | None:
        """Return what a batch without items divides by: an epsilon, or what one item divides by."""
        first = self._candidates.first
        if first.has_constant_part(seen.tolerance) or any(term.is_penalty for term in terms):
            return None  # which would have the weight of an item
        for number in (self._scale, self._epsilon):
            if all(near(divisor, number, seen.tolerance) for divisor in seen.observed.divisors):
                return number
        return None

    def _is_as_the_first(self, seen: _Seen) -> bool:
        """Return whether a loss divides by the same for each item as the first one."""
        if not self._window:
            return True
        first = self._window[0].observed
        if len(seen.observed.divisors) != len(first.divisors):
            return False
        if not _have_equal_penalties(seen, self._window[0]):
            return False
        if not _are_near(seen.observed.factors, first.factors, seen.tolerance):
            return False
        return _are_near(_ratios(seen.observed), _ratios(first), seen.tolerance)

    def _agrees(self, seen: _Seen, before: Sequence[_Seen]) -> bool:
        """Return whether a loss divides by the same multiple of its items as earlier ones."""
        if before and not _have_equal_penalties(seen, before[0]):
            return False
        divisor = self._candidates.divisor
        parts = len(seen.observed.divisors)
        earlier = [other.observed for other in before]
        same_form = [loss for loss in earlier if len(loss.divisors) == parts]
        if not Candidate(divisor, [*same_form, seen.observed]).fits(seen.tolerance):
            return False
        if same_form or seen.observed.is_zero:
            return True
        # A loss of other parts, such as one without its term of positive samples.
        with_items = [loss for loss in earlier if loss.items]
        if not with_items or not seen.observed.items:
            return True
        ratios = _ratios(seen.observed)
        expected = _ratios(with_items[0])
        return _are_among(ratios, expected, seen.tolerance) and _are_among(
            expected, ratios, seen.tolerance
        )


def _have_equal_penalties(first: _Seen, second: _Seen) -> bool:
    """Return whether two losses multiply as many penalties with the same numbers."""
    if len(first.penalties) != len(second.penalties):
        return True  # One of them may be there in some batches alone.
    return _are_near(first.penalties, second.penalties, first.tolerance)


def _ratios(observed: Observed, epsilon: float = 0.0) -> list[float]:
    """Return what each part divides by for each item, also by the number that multiplies it."""
    factors = observed.factors or (1.0,) * len(observed.divisors)
    ratios = []
    for divisor, factor in zip(observed.divisors, factors, strict=True):
        ratios.append((divisor - epsilon) / (observed.items * (factor or 1.0)))
    return ratios


def _listed(numbers: Iterable[float]) -> str:
    return " and ".join(f"{number:g}" for number in dict.fromkeys(numbers))


def _are_near(numbers: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """Return whether each number is near the expected one at its place."""
    pairs = zip(numbers, expected, strict=True)
    return all(near(number, candidate, tolerance) for number, candidate in pairs)


def _are_among(numbers: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """Return whether each number is near one of those that are expected."""
    for number in numbers:
        if not any(near(number, candidate, tolerance) for candidate in expected):
            return False
    return True


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return (
        first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    )
