"""Find what the mean of a loss divides by, before the first step.

The graph of a forward pass shows what a loss has divided by, see
:mod:`runner.booster.loss_graph`. A way to count items (:mod:`runner.booster.divisor`) is accepted
if it gives these numbers for a batch and for its two parts, which costs no more than two forward
passes of the batch. While several ways agree, the first batch that they count differently is looked
at too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.booster.batch import batch_size, mapped
from runner.booster.divisor import (
    NOTHING,
    Candidate,
    Candidates,
    Divisor,
    compared_by,
    divisors_of,
    tolerance_of,
)
from runner.booster.loss import DivisorError, WindowLoss
from runner.booster.loss_graph import GraphError, NotLinear, Term, terms_of
from runner.booster.outputs import logits_of, returned_loss
from runner.booster.parts import has_samples, in_two, joined, samples_at
from runner.booster.untouched import untouched
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
_RANDOM = "it is random"
_COMPARED = (
    "what the mean of %s divides by is read off its graph, and was not confirmed by the losses of "
    "two parts of a batch, because %s: it is taken for the mean over %s"
)
_OF_THE_BATCH = (
    "it depends on the batch as a whole, as a contrastive loss does, so that accumulated "
    "microbatches are not one batch"
)
_NO_MEAN = (
    "{} is no mean over items, as {}: no weights of its microbatches give the loss of one batch. "
    "Set loss.items=none (the plain mean over microbatches, as in other trainers), which is "
    'Trainer(criterion=Loss(items="none")) in a script'
)


class Shown(NamedTuple):
    """What a forward pass has shown of the loss of a batch, or of a part of it."""

    batch: Any
    loss: Tensor
    terms: Sequence[Term] = ()
    error: GraphError | None = None

    @property
    def value(self) -> float:
        return float(self.loss)

    @property
    def divisors(self) -> str:
        """What the parts of the loss divide by, for a message."""
        numbers = dict.fromkeys(f"{term.divisor:.10g}" for term in self.terms)
        listed = ", ".join(list(numbers)[:4])
        return f"({listed})" if len(numbers) > 1 else listed


class Finding(NamedTuple):
    """What a rank finds out about a loss.

    Attributes:
        candidates: the ways to count that agree with what was seen; None if there is none.
        problem: why the loss is refused; empty if it is not.
        reason: what a warning says of the loss; empty for no warning.
        retry: whether another batch may tell more.
    """

    candidates: Candidates | None = None
    problem: str = ""
    reason: str = ""
    retry: bool = False


@dataclass
class _Model:
    """A model and its loss, run on batches of this rank."""

    module: nn.Module
    pipeline: Pipeline | None
    loss: WindowLoss
    together: bool
    training: bool = False

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
        if self.pipeline is not None:
            return self.pipeline.evaluate(self.loss.call(batch).only_tensor())
        args, kwargs = self.loss.call(batch)
        # The graph of outputs is not needed where a criterion compares them.
        with torch.set_grad_enabled(self.loss.may_return):
            return self.module(*args, **kwargs)

    def without_a_trace(self, batch: Any) -> AbstractContextManager[Callable[[], bool]]:
        device = next((tensor.device for tensor in held_tensors(batch)), torch.device("cpu"))
        criterion = self.loss.criterion
        of_criterion = criterion.modules() if isinstance(criterion, nn.Module) else ()
        return untouched(chain(self.modules(), of_criterion), device)


def settle(
    loss: WindowLoss,
    module: nn.Module,
    batches: Iterable[Any],
    pipeline: Pipeline | None = None,
    together: bool = False,
    to_device: Callable[[Any], Any] = lambda batch: batch,
) -> None:
    """Find what the mean of ``loss`` divides by, and let it count that from now on.

    Args:
        loss: the loss; nothing happens if its divisor is known.
        module: the model on this rank, boosted or not.
        batches: microbatches, which can be read more than once; the first ones are measured.
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
        batch = joined(to_device(batch) for batch in batches)
        if loss.may_return and not loss.reads_batch(batch):
            loss.unproved = False
            return
        with model.without_a_trace(batch) as drawn:
            findings = _measured(model, batch, drawn)
        _conclude(loss, batch, findings)
    for batch in batches:
        candidates = loss.candidates
        if candidates is None or candidates.is_settled:
            return
        if any(model.from_ranks(candidates.disagree(batch))):
            on_device = to_device(batch)
            with model.without_a_trace(on_device):
                findings = _looked_at(model, candidates, on_device)
            candidates.looks += 1
            _conclude(loss, batch, findings)


def _conclude(loss: WindowLoss, batch: Any, findings: Sequence[Finding]) -> None:
    """Use, on all ranks, what any of them has found."""
    for finding in findings:
        if finding.problem:
            raise DivisorError(finding.problem)
    reasons = [finding.reason for finding in findings if finding.reason]
    several = [finding.candidates for finding in findings if finding.candidates is not None]
    if several:
        candidates = several[0]
        for other in several[1:]:
            candidates = candidates.common(other)
        if not candidates.candidates:
            raise DivisorError(
                f"{loss.name} divides by something else on other ranks, whose batches no count "
                f"explains together: {loss.ways_out}"
            )
        if candidates.looks >= _MOST_LOOKS:
            candidates.candidates = candidates.candidates[:1]
            reasons.append("several counts agree with it within its precision")
        loss.use(candidates)
    elif any(finding.retry for finding in findings) and loss.tries < _MOST_TRIES:
        loss.tries += 1  # the next window may tell
        return
    loss.unproved = False
    if reasons:
        text = _COMPARED if several else _UNMEASURED
        _logger.warning(text, loss.name, reasons[0], loss.counted_as(batch))


# -- what a batch shows


def _measured(model: _Model, batch: Any, drawn: Callable[[], bool]) -> list[Finding]:
    """Return what each rank finds out by a batch and its two parts."""
    loss, samples = model.loss, batch_size(batch)
    finding, loss_of = _first_pass(model, batch, drawn)
    whole = finding if isinstance(finding, Shown) else None
    is_random = drawn()
    divides = whole is not None and _candidate_of_calls(whole) is None and samples > 1
    # Ranks may communicate in a forward pass, so that all of them run the same number.
    in_parts = [divides and has_samples(batch, samples)]
    if loss.may_return:
        in_parts = model.from_ranks(in_parts[0])
    parts: list[Shown] = []
    reason = ""
    for numbers in in_two(samples) if all(in_parts) else ():
        part = samples_at(batch, numbers, samples)
        try:
            parts.append(_shown(part, loss_of(numbers)))
        except Exception as error:
            reason = f"it does not take a part of a batch ({type(error).__name__})"
    if whole is not None:
        try:
            finding = _finding(loss, whole, parts if len(parts) == 2 else [], is_random, reason)
        except DivisorError as error:
            finding = Finding(problem=str(error))
    assert isinstance(finding, Finding)
    return model.from_ranks(finding)


_LossOf = Callable[[Sequence[int] | None], Tensor | None]


def _first_pass(
    model: _Model, batch: Any, drawn: Callable[[], bool]
) -> tuple[Shown | Finding, _LossOf]:
    """Return what a batch shows, or why it shows nothing, and what computes losses of parts."""
    reason = ""
    loss_of: _LossOf = lambda numbers: None  # noqa: E731
    for training in (False, True):
        model.training = training
        try:
            loss_of = (_returned if model.loss.may_return else _compared)(model, batch)
            drawn()  # by the forward pass of a model whose outputs are compared
            value = loss_of(None)
        except _ExactError:
            return Finding(), loss_of  # the cross entropy of logits is summed exactly
        except DivisorError as error:
            return Finding(problem=str(error)), loss_of
        except Exception as error:
            reason = f"its model does not take the batch alone ({type(error).__name__})"
            if model.pipeline is not None:
                break
            continue
        if value is not None:
            return _shown(batch, value), loss_of
        if model.pipeline is not None:
            break  # the last stage, on another rank, has the outputs
    return Finding(reason=reason), loss_of


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
    """Return a function that computes a loss of outputs, which are computed once."""
    samples = batch_size(batch)
    outputs = model.outputs(batch)

    def loss_of(numbers: Sequence[int] | None) -> Tensor | None:
        if outputs is None:
            return None
        if numbers is not None and not has_samples(outputs, samples):
            raise ValueError("outputs have no dimension of samples")
        part = batch if numbers is None else samples_at(batch, numbers, samples)
        chosen = outputs if numbers is None else samples_at(outputs, numbers, samples)
        with torch.enable_grad():
            return model.loss.mean(mapped(chosen, _as_leaf), part)

    return loss_of


def _as_leaf(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.float() if is_half else tensor).detach().requires_grad_()


def _shown(batch: Any, loss: Tensor | None) -> Shown:
    if loss is None:
        raise ValueError("a part of a batch has no loss")
    try:
        return Shown(batch, loss.detach(), terms_of(loss))
    except GraphError as error:
        return Shown(batch, loss.detach(), error=error)


def _looked_at(model: _Model, candidates: Candidates, batch: Any) -> list[Finding]:
    """Return the candidates that agree, on each rank, with one more batch too."""
    shown, _ = _first_pass(model, batch, drawn=lambda: False)
    if isinstance(shown, Finding):
        return model.from_ranks(shown._replace(candidates=candidates))
    remaining = candidates
    if shown.error is None:
        remaining = candidates.after(batch, shown.loss, shown.terms)
    problem = ""
    if not remaining.candidates:
        problem = (
            f"{model.loss.name} is over something that earlier batches did not show: it divides by "
            f"{shown.divisors}, which is no count of this batch that agrees with them: "
            f"{model.loss.ways_out}"
        )
    return model.from_ranks(Finding(remaining, problem=problem))


# -- the verdict


def _finding(
    loss: WindowLoss, whole: Shown, parts: Sequence[Shown], is_random: bool, reason: str
) -> Finding:
    """Compare what a batch shows with the ways to count it."""
    loss.items(whole.batch)  # raises an error if a guess is known to be wrong
    if isinstance(whole.error, NotLinear):
        return Finding(problem=_NO_MEAN.format(loss.name, whole.error))
    if whole.error is not None:
        return _by_values(loss, whole, parts, reason or (_RANDOM if is_random else ""))
    candidates = _candidates(whole, parts)
    if not candidates.candidates:
        if _is_a_sum(whole, parts):
            return Finding(Candidates([Candidate(Divisor(NOTHING))], known=True))
        is_of_batch = _has_constant_divisors(whole, parts) and not _is_between(whole, parts)
        return Finding(reason=_OF_THE_BATCH) if is_of_batch else _refused(loss, whole, parts)
    if is_random and not candidates.known:
        return Finding(candidates, reason=_RANDOM)
    if not parts or _adds_up(candidates, whole, parts):
        return Finding(candidates)
    if candidates.divisor.counts == NOTHING and _is_between(whole, parts):
        return _refused(loss, whole, parts)
    return Finding(candidates, reason=_OF_THE_BATCH)


def _candidate_of_calls(whole: Shown) -> Divisor | None:
    """Return what a loss divides by if it is one of torch that compares labels of the batch."""
    if whole.error is not None or not whole.terms:
        return None
    divisors = []
    for term in whole.terms:
        compared = None if term.call is None else compared_by(term.call, whole.batch)
        if compared is None or not compared.is_certain:
            return None
        divisors.append(compared.divisor)
    return divisors[0] if len(set(divisors)) == 1 else None


def _candidates(whole: Shown, parts: Sequence[Shown]) -> Candidates:
    """Return the ways to count that agree with a batch and its parts."""
    tolerance = tolerance_of(whole.loss)
    known = _candidate_of_calls(whole)
    if known is not None:
        return Candidates([Candidate(known)], known=True)
    shown = [*parts, whole]
    outer = len({len(each.terms) for each in shown}) > 1
    factors = [[term.factor for term in each.terms] for each in shown]
    varies = not outer and any(numbers != factors[0] for numbers in factors)
    divides = any(term.divides for each in shown for term in each.terms)
    if not (divides or varies):
        return Candidates([Candidate(Divisor(NOTHING))], known=True)
    every = list(divisors_of(whole.batch))
    for term in whole.terms:
        compared = None if term.call is None else compared_by(term.call, whole.batch)
        if compared is not None:
            every.insert(0, compared.divisor)
    candidates = Candidates(
        [Candidate(divisor) for divisor in every],
        outer=outer,
        factors=varies,
        tolerance=tolerance,
    )
    for each in shown:
        if outer and len(each.terms) == 1:
            continue  # what divides a sum of one part divides the part
        candidates = candidates.after(each.batch, each.loss, each.terms)
    return candidates


def _adds_up(candidates: Candidates, whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether the loss of the whole is that of its parts, weighted with their items."""
    if candidates.divisor.counts == NOTHING:
        expected = sum(part.value for part in parts)
    else:
        expected = _weighted(parts, candidates.items)
    return _near(expected, whole, parts)


def _weighted(parts: Sequence[Shown], items: Callable[[Any], float]) -> float:
    counts = [items(part.batch) for part in parts]
    if not sum(counts):
        return float("nan")
    terms = [n * part.value for n, part in zip(counts, parts, strict=True) if n]
    return sum(terms) / sum(counts)


def _size(whole: Shown, parts: Sequence[Shown]) -> float:
    """Return what differences of losses are compared with, times the precision of the losses."""
    dtype = whole.loss.dtype
    values = [abs(shown.value) for shown in (whole, *parts)]
    return float(torch.finfo(dtype).eps ** 0.5) * max(values)


def _near(expected: float, whole: Shown, parts: Sequence[Shown]) -> bool:
    if whole.value != whole.value:
        return True  # a mean over nothing
    return abs(expected - whole.value) <= _size(whole, parts)


def _is_between(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether the loss of the whole lies between those of its parts, as a mean does."""
    values = [part.value for part in parts]
    if not values or any(value != value for value in values):
        return not values
    margin = _size(whole, parts)
    return min(values) - margin <= whole.value <= max(values) + margin


def _has_constant_divisors(whole: Shown, parts: Sequence[Shown]) -> bool:
    numbers = {tuple(term.divisor for term in shown.terms) for shown in (whole, *parts)}
    return bool(parts) and len(numbers) == 1


def _is_a_sum(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether a loss that divides by constants is the sum of those of its parts."""
    if not _has_constant_divisors(whole, parts):
        return False
    return _near(sum(part.value for part in parts), whole, parts)


def _by_values(loss: WindowLoss, whole: Shown, parts: Sequence[Shown], reason: str) -> Finding:
    """Compare the loss of a batch with those of its parts, as its graph does not tell."""
    if reason or not parts:
        return Finding(reason=reason or "a batch has one sample, or tensors of several lengths")

    def items(batch: Any) -> float:
        return loss.items(batch).items

    losses = [part.value for part in parts]
    if not all(abs(value) < float("inf") for value in (whole.value, *losses)):
        return Finding(reason="it is not finite", retry=True)
    if abs(losses[0] - losses[1]) <= 10 * _size(whole, parts):
        return Finding(reason="parts of a batch have the same loss", retry=True)
    if _near(_weighted(parts, items), whole, parts):
        return Finding()
    if not _is_between(whole, parts):
        return Finding(reason=_OF_THE_BATCH)
    return _refused(loss, whole, parts)


def _refused(loss: WindowLoss, whole: Shown, parts: Sequence[Shown]) -> Finding:
    """Return why a loss is refused: what it is, what was expected, and what it divides by."""
    samples = batch_size(whole.batch)
    divides = f"divides by {whole.divisors} for a batch of {samples} samples"
    if parts:
        divides += f" and by {parts[0].divisors} and {parts[1].divisors} for its parts"
    unexplained = "which nothing that the batch holds explains"
    expected = _weighted(parts, lambda batch: loss.items(batch).items) if parts else whole.value
    if _near(expected, whole, parts):
        return Finding(problem=f"{loss.name} {divides}, {unexplained}: {loss.ways_out}")
    numbers = _told_apart(whole.value, expected)
    because = f", as it {divides}, {unexplained}" if whole.terms else ""
    return Finding(
        problem=f"the mean loss of a batch is not that of its parts: {loss.name} is {numbers[0]} "
        f"for {samples} samples, but the mean over {loss.counted_as(whole.batch)} of its parts is "
        f"{numbers[1]}, so that its mean is over something else{because}: {loss.ways_out}"
    )


def _told_apart(first: float, second: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to tell them apart."""
    texts = "", ""
    for digits in (6, 9, 12, 17):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts
