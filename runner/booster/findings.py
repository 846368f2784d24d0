"""What each rank finds out of a loss by a batch, and by parts of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.booster.batch import batch_size
from runner.booster.candidates import Candidates
from runner.booster.checks import Unshown
from runner.booster.items import DivisorError
from runner.booster.loss import WindowLoss
from runner.booster.parts import has_samples, in_two, joined, samples_at
from runner.booster.sample_weights import are_told_apart, in_two_by_weight, is_held
from runner.booster.shown import (
    WHILE_MEASURED,
    MeasuredModel,
    Shown,
    ShowsNothing,
    first_pass,
    shown_by,
)
from runner.booster.untouched import Trace
from runner.booster.verdict import Finding, divisor_of_calls, verdict

_logger = logging.getLogger(__name__)

_NEW_PART = (
    "%s has a part that earlier batches did not show, and what its mean divides by was not "
    "confirmed, because %s: it is taken for the mean over %s; loss.items=samples, labels or none "
    "states it"
)
_NOT_INSIDE = (
    "{} weighs its items by numbers other than 0 and 1, which no earlier batch did, and whether "
    "these depend on the batch cannot be measured inside of a step, because {}: {}"
)
_RANKS_WAIT = "ranks wait for one another in a forward pass"
_ONE_SAMPLE = "a batch has one sample, or tensors of several lengths"


def divides(batch: Any) -> bool:
    """Return whether a batch can be divided in two parts."""
    samples = batch_size(batch)
    return samples > 1 and has_samples(batch, samples)


def measured(
    model: MeasuredModel, batch: Any, trace: Trace, earlier: Candidates | None = None
) -> list[Finding]:
    """Return what each rank finds out by a batch and its two parts.

    Where there are earlier candidates, no others count.
    """
    loss, samples = model.loss, batch_size(batch)
    shown, loss_of = first_pass(model, batch, trace)
    whole = shown if isinstance(shown, Shown) else None
    is_random = trace.drawn()
    loss.measured = batch
    is_open = whole is not None and samples > 1
    if whole is not None and divisor_of_calls(whole) is not None:
        # Its divisor is known: parts may still show that its forward pass depends on the batch.
        is_open = is_open and not (is_random or model.communicates())
    # Ranks may communicate in a forward pass, so that all of them run the same number.
    in_parts = [is_open and has_samples(batch, samples)]
    if loss.may_return:
        in_parts = model.from_ranks(in_parts[0])
    parts: list[Shown] = []
    reason = ""
    halves: Sequence[Sequence[int]] = ()
    if all(in_parts):
        halves = in_two(samples) if whole is None else in_two_by_weight(whole, samples)
    for half in halves:
        part = samples_at(batch, half, samples)
        trace.remove()
        try:
            with warnings.catch_warnings(action="ignore"):  # of a variance of one sample
                shown_of_part = shown_by(part, loss_of, half)
            if shown_of_part is None:
                raise ValueError("a part of a batch has no loss")
            parts.append(shown_of_part)
        except Exception as error:
            if model.is_inside:
                error.add_note(WHILE_MEASURED)
                raise
            reason = f"it does not take a part of a batch ({type(error).__name__})"
    return model.from_ranks(_found(loss, shown, parts, is_random, reason, earlier))


def _found(
    loss: WindowLoss,
    shown: Shown | ShowsNothing,
    parts: Sequence[Shown],
    is_random: bool,
    reason: str,
    earlier: Candidates | None,
) -> Finding:
    """Return what this rank finds out by a batch, and its two parts if both show something."""
    if isinstance(shown, ShowsNothing):
        return Finding(problem=shown.problem, reason=shown.reason)
    try:
        parts = parts if len(parts) == 2 else []
        return verdict(loss, shown, parts, is_random, reason, earlier)
    except DivisorError as error:
        return Finding(problem=str(error))


def looked_at(
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


def measured_again(
    model: MeasuredModel, earlier: Candidates, batch: Any, trace: Trace
) -> list[Finding]:
    """Measure a batch, and return those candidates alone that agreed with earlier ones."""
    trace.remove()
    findings = []
    for finding in measured(model, batch, trace, earlier):
        candidates = finding.candidates or earlier
        remaining = [way for way in candidates.candidates if earlier.has(way.divisor)]
        candidates = replace(
            candidates,
            candidates=remaining,
            looks=earlier.looks + 1,
            weighted=candidates.weighted or earlier.weighted,
            forms=earlier.forms_with(candidates.forms),
            rounded=max(earlier.rounded - 1, 0),
        )
        problem = finding.problem
        if not remaining:
            problem = problem or _no_count(model.loss, "")
        nothing = finding.candidates is None or finding.retry
        findings.append(Finding(candidates, problem, finding.reason, tells_nothing=nothing))
    return findings


def _no_count(loss: WindowLoss, divisors: str) -> str:
    divides = f": it divides by {divisors}, which is no count of" if divisors else " by a count of"
    return (
        f"{loss.name} is over something that earlier batches did not show{divides} this batch that "
        f"agrees with them: {loss.ways_out}"
    )


@torch.enable_grad()
def look_inside(model: MeasuredModel, batch: Any, unshown: Unshown) -> bool:
    """Measure a batch of this rank inside of a step, as its loss has something new.

    Weights that are values of the batch need no measurement. A part that cannot be measured is
    warned of. Return whether later losses may have it too.

    Raises:
        DivisorError: the loss is a mean over something else than the items, or its weights depend
            on the batch, or that cannot be told.
    """
    loss = model.loss
    weights = [*unshown.masks, *unshown.weights]
    is_open = unshown.is_part or unshown.changes_classes
    if not is_open and all(is_held(weight, batch) for weight in weights):
        return True
    if batch_size(batch) == 1 and loss.measured is not None:
        batch = joined([batch, loss.measured])
    if model.communicates() or not divides(batch):
        reason = _RANKS_WAIT if model.communicates() else _ONE_SAMPLE
        if unshown.weights or unshown.changes_classes:
            raise DivisorError(_NOT_INSIDE.format(loss.name, reason, loss.ways_out))
        _warn_of_part(loss, batch, reason)
        return True
    on_this_rank = replace(model, together=False, trains_first=model.module.training)
    with on_this_rank.without_a_trace(batch) as trace:
        (finding,) = measured(on_this_rank, batch, trace, loss.candidates)
    if finding.problem:
        raise DivisorError(finding.problem)
    if finding.reason and unshown.is_part:
        _warn_of_part(loss, batch, finding.reason)
    return not unshown.weights or are_told_apart(unshown.weights)


def _warn_of_part(loss: WindowLoss, batch: Any, reason: str) -> None:
    if reason not in loss.warnings:
        loss.warnings.append(reason)
        _logger.warning(_NEW_PART, loss.name, reason, loss.counted_as(batch))
