"""Compare what each loss divides by with the items of its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runner.booster.candidates import (
    Candidate,
    Candidates,
    Observed,
    is_silent,
    is_zero,
    near,
    of_samples_in,
    tolerance_of,
)
from runner.booster.graph_places import GraphError, NotLinear
from runner.booster.loss_graph import terms_of
from runner.booster.terms import Term, class_weights_of
from runner.parallel.collectives import from_all

_KEPT = 8  # losses of a window that others are compared with
_CHECKED = 64  # windows on an accelerator; later one window in 64 is checked
_MOST_ACCEPTED = 8  # batches whose weights are too much alike to tell what they depend on
_SENT = 6  # numbers of a loss that ranks compare first


class UnshownWeights(Exception):
    """A loss weighs its items by numbers that were not there when it was measured.

    Args:
        weights: the weights of single elements; empty for weights of classes.
    """

    def __init__(self, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.weights = weights


class UnshownPart(Exception):
    """A loss has a part that was not there, or was multiplied by 0, when it was measured."""


class _Seen(NamedTuple):
    """A loss of this window."""

    observed: Observed
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
        of_measured = [len(observed.divisors) for observed in candidates.first.observed]
        self._most_parts: float = max(of_measured, default=math.inf)
        self._class_weights: list[Tensor] = []
        self._window: list[_Seen] = []
        self._windows = 0
        self._accepts_next = False
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
            ratios = _ratios(seen.observed, self._epsilon)[:_SENT]
            return [1.0, *ratios, *[0.0] * (_SENT - len(ratios))]
        return [0.0] * (_SENT + 1)

    def confirm(self) -> str:
        """Compare the losses of all ranks in this window; return what is wrong; a collective."""
        before: list[Observed] = []
        for window in from_all(self._window):
            for seen in window:
                if not self._agrees(seen, before):
                    return f"{self._text(seen.observed)}, and beside it {self._text(before[0])}"
                before.append(seen.observed)
        return ""

    def described(self, loss: Tensor, items: float) -> str:
        """Return what a loss divides by, and another one of this window, for a message."""
        try:
            seen = self._candidates.observe(items / self._scale, is_zero(loss), terms_of(loss))
        except GraphError as error:
            return f"this loss is no mean over items, as {error}"
        text = self._text(seen)
        if not self._window:
            return text
        return f"{text}, and beside it {self._text(self._window[0].observed)}"

    def _text(self, observed: Observed) -> str:
        items = observed.items * self._scale
        text = f"a loss of {items:g} items divides by {_listed(observed.divisors)}"
        if set(observed.factors) <= {1.0}:
            return text
        return f"{text} and multiplies with {_listed(observed.factors)}"

    def multiplier(self, loss: Tensor, items: float) -> float | None:
        """Return what makes the mean of a batch a sum over its items; None if it is over others.

        The number is as good as the items if the graph does not tell, or is not read.

        Raises:
            UnshownPart: the loss has more parts than when it was measured.
            UnshownWeights: the loss weighs its items in a way that was not measured.
        """
        candidates = self._candidates
        expected = items + self._epsilon
        if not self.reads(loss.device.type != "cpu"):
            return expected
        if loss.grad_fn is None or not math.isfinite(float(loss.detach())):
            return expected  # A loss that is not finite tells nothing: its step is skipped.
        try:
            terms = terms_of(loss)
        except NotLinear:
            return None
        except GraphError:
            return expected
        if not candidates.outer and len(of_samples_in(terms)) > self._most_parts:
            raise UnshownPart
        self._require_shown_weights(terms)
        if candidates.outer and len(terms) == 1:
            return expected
        if not items and is_silent(loss, terms):
            return expected
        return self._compared(loss, terms, items)

    def _require_shown_weights(self, terms: Sequence[Term]) -> None:
        """Require that weights of elements were measured, and weights of classes are as before."""
        weights = class_weights_of(terms)
        if len(weights) != len(self._class_weights):
            self._class_weights = weights  # the loss has another part, or is the first one
        for weight, before in zip(weights, self._class_weights, strict=True):
            if weight is not before and not _are_equal(weight, before):
                raise UnshownWeights
        if self._candidates.weighted or self._accepts_next:
            self._accepts_next = False
            return
        of_elements = [weight for term in terms if term.weighs_unequally for weight in term.weights]
        if of_elements:
            raise UnshownWeights(of_elements)

    def accept_parts(self, loss: Tensor) -> None:
        """Take all parts of a loss that was measured since for shown."""
        self._most_parts = max(self._most_parts, len(of_samples_in(terms_of(loss))))

    def accept_weights(self, once: bool) -> None:
        """Take the weights of a loss that was measured since for shown; ``once`` in this batch."""
        self._class_weights = []
        self._accepts_next = True
        self._accepted += once
        if not once or self._accepted >= _MOST_ACCEPTED:
            self._candidates.weighted = True

    def _compared(self, loss: Tensor, terms: Sequence[Term], items: float) -> float | None:
        candidates = self._candidates
        observed = candidates.observe(items / self._scale, is_zero(loss), terms)
        seen = _Seen(observed, max(candidates.tolerance, tolerance_of(loss, terms)))
        if not items and not observed.is_zero:
            return self._divisor_of_none(seen, terms)
        agrees = bool(items) and self._is_as_the_first(seen)
        if not agrees and not self._agrees(seen, [earlier.observed for earlier in self._window]):
            return None
        if len(self._window) < _KEPT and items:
            self._window.append(seen)
        return items + self._epsilon

    def _divisor_of_none(self, seen: _Seen, terms: Sequence[Term]) -> float | None:
        """Return what a batch without items divides by: an epsilon, or what one item divides by."""
        if any(term.is_penalty for term in terms):
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
        if not _are_near(seen.observed.factors, first.factors, seen.tolerance):
            return False
        return _are_near(_ratios(seen.observed), _ratios(first), seen.tolerance)

    def _agrees(self, seen: _Seen, earlier: Sequence[Observed]) -> bool:
        """Return whether a loss divides by the same multiple of its items as earlier ones."""
        divisor = self._candidates.divisor
        parts = len(seen.observed.divisors)
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
