"""Compare what each loss divides by with the items of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from torch import Tensor

from runner.booster.candidates import (
    Candidate,
    Candidates,
    Observed,
    is_silent,
    is_zero,
    near,
    tolerance_of,
)
from runner.booster.loss_graph import GraphError, NotLinear, Term, terms_of
from runner.parallel.collectives import from_all

_KEPT = 8  # losses of a window that later ones are compared with
_CHECKED = 64  # windows on an accelerator; later one window in 64 is checked
_MOST_CONFIRMED = 8  # windows that ranks compare until one tells what their losses divide by


class _Seen(NamedTuple):
    """A loss of this window."""

    observed: Observed
    tolerance: float


class Checks:
    """Compares what the losses of a window divide by with the items that were counted.

    Microbatches have the right weights if each part of their losses divides by the same multiple of
    their items. One process compares only the losses of one window: a number that divides all of
    them, such as a temperature, may change from step to step. A rank does not see the losses of
    other ranks. It compares its own with the measured losses or, in training, with the losses of
    all ranks in the first window.

    Args:
        candidates: how items are counted, and what was measured.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._scale = candidates.scale
        self._epsilon = candidates.epsilon
        self._measured = [seen for seen in candidates.first.observed if seen.items]
        self._of_training: list[Observed] = []
        self._confirmed = 0
        self._window: list[_Seen] = []
        self._windows = 0
        self._trains = True
        self._alone = True

    def begin_window(self, trains: bool, alone: bool) -> None:
        """Begin a window of microbatches, or an evaluation.

        Args:
            trains: whether it is a window, of which :meth:`confirm` compares the first one.
            alone: whether there is one process.
        """
        self._window = []
        self._windows += 1
        self._trains = trains
        self._alone = alone

    @property
    def is_confirmed(self) -> bool:
        """Whether :meth:`confirm` has compared a window that tells what losses divide by."""
        return bool(self._of_training) or self._confirmed >= _MOST_CONFIRMED

    def confirm(self) -> str:
        """Compare the first windows of all ranks; return what is wrong; a collective."""
        self._confirmed += 1
        of_all_ranks = [seen for of_rank in from_all(self._window) for seen in of_rank]
        before: list[_Seen] = []
        for seen in of_all_ranks:
            if not self._agrees(seen, [earlier.observed for earlier in before]):
                numbers = " and ".join(f"{number:g}" for number in seen.observed.divisors)
                return f"the losses of ranks divide by other multiples of their items ({numbers})"
            before.append(seen)
        self._of_training = [seen.observed for seen in before if seen.observed.items]
        return ""

    def multiplier(self, loss: Tensor, items: float) -> float | None:
        """Return what makes the mean of a batch a sum over its items; None if it is over others.

        The number is as good as the items if the graph does not tell, or is not read: to read a
        number waits for an accelerator.
        """
        candidates = self._candidates
        expected = items + self._epsilon
        on_accelerator = loss.device.type != "cpu"
        if on_accelerator and self._windows > _CHECKED and self._windows % _CHECKED:
            return expected
        if loss.grad_fn is None or not isfinite(float(loss.detach())):
            return expected  # A loss that is not finite tells nothing: its step is skipped.
        try:
            terms = terms_of(loss)
        except NotLinear:
            return None
        except GraphError:
            return expected
        if candidates.outer and len(terms) == 1:
            return expected
        if not items and is_silent(loss, terms):
            return expected
        return self._compared(loss, terms, items)

    def _compared(self, loss: Tensor, terms: Sequence[Term], items: float) -> float | None:
        candidates = self._candidates
        observed = Observed(items / self._scale, candidates.read(terms), is_zero(loss))
        seen = _Seen(observed, max(candidates.tolerance, tolerance_of(loss, terms)))
        if not items and not observed.is_zero:
            return self._divisor_of_none(seen, terms)
        earlier = [seen.observed for seen in self._window]
        if not self._agrees(seen, [*self._reference(), *earlier]):
            return None
        if len(self._window) < _KEPT and items:
            self._window.append(seen)
        return items + self._epsilon

    def _divisor_of_none(self, seen: _Seen, terms: Sequence[Term]) -> float | None:
        """Return what a batch without items divides by: an epsilon, or what one item divides by."""
        if any(term.is_penalty for term in terms):
            return None  # which would have the weight of an item
        for number in (self._scale, self._epsilon):
            divisors = seen.observed.divisors
            if all(near(divisor, number, seen.tolerance) for divisor in divisors):
                return number
        return None

    def _reference(self) -> list[Observed]:
        """Return what the losses of this window are compared with beside one another."""
        if self._alone:
            return []
        if self._trains:
            return self._of_training
        return self._measured

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


def _ratios(observed: Observed) -> list[float]:
    return [divisor / observed.items for divisor in observed.divisors]


def _are_among(numbers: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """Return whether each number is near one of those that are expected."""
    for number in numbers:
        if not any(near(number, candidate, tolerance) for candidate in expected):
            return False
    return True
