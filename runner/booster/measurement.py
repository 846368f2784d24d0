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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from runner.booster.batch import batch_size
from runner.booster.candidates import Candidates
from runner.booster.findings import (
    divides,
    look_inside,
    looked_at,
    measured,
    measured_again,
)
from runner.booster.loss import DivisorError, WindowLoss
from runner.booster.parts import joined
from runner.booster.shown import MeasuredModel
from runner.booster.variety import Variety
from runner.booster.verdict import OF_THE_BATCH, Finding
from runner.parallel.pipeline import Pipeline

_logger = logging.getLogger(__name__)

_MOST_LOOKS = 12
_MOST_TRIES = 3
_LENDERS = 4  # ranks whose single samples are joined to a batch
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
_UNTOLD = (
    "{} is told by its values alone, and these do not tell which of several counts that differ in "
    "this batch its mean divides by, such as {} and {}: {}"
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
    is_open = loss.unproved or loss.candidates is not None
    if loss.is_settled and (loss.look is not None or not is_open):
        return
    model = MeasuredModel(module, pipeline, loss, together)
    if loss.look is None:
        loss.look = partial(look_inside, model)
    if loss.unproved:
        _measure(model, batches, to_device)
    start = 0
    start_of_parts = 0
    while not (loss.unproved or loss.is_settled):
        doubt = _first_doubt(model, batches, start, start_of_parts)
        if doubt is None:
            return
        if doubt.needs_parts:
            _look_at_parts(model, batches, doubt.number, to_device)
            start_of_parts = doubt.number + 1
        else:
            _look(model, batches, doubt.number, to_device)
            start = doubt.number + 1


def _measure(model: MeasuredModel, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
    """Measure the first batch, and others while these do not tell enough."""
    loss, number = model.loss, 0
    goes_on = True
    while goes_on:
        loss.forget()
        place = min(number, len(batches) - 1)
        batch = to_device(_with_samples_of_ranks(model, joined(batches[place:])))
        if loss.may_return and not loss.reads_batch(batch):
            loss.unproved = False
            return
        with model.without_a_trace(batch) as trace:
            findings = measured(model, batch, trace)
        if _conclude(loss, batch, findings):
            _note_variety(model, Variety.of(batch))
        number += 1
        goes_on = loss.unproved and any(model.from_ranks(number < len(batches)))


def _first_doubt(
    model: MeasuredModel, batches: Sequence[Any], start: int, start_of_parts: int
) -> _Doubt | None:
    """Return the first batch of any rank whose loss may show more; a collective.

    It is one that candidates count differently, from ``start`` on, or one that holds values of a
    new kind, from ``start_of_parts`` on.
    """
    loss = model.loss
    candidates = loss.candidates
    assert candidates is not None
    counted = _first(range(start, len(batches)), lambda place: candidates.disagree(batches[place]))
    new = math.inf
    can_divide = True
    variety = loss.variety
    is_open = variety is not None and not variety.is_complete
    places = range(start_of_parts, len(batches))
    if candidates.rounded and places:
        new = start_of_parts
    elif variety is not None and is_open:
        is_new = variety.is_new
        new = _first(places, lambda place: is_new(_samples_from(batches, place)))
    if (candidates.rounded or is_open) and (model.together or new < math.inf):
        can_divide = all(divides(_samples_from(batches, place)) for place in places)
    of_ranks = model.gather([counted, new, can_divide])
    counted = min(row[0] for row in of_ranks)
    new = min(row[1] for row in of_ranks)
    if new <= counted and new < math.inf and all(row[2] for row in of_ranks):
        return _Doubt(int(new), needs_parts=True)
    return None if counted == math.inf else _Doubt(int(counted), needs_parts=False)


def _first(places: Iterable[int], is_doubtful: Callable[[int], bool]) -> float:
    """Return the first place that is doubtful; infinity if there is none."""
    return next((place for place in places if is_doubtful(place)), math.inf)


def _samples_from(batches: Sequence[Any], place: int) -> Any:
    """Return a batch; of one sample, this one joined with the next batch, or the one before."""
    place = min(place, len(batches) - 1)
    if batch_size(batches[place]) == 1:
        place = min(place, max(len(batches) - 2, 0))
    return joined(batches[place:])


def _with_samples_of_ranks(model: MeasuredModel, batch: Any) -> Any:
    """Return a batch. A batch of one sample is joined with samples of other ranks; a collective.

    In one sample, the number of samples may equal the number of elements that a mask selects.
    """
    is_single = batch_size(batch) == 1
    if not model.together or not any(model.from_ranks(is_single)):
        return batch
    rank = dist.get_rank()
    lent = model.from_ranks(batch if is_single and rank < _LENDERS else None)
    others = [other for number, other in enumerate(lent) if number != rank and other is not None]
    return joined([batch, *others], enough=_LENDERS) if is_single else batch


def _look(
    model: MeasuredModel, batches: Sequence[Any], number: int, to_device: Callable[[Any], Any]
) -> None:
    """Look at what the loss of one more batch of each rank divides by."""
    candidates = model.loss.candidates
    assert candidates is not None
    if candidates.by_values:
        _look_at_values(model, candidates, _samples_from(batches, number), to_device)
        return
    place = min(number, len(batches) - 1)
    batch = to_device(batches[place])
    _look_at(model, candidates, batch)
    candidates = model.loss.candidates
    assert candidates is not None
    if not any(model.from_ranks(candidates.disagree(batches[place]))):
        return
    on_host = _with_samples_of_ranks(model, _samples_from(batches, place))
    measured_before = [] if model.loss.measured is None else [model.loss.measured]
    _look_at(model, candidates, joined([to_device(on_host), *measured_before]))


def _look_at(model: MeasuredModel, candidates: Candidates, batch: Any) -> None:
    with model.without_a_trace(batch) as trace:
        findings = looked_at(model, candidates, batch, trace)
        if any(finding.problem for finding in findings):
            # A number that divides all losses of a step, such as a temperature, may have changed.
            again = measured_again(model, candidates, batch, trace)
            findings = findings if any(finding.problem for finding in again) else again
    _conclude(model.loss, batch, findings)


def _look_at_values(
    model: MeasuredModel, candidates: Candidates, on_host: Any, to_device: Callable[[Any], Any]
) -> None:
    """Measure a batch of each rank, and its parts, as the graph of the loss does not tell."""
    loss = model.loss
    batch = to_device(on_host)
    with model.without_a_trace(batch) as trace:
        findings = measured_again(model, candidates, batch, trace)
    _conclude(loss, batch, findings)
    if not any(finding.tells_nothing for finding in findings):
        return
    candidates = loss.candidates or candidates
    if any(model.from_ranks(candidates.disagree(batch))):
        first, second, *_ = [candidate.divisor.described() for candidate in candidates.candidates]
        raise DivisorError(_UNTOLD.format(loss.name, first, second, loss.ways_out))


def _look_at_parts(
    model: MeasuredModel,
    batches: Sequence[Any],
    number: int,
    to_device: Callable[[Any], Any],
) -> None:
    """Measure a batch of each rank that holds values of a new kind, and its two parts."""
    candidates = model.loss.candidates
    assert candidates is not None
    on_host = _samples_from(batches, number)
    batch = to_device(on_host)
    with model.without_a_trace(batch) as trace:
        findings = measured_again(model, candidates, batch, trace)
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
    for of_rank in model.from_ranks(variety):
        variety = variety.common(of_rank)
    model.loss.variety = variety


def _in_common(loss: WindowLoss, of_ranks: Sequence[Candidates]) -> Candidates:
    """Return the candidates that agree with what all ranks have seen."""
    candidates = of_ranks[0]
    for of_rank in of_ranks[1:]:
        candidates = candidates.common(of_rank)
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
    of_ranks = [finding.candidates for finding in findings if finding.candidates is not None]
    is_mean = not reasons
    if of_ranks:
        candidates = _in_common(loss, of_ranks)
        if candidates.looks >= _MOST_LOOKS:
            candidates.candidates = candidates.candidates[:1]
            reasons.append("several counts agree with it within its precision")
        loss.use(candidates)
        if any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
            loss.tries += 1
            loss.unproved = True  # the next batches may tell more
            _warn(loss, batch, _COMPARED, [text for text in reasons if text == OF_THE_BATCH])
            return False
    elif any(finding.tells_nothing for finding in findings) and not reasons:
        loss.forget()
        loss.is_zero_so_far = True
        loss.unproved = True  # the next window may tell
        return False
    elif any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
        loss.tries += 1  # the next window may tell
        return False
    loss.unproved = False
    if not of_ranks:
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
