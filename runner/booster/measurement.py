"""Find what the mean of a loss divides by, before the first step.

The graph of a forward pass shows what a loss has divided by, see
:mod:`runner.booster.loss_graph`. A way to count items (:mod:`runner.booster.divisor`) is accepted
if it gives these numbers for a batch and for its two parts, which costs no more than two forward
passes of the batch. While several ways agree, the first batch that they count differently is looked
at too.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.booster.batch import batch_size
from runner.booster.candidates import Candidate, Candidates
from runner.booster.divisor import NOTHING, Divisor
from runner.booster.loss import DivisorError, WindowLoss
from runner.booster.parts import has_samples, in_two, joined, samples_at
from runner.booster.shown import (
    WHILE_MEASURED,
    MeasuredModel,
    Shown,
    ShowsNothing,
    first_pass,
    shown_by,
)
from runner.booster.untouched import Trace
from runner.booster.variety import Variety
from runner.booster.verdict import Finding, divisor_of_calls, verdict
from runner.parallel.pipeline import Pipeline

_logger = logging.getLogger(__name__)

_MOST_LOOKS = 12
_MOST_TRIES = 3
_UNMEASURED = (
    "what the mean of %s divides by was not measured, because %s: it is taken for the mean over "
    "%s; loss.items=samples, labels or none states it"
)
_COMPARED = (
    "what the mean of %s divides by is read off its graph, and was not confirmed by the losses of "
    "two parts of a batch, because %s: it is taken for the mean over %s"
)
_BY_VALUES = (
    "what the mean of %s divides by is told by the losses of a batch and its parts alone, because "
    "%s: it is taken for the mean over %s"
)
_NOT_INSIDE = (
    "{} weighs its items by numbers that earlier batches did not show, and no part of a batch can "
    "be computed alone while ranks wait for one another: {}"
)


class _Doubt(NamedTuple):
    """A batch whose loss may show more.

    ``needs_parts``: whether it holds values of a kind that no measured batch had.
    """

    number: int
    needs_parts: bool


@torch.enable_grad()
def settle(
    loss: WindowLoss,
    module: nn.Module,
    batches: Sequence[Any],
    pipeline: Pipeline | None = None,
    together: bool = False,
    to_device: Callable[[Any], Any] = lambda batch: batch,
) -> None:
    """Find what the mean of ``loss`` divides by, and let it count that from now on.

    Args:
        loss: the loss; nothing happens if its divisor is known.
        module: the model on this rank, boosted or not.
        batches: microbatches; the first ones are measured.
        pipeline: stages of the model, if it is cut into some.
        together: whether other ranks call this too, with their batches of the same model.
        to_device: moves a batch to the device of the model.

    Raises:
        DivisorError: the mean is over something else than the items, on every rank.
    """
    if pipeline is not None and loss.may_return:
        loss.unproved = False
        return
    if loss.is_settled:
        return
    model = MeasuredModel(module, pipeline, loss, together)
    loss.look_again = partial(_look_inside, model)
    if loss.unproved:
        _measure(model, batches, to_device)
    start = 0
    while not (loss.unproved or loss.is_settled):
        doubt = _first_doubt(model, batches, start)
        if doubt is None:
            return
        if doubt.needs_parts:
            _look_at_parts(model, batches, doubt.number, to_device)
        else:
            _look(model, batches, doubt.number, to_device)
        start = doubt.number + 1


def _measure(model: MeasuredModel, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
    """Measure the first batch, and others while these do not tell enough."""
    loss, number = model.loss, 0
    goes_on = True
    while goes_on:
        loss.forget()
        batch = joined(to_device(batch) for batch in batches[min(number, len(batches) - 1) :])
        if loss.may_return and not loss.reads_batch(batch):
            loss.unproved = False
            return
        with model.without_a_trace(batch) as trace:
            findings = _measured(model, batch, trace)
        if _conclude(loss, batch, findings):
            _note_variety(model, Variety.of(batch))
        number += 1
        goes_on = loss.unproved and any(model.from_ranks(number < len(batches)))


def _first_doubt(model: MeasuredModel, batches: Sequence[Any], start: int) -> _Doubt | None:
    """Return the first batch of any rank whose loss may show more; a collective.

    It is one that candidates count differently, or that holds values of a new kind. Batches before
    ``start`` tell nothing.
    """
    loss = model.loss
    candidates = loss.candidates
    assert candidates is not None
    number = math.inf
    is_new = False
    for place in range(start, len(batches)):
        is_new = _is_new(loss.variety, batches, place)
        if is_new or candidates.disagree(batches[place]):
            number = place
            break
    divides = all(_divides(batches, place) for place in range(start, len(batches)))
    numbers, news, divisible = zip(*model.gather([number, is_new, divides]), strict=True)
    if min(numbers) == math.inf:
        return None
    needs_parts = any(news) and all(divisible)
    if needs_parts or not any(news):
        return _Doubt(int(min(numbers)), needs_parts)
    others = [number for number, is_new in zip(numbers, news, strict=True) if not is_new]
    first = min(others, default=math.inf)
    return None if first == math.inf else _Doubt(int(first), needs_parts=False)


def _is_new(variety: Variety | None, batches: Sequence[Any], place: int) -> bool:
    if variety is None or variety.is_complete:
        return False
    return variety.is_new(_samples_from(batches, place))


def _divides(batches: Sequence[Any], place: int) -> bool:
    batch = _samples_from(batches, place)
    samples = batch_size(batch)
    return samples > 1 and has_samples(batch, samples)


def _samples_from(batches: Sequence[Any], place: int) -> Any:
    """Return a batch; of one sample, this one joined with the next batch, or the one before."""
    if batch_size(batches[place]) == 1:
        place = min(place, max(len(batches) - 2, 0))
    return joined(batches[place:])


def _look(
    model: MeasuredModel, batches: Sequence[Any], number: int, to_device: Callable[[Any], Any]
) -> None:
    """Look at what the loss of one more batch of each rank divides by."""
    candidates = model.loss.candidates
    assert candidates is not None
    batch = to_device(batches[min(number, len(batches) - 1)])
    with model.without_a_trace(batch) as trace:
        if candidates.by_values:
            findings = _measured_again(model, candidates, batch, trace)
        else:
            findings = _looked_at(model, candidates, batch, trace)
        if any(finding.problem for finding in findings) and not candidates.by_values:
            # A number that divides all losses of a step, such as a temperature, may have changed.
            again = _measured_again(model, candidates, batch, trace)
            findings = findings if any(finding.problem for finding in again) else again
    _conclude(model.loss, batch, findings)


def _look_at_parts(
    model: MeasuredModel,
    batches: Sequence[Any],
    number: int,
    to_device: Callable[[Any], Any],
) -> None:
    """Measure a batch of each rank that holds values of a new kind, and its two parts."""
    candidates = model.loss.candidates
    assert candidates is not None
    on_host = _samples_from(batches, min(number, len(batches) - 1))
    batch = to_device(on_host)
    with model.without_a_trace(batch) as trace:
        findings = _measured_again(model, candidates, batch, trace)
    findings = [_counts_no_look(finding, candidates.looks) for finding in findings]
    loss = model.loss
    variety = loss.variety
    if not _conclude(loss, batch, findings) or variety is None:
        return
    if any(finding.tells_nothing for finding in findings) and loss.tries < _MOST_TRIES:
        loss.tries += 1  # the next window may tell
        return
    _note_variety(model, variety.without(on_host))


def _counts_no_look(finding: Finding, looks: int) -> Finding:
    if finding.candidates is None:
        return finding
    return finding._replace(candidates=replace(finding.candidates, looks=looks))


def _note_variety(model: MeasuredModel, variety: Variety) -> None:
    """Keep which kinds of values no rank has measured; a collective."""
    for other in model.from_ranks(variety):
        variety = variety.common(other)
    model.loss.variety = variety


@torch.enable_grad()
def _look_inside(model: MeasuredModel, batch: Any) -> None:
    """Measure a batch of this rank inside of a step, as its loss has weights that are new.

    Raises:
        DivisorError: the weights depend on the batch, or ranks communicate in a forward pass.
    """
    loss = model.loss
    if model.communicates():
        raise DivisorError(_NOT_INSIDE.format(loss.name, loss.ways_out))
    alone = replace(model, together=False)
    with alone.without_a_trace(batch) as trace:
        findings = _measured(alone, batch, trace)
    for finding in findings:
        if finding.problem:
            raise DivisorError(finding.problem)


def _measured_again(
    model: MeasuredModel, earlier: Candidates, batch: Any, trace: Trace
) -> list[Finding]:
    """Measure a batch, and return those candidates alone that agreed with earlier ones."""
    names = [candidate.divisor._replace(weight=None) for candidate in earlier.candidates]
    trace.remove()
    findings = []
    for finding in _measured(model, batch, trace):
        candidates = finding.candidates or earlier
        remaining = []
        for candidate in candidates.candidates:
            if candidate.divisor._replace(weight=None) in names:
                remaining.append(candidate)
        candidates = replace(
            candidates,
            candidates=remaining,
            looks=earlier.looks + 1,
            weighted=candidates.weighted or earlier.weighted,
        )
        problem = finding.problem
        if not remaining:
            problem = problem or _no_count(model.loss, "")
        nothing = finding.tells_nothing or finding.retry
        findings.append(Finding(candidates, problem, finding.reason, tells_nothing=nothing))
    return findings


def _no_count(loss: WindowLoss, divisors: str) -> str:
    divides = f": it divides by {divisors}, which is no count of" if divisors else " by a count of"
    return (
        f"{loss.name} is over something that earlier batches did not show{divides} this batch that "
        f"agrees with them: {loss.ways_out}"
    )


def _in_common(loss: WindowLoss, several: Sequence[Candidates]) -> Candidates:
    """Return the candidates that agree with what all ranks have seen."""
    candidates = several[0]
    for other in several[1:]:
        candidates = candidates.common(other)
    if not candidates.candidates:
        raise DivisorError(
            f"{loss.name} divides by something else on other ranks, whose batches no count "
            f"explains together: {loss.ways_out}"
        )
    return candidates


def _conclude(loss: WindowLoss, batch: Any, findings: Sequence[Finding]) -> bool:
    """Use, on all ranks, what any of them has found; return whether a batch may show more."""
    for finding in findings:
        if finding.problem:
            raise DivisorError(finding.problem)
    reasons = [finding.reason for finding in findings if finding.reason]
    several = [finding.candidates for finding in findings if finding.candidates is not None]
    is_mean = not reasons
    if several:
        candidates = _in_common(loss, several)
        if candidates.looks >= _MOST_LOOKS:
            candidates.candidates = candidates.candidates[:1]
            reasons.append("several counts agree with it within its precision")
        loss.use(candidates)
        if any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
            loss.tries += 1
            loss.unproved = True  # the next batches may tell more
            return False
    elif any(finding.tells_nothing for finding in findings) and not reasons:
        loss.use(Candidates([Candidate(Divisor(NOTHING))]))
        loss.unproved = True  # the next window may tell
        return False
    elif any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
        loss.tries += 1  # the next window may tell
        return False
    loss.unproved = False
    if not several:
        _warn(loss, batch, _UNMEASURED, reasons)
        return False
    _warn(loss, batch, _BY_VALUES if candidates.by_values else _COMPARED, reasons)
    if not is_mean and not candidates.by_values:
        loss.variety = None  # no part of a batch can show that it is a mean
        return False
    return not candidates.known


def _warn(loss: WindowLoss, batch: Any, text: str, reasons: Sequence[str]) -> None:
    """Warn once of why the measurement of a loss is not certain."""
    if reasons and reasons[0] not in loss.warnings:
        loss.warnings.append(reasons[0])
        _logger.warning(text, loss.name, reasons[0], loss.counted_as(batch))


def _measured(model: MeasuredModel, batch: Any, trace: Trace) -> list[Finding]:
    """Return what each rank finds out by a batch and its two parts."""
    loss, samples = model.loss, batch_size(batch)
    shown, loss_of = first_pass(model, batch, trace)
    whole = shown if isinstance(shown, Shown) else None
    is_random = trace.drawn()
    divides = whole is not None and divisor_of_calls(whole) is None and samples > 1
    # Ranks may communicate in a forward pass, so that all of them run the same number.
    in_parts = [divides and has_samples(batch, samples)]
    if loss.may_return:
        in_parts = model.from_ranks(in_parts[0])
    parts: list[Shown] = []
    reason = ""
    for numbers in in_two(samples) if all(in_parts) else ():
        part = samples_at(batch, numbers, samples)
        trace.remove()
        try:
            with warnings.catch_warnings(action="ignore"):  # of a variance of one sample
                parts.append(shown_by(part, loss_of(numbers)))
        except Exception as error:
            if model.is_inside:
                error.add_note(WHILE_MEASURED)
                raise
            reason = f"it does not take a part of a batch ({type(error).__name__})"
    return model.from_ranks(_found(loss, shown, parts, is_random, reason))


def _found(
    loss: WindowLoss,
    shown: Shown | ShowsNothing,
    parts: Sequence[Shown],
    is_random: bool,
    reason: str,
) -> Finding:
    """Return what this rank finds out by a batch, and its two parts if both show something."""
    if isinstance(shown, ShowsNothing):
        return Finding(problem=shown.problem, reason=shown.reason)
    try:
        return verdict(loss, shown, parts if len(parts) == 2 else [], is_random, reason)
    except DivisorError as error:
        return Finding(problem=str(error))


def _looked_at(
    model: MeasuredModel, candidates: Candidates, batch: Any, trace: Trace
) -> list[Finding]:
    """Return the candidates that agree, on each rank, with one more batch too."""
    shown, _ = first_pass(model, batch, trace)
    if isinstance(shown, ShowsNothing):
        candidates.looks += 1
        nothing = Finding(candidates, problem=shown.problem, reason=shown.reason)
        return model.from_ranks(nothing)
    remaining = candidates
    if shown.error is None or shown.tells_nothing:
        remaining = candidates.after(batch, shown.loss, shown.terms)
    remaining.looks = candidates.looks + (not shown.tells_nothing)
    problem = "" if remaining.candidates else _no_count(model.loss, shown.divisors)
    return model.from_ranks(Finding(remaining, problem=problem, tells_nothing=shown.tells_nothing))
