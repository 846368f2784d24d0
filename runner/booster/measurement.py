"""Find what the mean of a loss divides by, before the first step.

The graph of a forward pass shows what a loss has divided by, see
:mod:`runner.booster.loss_graph`. A way to count items (:mod:`runner.booster.divisor`) is accepted
if it gives these numbers for a batch and for its two parts, which costs no more than two forward
passes of the batch. While several ways agree, the first batch that they count differently is looked
at too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from runner.booster.batch import batch_size, mapped
from runner.booster.candidates import Candidate, Candidates
from runner.booster.divisor import NOTHING, Divisor
from runner.booster.loss import DivisorError, WindowLoss
from runner.booster.loss_graph import GraphError, terms_of
from runner.booster.outputs import as_leaf, holds_numbers, logits_of, returned_loss
from runner.booster.parts import has_samples, in_two, joined, samples_at
from runner.booster.untouched import Trace, untouched
from runner.booster.verdict import Finding, Shown, divisor_of_calls, verdict
from runner.parallel.collectives import from_all
from runner.parallel.hooks import held_tensors
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


_WHILE_MEASURED = (
    "raised while it was measured what the loss divides by (loss.items=samples, labels or none "
    "states it)"
)


@dataclass
class _Model:
    """A model and its loss, run on batches of this rank.

    ``is_inside`` is true in a forward pass in which other ranks may wait for this one. An exception
    there ends the run: the ranks would not meet again.
    """

    module: nn.Module
    pipeline: Pipeline | None
    loss: WindowLoss
    together: bool
    training: bool = False
    is_inside: bool = False

    def communicates(self) -> bool:
        """Return whether ranks exchange tensors in a forward pass."""
        if self.pipeline is not None:
            return True
        for module in self.module.modules() if self.together else ():
            values = (*vars(module).values(), *module._parameters.values())
            if isinstance(module, FSDPModule):
                return True
            if any(isinstance(value, dist.ProcessGroup | DTensor) for value in values):
                return True
        return False

    def from_ranks(self, value: Any) -> list[Any]:
        return from_all(value) if self.together else [value]

    def modules(self) -> Iterator[nn.Module]:
        yield from self.module.modules()
        stages = () if self.pipeline is None else self.pipeline.stages.values()
        for stage in stages:
            yield from stage.modules()

    def outputs(self, batch: Any) -> Any:
        for module in self.modules():
            module.training = self.training
        call = self.loss.call(batch)
        self.is_inside = self.communicates()
        if self.pipeline is not None:
            outputs = self.pipeline.evaluate(call.only_tensor())
        else:
            args, kwargs = call
            outputs = self.module(*args, **kwargs)
        self.is_inside = False
        return outputs

    def without_a_trace(self, batch: Any) -> AbstractContextManager[Trace]:
        device = next((tensor.device for tensor in held_tensors(batch)), torch.device("cpu"))
        criterion = self.loss.criterion
        of_criterion = criterion.modules() if isinstance(criterion, nn.Module) else ()
        return untouched(chain(self.modules(), of_criterion), device)


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
    model = _Model(module, pipeline, loss, together)
    if loss.unproved:
        _measure(model, batches, to_device)
    start = 0
    while not loss.is_settled:
        number = _first_of_doubt(model, batches, start)
        if number is None:
            return
        _look(model, batches, number, to_device)
        start = number + 1


def _measure(model: _Model, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
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
        _conclude(loss, batch, findings)
        number += 1
        goes_on = loss.unproved and any(model.from_ranks(number < len(batches)))


def _first_of_doubt(model: _Model, batches: Sequence[Any], start: int) -> int | None:
    """Return the number of the first batch, on any rank, that candidates count differently.

    Batches before ``start`` tell nothing.
    """
    candidates = model.loss.candidates
    number: int | None = None
    if candidates is not None and not model.loss.unproved:
        doubtful = [
            place
            for place, batch in enumerate(batches)
            if place >= start and candidates.disagree(batch)
        ]
        number = doubtful[0] if doubtful else None
    numbers = [each for each in model.from_ranks(number) if each is not None]
    return min(numbers, default=None)


def _look(
    model: _Model, batches: Sequence[Any], number: int, to_device: Callable[[Any], Any]
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


def _measured_again(model: _Model, earlier: Candidates, batch: Any, trace: Trace) -> list[Finding]:
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
        candidates = replace(candidates, candidates=remaining, looks=earlier.looks + 1)
        problem = finding.problem or _no_count(model.loss, "")
        findings.append(Finding(candidates, problem="" if remaining else problem))
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


def _conclude(loss: WindowLoss, batch: Any, findings: Sequence[Finding]) -> None:
    """Use, on all ranks, what any of them has found."""
    for finding in findings:
        if finding.problem:
            raise DivisorError(finding.problem)
    reasons = [finding.reason for finding in findings if finding.reason]
    several = [finding.candidates for finding in findings if finding.candidates is not None]
    if several:
        candidates = _in_common(loss, several)
        if candidates.looks >= _MOST_LOOKS:
            candidates.candidates = candidates.candidates[:1]
            reasons.append("several counts agree with it within its precision")
        loss.use(candidates)
        if any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
            loss.tries += 1
            loss.unproved = True  # the next batches may tell more
            return
    elif any(finding.tells_nothing for finding in findings) and not reasons:
        loss.use(Candidates([Candidate(Divisor(NOTHING))]))
        loss.unproved = True  # the next window may tell
        return
    elif any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
        loss.tries += 1  # the next window may tell
        return
    loss.unproved = False
    if reasons:
        text = _COMPARED if several else _UNMEASURED
        if several and candidates.by_values:
            text = _BY_VALUES
        _logger.warning(text, loss.name, reasons[0], loss.counted_as(batch))


# -- what a batch shows


def _measured(model: _Model, batch: Any, trace: Trace) -> list[Finding]:
    """Return what each rank finds out by a batch and its two parts."""
    loss, samples = model.loss, batch_size(batch)
    finding, loss_of = _first_pass(model, batch, trace)
    whole = finding if isinstance(finding, Shown) else None
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
                parts.append(_shown(part, loss_of(numbers)))
        except Exception as error:
            if model.is_inside:
                error.add_note(_WHILE_MEASURED)
                raise
            reason = f"it does not take a part of a batch ({type(error).__name__})"
    if whole is not None:
        try:
            finding = verdict(loss, whole, parts if len(parts) == 2 else [], is_random, reason)
        except DivisorError as error:
            finding = Finding(problem=str(error))
    assert isinstance(finding, Finding)
    return model.from_ranks(finding)


_LossOf = Callable[[Sequence[int] | None], Tensor | None]


def _first_pass(model: _Model, batch: Any, trace: Trace) -> tuple[Shown | Finding, _LossOf]:
    """Return what a batch shows, or why it shows nothing, and what computes losses of parts."""
    finding = Finding()
    is_exact = False
    loss_of: _LossOf = lambda numbers: None  # noqa: E731
    for training in (False, True):
        model.training = training
        trace.remove()
        try:
            loss_of = (_returned if model.loss.may_return else _compared)(model, batch)
            trace.drawn()  # by the forward pass of a model whose outputs are compared
            value = loss_of(None)
        except _ExactError:
            is_exact = True  # the cross entropy of logits is, unless training returns a loss
            continue
        except DivisorError as error:
            return Finding(problem=str(error)), loss_of
        except Exception as error:
            if model.is_inside:
                error.add_note(_WHILE_MEASURED)
                raise
            reason = f"its model does not take the batch alone ({type(error).__name__})"
            finding = finding if is_exact else Finding(reason=reason)
            if model.pipeline is not None:
                break
            continue
        if value is not None:
            return _shown(batch, value), loss_of
        if model.pipeline is not None:
            break  # the last stage, on another rank, has the outputs
    return finding, loss_of


class _ExactError(Exception):
    """The model returns logits, and no loss."""


def _returned(model: _Model, batch: Any) -> _LossOf:
    """Return a function that computes the loss that a model returns."""
    samples = batch_size(batch)

    def loss_of(numbers: Sequence[int] | None) -> Tensor | None:
        part = batch if numbers is None else samples_at(batch, numbers, samples)
        outputs = model.outputs(part)
        loss = returned_loss(outputs)
        if loss is None and isinstance(logits_of(outputs), Tensor):
            raise _ExactError
        return loss

    return loss_of


def _compared(model: _Model, batch: Any) -> _LossOf:
    """Return a function that computes a loss of outputs, which are computed once.

    They are computed for each part if some are numbers, as these may be means over a batch.
    """
    samples = batch_size(batch)
    outputs = model.outputs(batch)
    numbers_too = holds_numbers(outputs)
    if not numbers_too:
        outputs = mapped(outputs, _without_graph)

    def loss_of(numbers: Sequence[int] | None) -> Tensor | None:
        if outputs is None:
            return None
        part = batch if numbers is None else samples_at(batch, numbers, samples)
        if numbers_too:
            return model.loss.mean(outputs if numbers is None else model.outputs(part), part)
        if numbers is not None and not has_samples(outputs, samples):
            raise ValueError("outputs have no dimension of samples")
        chosen = outputs if numbers is None else samples_at(outputs, numbers, samples)
        return model.loss.mean(mapped(chosen, _as_single_leaf), part)

    return loss_of


def _as_single_leaf(tensor: Tensor) -> Tensor:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return as_leaf(tensor.float() if is_half else tensor)


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _shown(batch: Any, loss: Tensor | None) -> Shown:
    if loss is None:
        raise ValueError("a part of a batch has no loss")
    try:
        return Shown(batch, loss.detach(), terms_of(loss))
    except GraphError as error:
        return Shown(batch, loss.detach(), error=error)


def _looked_at(model: _Model, candidates: Candidates, batch: Any, trace: Trace) -> list[Finding]:
    """Return the candidates that agree, on each rank, with one more batch too."""
    shown, _ = _first_pass(model, batch, trace)
    if isinstance(shown, Finding):
        candidates.looks += 1
        return model.from_ranks(shown._replace(candidates=candidates))
    remaining = candidates
    if shown.error is None or shown.tells_nothing:
        remaining = candidates.after(batch, shown.loss, shown.terms)
    remaining.looks = candidates.looks + (not shown.tells_nothing)
    problem = "" if remaining.candidates else _no_count(model.loss, shown.divisors)
    return model.from_ranks(Finding(remaining, problem=problem, tells_nothing=shown.tells_nothing))
