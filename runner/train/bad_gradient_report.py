"""Describe a gradient that is not finite: which parameters, ranks, microbatch and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from runner.config.notation import first_few, ranks_as_text, rounded
from runner.config.problem import or_list
from runner.train.forward_order import Position, in_order

MOST_SAMPLES = 16
"""Number of sample indices in a description."""


class RankReport(NamedTuple):
    """What one rank knows of a step whose gradient is not finite.

    Attributes:
        rank: number of the rank.
        data_rank: data-parallel rank, which tells the samples that it read.
        positions: see :meth:`runner.train.forward_order.ForwardOrder.positions`.
        bad: parameters whose final gradient, as far as it lies on this rank, is not finite.
        weights: parameters that are not finite themselves.
        largest: the largest |weight| on this rank among finite parameters, with its name.
        losses: loss of each microbatch; 0 on a rank that does not have the loss.
        traced: see :meth:`runner.train.gradient_trace.GradientTrace.found`; None if gradients were
            not checked before ranks and microbatches were combined.
    """

    rank: int
    data_rank: int
    positions: dict[str, Position]
    bad: list[str]
    weights: list[str]
    largest: tuple[float, str]
    losses: list[float]
    traced: list[tuple[int, str]] | None


class Origin(NamedTuple):
    """Where a bad gradient came from, as far as that is known.

    Attributes:
        ranks: ranks that had it first; empty if that is not known.
        microbatch: number of the microbatch, from 1; None if that is not known.
        loss: loss of that microbatch, if it is not finite.
    """

    ranks: list[int]
    microbatch: int | None
    loss: float | None = None


class Description(NamedTuple):
    """A description of a bad gradient.

    Attributes:
        text: one line, without the samples.
        located: whether it says which rank and microbatch the gradient came from.
        samples: indices of all samples of that rank and microbatch; None if they are not known.
    """

    text: str
    located: bool
    samples: list[int] | None

    def with_samples(self) -> str:
        """Return the text and the first samples."""
        if not self.located:
            return self.text
        if self.samples is None:
            return f"{self.text}. Only loaders of plugin.prepare_dataloader tell its samples"
        some = first_few([str(index) for index in self.samples], MOST_SAMPLES)
        return f"{self.text}. Its samples: {some}"


def describe(
    reports: Sequence[RankReport],
    norm: float,
    samples_of: Callable[[int], Sequence[Sequence[int]] | None],
) -> Description:
    """Describe a gradient that is not finite, the same on every rank.

    Args:
        reports: reports of all ranks.
        norm: norm of the gradient.
        samples_of: returns the sample indices that each data-parallel rank read in a microbatch
            of the step, from 1; None if the loader does not tell them.
    """
    order = in_order(report.positions for report in reports)
    bad = {name for report in reports for name in report.bad}
    origin = _origin(reports)
    located = bool(origin.ranks) and origin.microbatch is not None
    samples = _samples(reports, origin, samples_of) if located else None
    text = f"the gradient's norm is {norm}: {_parameters(order, bad)}"
    text += _place(reports, origin)
    return Description(f"{text}. {_reason(reports, order, bad, origin)}", located, samples)


def advice_on_skips(rate: float, precision: torch.dtype | None) -> str:
    """Say what to try against steps that are all skipped.

    Args:
        rate: learning rate.
        precision: dtype of the forward pass, or None for full precision.
    """
    tried = [
        f"a lower learning rate (now {rounded(rate)})",
        "a longer warm-up of it (scheduler=linear_warmup_cosine)",
    ]
    if precision is torch.float16:
        tried.append("precision=bf16 or fp32")
    elif precision is torch.bfloat16:
        tried.append("precision=fp32")
    return f"try {or_list(tried)}; clip.max_skips sets how many skipped steps end a run"


def _origin(reports: Sequence[RankReport]) -> Origin:
    """Return the first microbatch with a bad loss or, before it, with a bad gradient of its own."""
    losses = {
        (number, report.rank): loss
        for report in reports
        for number, loss in enumerate(report.losses, 1)
        if not math.isfinite(loss)
    }
    traced = {(number, r.rank) for r in reports for number, _ in r.traced or ()}
    if not losses and not traced:
        everywhere = len({report.data_rank for report in reports}) == 1
        only = 1 if len(reports[0].losses) == 1 else None
        if everywhere and only and not any(report.traced == [] for report in reports):
            return Origin(_holders(reports), 1)
        return Origin([], only)
    first = min(number for number, _ in [*losses, *traced])
    at_fault = {at: loss for at, loss in losses.items() if at[0] == first}
    ranks = sorted(rank for number, rank in at_fault or traced if number == first)
    return Origin(ranks, first, next(iter(at_fault.values()), None))


def _holders(reports: Sequence[RankReport]) -> list[int]:
    return [report.rank for report in reports if report.bad]


def _samples(
    reports: Sequence[RankReport],
    origin: Origin,
    samples_of: Callable[[int], Sequence[Sequence[int]] | None],
) -> list[int] | None:
    assert origin.microbatch is not None
    parts = samples_of(origin.microbatch)
    if parts is None:
        return None
    read_by = sorted({report.data_rank for report in reports if report.rank in origin.ranks})
    return [index for data_rank in read_by for index in parts[data_rank]]


def _place(reports: Sequence[RankReport], origin: Origin) -> str:
    """Say which ranks and which microbatch the gradient came from."""
    count, several = len(reports[0].losses), len(reports) > 1
    microbatch = f"microbatch {origin.microbatch} of {count}" if origin.microbatch else ""
    if origin.ranks:
        rank = ranks_as_text(origin.ranks) if several else ""
        return f", from {', '.join(part for part in (rank, microbatch) if part)}"
    holders = _holders(reports)
    held = ""
    if several:
        all_of = len(holders) == len(reports)
        held = ", on every rank" if all_of else f", held by {ranks_as_text(holders)}"
    if any(report.traced is not None for report in reports):
        return f"{held}; before they were combined, all gradients were finite"
    unknown = "rank" if count == 1 else "rank and microbatch" if several else "microbatch"
    return f"{held}; which {unknown} it came from is not known, because gradients are combined " + (
        "before they are checked"
    )


def _reason(
    reports: Sequence[RankReport], order: Sequence[str], bad: Collection[str], origin: Origin
) -> str:
    """Say in which part of the computation to look."""
    weights = {name for report in reports for name in report.weights}
    if weights:
        named = first_few([name for name in order if name in weights])
        return f"Weights are not finite themselves: {named}"
    if origin.loss is not None:
        size, name = max(report.largest for report in reports)
        return (
            f"The loss of this microbatch is {origin.loss}; the largest weight is {rounded(size)}, "
            f"in {name}"
        )
    last = max((i for i, name in enumerate(order) if name in bad), default=None)
    if last is None:
        return "All losses are finite"
    begins = f"at {order[last]}, or after it"
    if last + 1 < len(order):
        begins = f"between {order[last + 1]} and {order[last]}"
    return f"All losses are finite: the backward pass goes wrong {begins}"


def _parameters(order: Sequence[str], bad: Collection[str]) -> str:
    """List bad parameters in the order of the forward pass, with their clean neighbours."""
    runs = list(_runs(order, bad))
    if len(bad) == len(order):
        return f"all {len(order)} parameters" if len(order) > 1 else order[0]
    return "; ".join(_run(order, *run) for run in runs[:3]) + (
        f"; and {len(runs) - 3} more groups of parameters" if len(runs) > 3 else ""
    )


def _runs(order: Sequence[str], bad: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of bad parameters."""
    start = None
    for i, name in enumerate([*order, ""]):
        if name in bad and start is None:
            start = i
        elif name not in bad and start is not None:
            yield start, i
            start = None


def _run(order: Sequence[str], start: int, end: int) -> str:
    names = list(order[start:end])
    listed = ", ".join(names) if len(names) <= 6 else f"{names[0]} to {names[-1]}"
    counted = listed if len(names) <= 6 else f"{listed} ({len(names)} parameters)"
    clean = [f"after {order[start - 1]}"] if start else []
    clean += [f"before {order[end]}"] if end < len(order) else []
    finite = "which are finite" if len(clean) > 1 else "which is finite"
    return f"{counted} ({' and '.join(clean)}, {finite})"
