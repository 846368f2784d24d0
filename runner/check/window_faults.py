"""Which mistake of accumulation gives a wrong gradient: each one gives a gradient, or a factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runner.check.window import Fit, Gradient, Window, added
from runner.config.notation import first_few, ranks_as_text


class Candidate(NamedTuple):
    """A mistake, and the gradient that it gives."""

    sentence: str
    gradient: Gradient


class Accumulated(NamedTuple):
    """A window as all ranks saw it.

    Attributes:
        window: its microbatches.
        gradient: the gradient that the loop has accumulated.
        reference: the right one.
        before: the gradient before the window.
        counts: items of each microbatch on each rank.
        full: microbatches of a full window, None if not known.
    """

    window: Window
    gradient: Gradient
    reference: Gradient
    before: Gradient
    counts: list[list[float]]
    full: int | None


def of_gradient(accumulated: Accumulated, fit: Fit, tolerance: float) -> str:
    """Return the mistake that gives this gradient; a collective."""
    tolerance = max(tolerance, 1e-6)
    if fit.residual <= tolerance:
        return _of_scale(accumulated, fit.scale, "the gradient")
    items = "; ".join(
        f"{first_few([f'{count:g}' for count in row], 8)} on {ranks_as_text([rank])}"
        for rank, row in enumerate(accumulated.counts)
    )
    window = accumulated.window
    for candidate in _candidates(accumulated):
        scale, residual, _ = window.fit(accumulated.gradient, candidate.gradient)
        if residual <= tolerance:
            text = f"{candidate.sentence} (items: {items})"
            if not _is(scale, 1.0):
                text += f"; and {_of_scale(accumulated, scale, 'that')}"
            return text
    return (
        f"the gradient is not that of Σ losses ÷ Σ items: off by {fit.error:.3g} of its norm, "
        f"and no known mistake gives it (items: {items}); other samples, other random numbers, "
        "or batch norm, would"
    )


def _candidates(accumulated: Accumulated) -> Iterator[Candidate]:
    """Yield mistakes, the commonest first; each gradient is a collective."""
    window = accumulated.window
    several_ranks = window.ranks.size > 1
    counts = accumulated.counts[window.ranks.rank]
    number = len(counts)
    items = math.fsum(counts)
    means = [1 / (count * number) if count else 0.0 for count in counts]
    yield Candidate(
        "a mean of means: each microbatch counts the same, however many items it has",
        window.gradient(means),
    )
    if several_ranks:
        yield Candidate(
            "each rank divides by its own items, not by the items of all ranks",
            window.gradient([1 / items if items else 0.0] * number),
        )
    yield Candidate(
        "only the last microbatch counts: gradients were zeroed between",
        window.gradient(_only(counts, number - 1)),
    )
    yield Candidate("only the first microbatch counts", window.gradient(_only(counts, 0)))
    if any(gradient is not None for gradient in accumulated.before):
        yield Candidate(
            "gradients of the window before were added: zero_grad() is missing",
            added(accumulated.reference, accumulated.before),
        )
    if several_ranks and not window.shards:
        yield Candidate(
            "the gradient of this rank alone: it was never sent",
            window.gradient_alone([1 / max(items, 1.0)] * number),
        )
        yield Candidate(
            "the gradient of this rank alone, as a mean of means: it was never sent",
            window.gradient_alone(means),
        )


def _only(counts: Sequence[float], position: int) -> list[float]:
    """Return the weights with which one microbatch counts alone, as the mean of its items."""
    weights = [0.0] * len(counts)
    weights[position] = 1 / counts[position] if counts[position] else 0.0
    return weights


def _of_scale(accumulated: Accumulated, scale: float, what: str) -> str:
    """Return what a gradient of the right direction, but of another length, comes from."""
    number = len(accumulated.window.batches)
    full = accumulated.full
    text = f"{what} is {scale:.4g} times what it should be"
    if full and full != number and _is(scale, number / full):
        return (
            f"{text}: divided by the full window of {full} microbatches, but this one has {number}"
        )
    for factor, reason in _factors(accumulated):
        if not _is(factor, 1.0) and _is(scale, factor):
            return f"{text}: {reason}"
    for guess in range(number + 1, 65):
        if _is(scale, number / guess):
            return f"{text}: divided by a full window of {guess}, but this one has {number}"
    if scale < 1:
        return f"{text}: was it clipped inside of the window?"
    return f"{text}: was it scaled for fp16?"


def _factors(accumulated: Accumulated) -> list[tuple[float, str]]:
    """Return factors, and the mistakes that multiply a gradient by them."""
    number = len(accumulated.window.batches)
    size = accumulated.window.ranks.size
    total = math.fsum(sum(row) for row in accumulated.counts)
    return [
        (float(number), "not divided by the number of microbatches"),
        (1 / number, "divided twice by the number of microbatches"),
        (total, "losses were added, and not divided by the number of items"),
        (total / size, "losses were added, and not divided by the number of items"),
        (total / number, "losses were divided by the number of microbatches, not of items"),
        (float(size), "added over ranks instead of averaged"),
        (1 / size, "averaged twice over ranks"),
        (float(number * size), "not divided by the number of microbatches, nor of ranks"),
        (2.0, "each microbatch was added twice"),
    ]


def _is(value: float, factor: float) -> bool:
    return abs(value - factor) <= 1e-3 * abs(factor)
