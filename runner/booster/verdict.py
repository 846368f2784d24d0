"""Decide which way to count items agrees with what the losses of a batch and its parts show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.booster.batch import batch_size
from runner.booster.candidates import Candidate, Candidates, are_equal, near, tolerance_of
from runner.booster.divisor import (
    LABELS,
    NOTHING,
    Divisor,
    compared_by,
    divisors_of,
    tensors_of,
)
from runner.booster.graph_places import NotLinear
from runner.booster.loss import WindowLoss
from runner.booster.part_losses import (
    Values,
    first_share,
    losses_of,
    sums_of_alike,
    terms_in,
    weighted_mean,
)
from runner.booster.sample_weights import (
    are_over_their_mean,
    are_told_apart,
    is_half,
    is_held,
    weights_vary,
)
from runner.booster.shown import Shown
from runner.booster.terms import Term, penalties_of, spread_of

_MEASURED_ROUNDED = 3
"""Further batches that are measured, as weights in half precision may agree by their rounding."""

_RANDOM = "it is random"
_ONE_SAMPLE = "a batch has one sample, or tensors of several lengths"
OF_THE_BATCH = (
    "it depends on the batch as a whole, as a contrastive loss does, so that accumulated "
    "microbatches are not one batch"
)
_NO_PART = "a part of a batch is no batch, as of pairs"
_UNKNOWN_WEIGHTS = (
    "{} is a sum with weights, and parts of a batch do not show whether these depend on the batch, "
    "because {}: {}"
)
_UNKNOWN_CONSTANT = (
    "{} divides by {}, and parts of a batch do not show whether that is a constant, because {}: {}"
)
_PLAIN_MEAN = (
    "loss.items=none (the plain mean over microbatches, as in other trainers), which is "
    'Trainer(criterion=Loss(items="none")) in a script'
)
_WEIGHTS = (
    "{} weighs its items by numbers that depend on the batch, so that no weights of microbatches "
    f"give the loss of one batch: compute these numbers over all data, or set {_PLAIN_MEAN}"
)
_OVER_MEAN = (
    "{} weighs its items by numbers that depend on the batch, as they are divided by their mean: "
    "instead of (losses * weights / weights.mean()).mean() return the same number as (losses * "
    "weights).sum() / weights.sum()"
)
_PENALTY = (
    "{} multiplies a penalty of parameters with a number that depends on the batch, such as one "
    "over its samples, so that no weights of microbatches give the loss of one batch: multiply it "
    f"with a number that all batches share, or set {_PLAIN_MEAN}"
)
_PENALTY_OF_SUM = (
    "{} is a sum over samples plus a penalty of parameters, which each microbatch and each rank "
    "would add again: divide the sum by the samples, leave the penalty to the optimizer "
    f"(weight_decay), or set {_PLAIN_MEAN}"
)
_SEVERAL_MEANS = (
    "{} {}, as it adds up means over different items, {}, so that no weights of microbatches give "
    f"the loss of one batch: return one mean, or set {_PLAIN_MEAN}"
)
_NO_MEAN = (
    "{} is no mean over items, as {}: no weights of its microbatches give the loss of one batch. "
    f"Set {_PLAIN_MEAN}"
)


class Finding(NamedTuple):
    """What a rank finds out about a loss.

    Attributes:
        candidates: the ways to count that agree with what was seen; None if there is none.
        problem: why the loss is refused; empty if it is not.
        reason: what a warning says of the loss; empty for no warning.
        retry: whether another batch may tell more.
        tells_nothing: whether the loss is 0, infinite, or multiplied by NaN, so that it tells
            nothing: the next window is measured instead.
    """

    candidates: Candidates | None = None
    problem: str = ""
    reason: str = ""
    retry: bool = False
    tells_nothing: bool = False


def verdict(
    loss: WindowLoss,
    whole: Shown,
    parts: Sequence[Shown],
    is_random: bool,
    reason: str,
    earlier: Candidates | None = None,
) -> Finding:
    """Compare what a batch shows with the ways to count it, of which only earlier ones count."""
    loss.items(whole.batch)  # raises an error if a guess is known to be wrong
    parts = [_with_penalties_of(whole, part) for part in parts]
    if isinstance(whole.error, NotLinear):
        return Finding(problem=_NO_MEAN.format(loss.name, whole.error))
    if whole.tells_nothing or whole.is_without_samples:
        return Finding(tells_nothing=True)
    if whole.error is not None:
        return _by_values(loss, whole, parts, reason or (_RANDOM if is_random else ""))
    if not parts and _is_told_by_parts_alone(whole):
        problem = _UNKNOWN_WEIGHTS.format(loss.name, reason or _ONE_SAMPLE, loss.ways_out)
        return Finding(problem=problem)
    if _penalties_vary(whole, parts):
        return Finding(problem=_PENALTY.format(loss.name))
    candidates = _candidates(whole, parts, earlier)
    if not candidates.candidates:
        return _without_candidates(loss, candidates, whole, parts)
    if is_random and not candidates.known:
        return Finding(candidates, reason=_RANDOM)
    if not parts and _may_vary(candidates, whole):
        return Finding(candidates, reason=reason or _ONE_SAMPLE)
    return _by_parts(loss, candidates, whole, parts)


def _by_parts(
    loss: WindowLoss, candidates: Candidates, whole: Shown, parts: Sequence[Shown]
) -> Finding:
    """Compare a batch with its parts: the losses, and the weights of the samples."""
    if _ranks_samples(whole, parts):
        return Finding(problem=_WEIGHTS.format(loss.name))
    finding = _by_sums(loss, candidates, whole, parts)
    if finding.problem or not weights_vary(whole, parts):
        return finding
    problem = _OVER_MEAN if are_over_their_mean(whole, parts) else _WEIGHTS
    return Finding(problem=problem.format(loss.name))


def _by_sums(
    loss: WindowLoss, candidates: Candidates, whole: Shown, parts: Sequence[Shown]
) -> Finding:
    """Compare the loss of a batch with the losses of its parts, weighted by each candidate."""
    is_sum = candidates.divisor.counts == NOTHING
    if is_sum and _adds_penalties(whole):
        return Finding(problem=_PENALTY_OF_SUM.format(loss.name))
    # A batch without items may divide by what one item divides by, as clamp(min=1) does.
    counts = {seen.items or 1.0 for seen in candidates.first.observed}
    if not is_sum and len(counts) > 1 and _has_sum(whole, parts):
        return _refused(loss, whole, parts)
    adding_up = []
    for candidate in candidates.candidates:
        if not parts or _adds_up(replace(candidates, candidates=[candidate]), whole, parts):
            adding_up.append(candidate)
    if adding_up:
        all_zero = not any(shown.value for shown in (whole, *parts))
        remaining = replace(candidates, candidates=adding_up)
        reason = OF_THE_BATCH if _pairs_samples(whole, parts) else ""
        return Finding(remaining, reason=reason, retry=all_zero and not candidates.known)
    if is_sum and not losses_of(whole, parts).is_between():
        return Finding(problem=_NO_MEAN.format(loss.name, OF_THE_BATCH))
    if is_sum:
        return _refused(loss, whole, parts)
    if any(term.call is not None and term.call.weight is not None for term in whole.terms):
        return Finding(problem=_WEIGHTS.format(loss.name))
    return Finding(candidates, reason=OF_THE_BATCH)


def _without_candidates(
    loss: WindowLoss, candidates: Candidates, whole: Shown, parts: Sequence[Shown]
) -> Finding:
    """Return what is found out about a loss that no count of the batch explains."""
    if not parts and not any(term.averages for term in whole.terms):
        divides = _UNKNOWN_CONSTANT.format(loss.name, whole.divisors, _ONE_SAMPLE, loss.ways_out)
        return Finding(problem=divides)
    if _is_a_sum(candidates, whole, parts):
        return Finding(_as_a_sum(candidates, whole, parts))
    if any(part.divides_by_none for part in parts) and not whole.divides_by_none:
        of_whole = _candidates(whole, [])
        if of_whole.candidates:
            return Finding(of_whole, reason=_NO_PART, retry=True)
    is_constant = _has_constant_divisors(candidates, whole, parts)
    is_of_batch = is_constant and not losses_of(whole, parts).is_between()
    return Finding(reason=OF_THE_BATCH) if is_of_batch else _refused(loss, whole, parts)


def _is_told_by_parts_alone(whole: Shown) -> bool:
    """Return whether a loss is a sum with weights, which may be shares of the whole batch."""
    divides = any(term.divides for term in whole.terms)
    return not divides and any(term.is_weighted for term in whole.terms)


def _may_vary(candidates: Candidates, whole: Shown) -> bool:
    """Return whether weights inside of a sum, or a factor of a mean, may depend on the batch."""
    is_sum = candidates.divisor.counts == NOTHING
    return is_sum or any(_is_around(term) for term in whole.terms)


def _is_around(term: Term) -> bool:
    """Return whether a number around a mean may depend on the batch."""
    if term.call is not None:
        return term.is_scaled
    return term.divides and term.factor != 1


def divisor_of_calls(whole: Shown) -> Divisor | None:
    """Return what a loss divides by if it is one of torch that compares labels of the batch."""
    if whole.error is not None or not whole.terms:
        return None
    divisors = []
    for term in whole.terms:
        compared = None if term.call is None else compared_by(term.call, whole.batch)
        if compared is None or not compared.is_certain:
            return None
        count = compared.divisor.items(whole.batch)
        divides_more = not near(
            count, term.divisor, tolerance_of(whole.loss, whole.terms, whole.batch)
        )
        if divides_more or _is_around(term):
            return None
        divisors.append(compared.divisor)
    return divisors[0] if len(set(divisors)) == 1 else None


def _candidates(
    whole: Shown, parts: Sequence[Shown], earlier: Candidates | None = None
) -> Candidates:
    """Return the ways to count that agree with a batch and its parts."""
    divisor_of_torch = divisor_of_calls(whole)
    if divisor_of_torch is not None:
        only = Candidates([Candidate(divisor_of_torch)], known=True)
        return only.after(whole.batch, whole.loss, whole.terms)
    shown = _telling(whole, parts)
    outer = len({len(seen.terms) for seen in shown}) > 1
    varies = not outer and _factors_vary(shown)
    possible = _possible(whole, parts, varies)
    if earlier is not None:
        possible = [divisor for divisor in possible if earlier.has(divisor)]
    candidates = Candidates(
        [Candidate(divisor) for divisor in possible],
        outer=outer,
        factors=varies,
        weighted=any(term.is_weighted and are_told_apart(term.weights) for term in whole.terms),
        rounded=_MEASURED_ROUNDED if parts and _has_rounded_weights(whole) else 0,
    )
    candidates = _after_silent(candidates, parts)
    for seen in shown:
        if outer and len(seen.terms) == 1:
            continue  # what divides a sum of one part divides the part
        candidates = candidates.after(seen.batch, seen.loss, seen.terms)
    if parts or any(term.averages or not term.divides for term in whole.terms):
        return candidates
    # One batch does not show whether another number than its items is a constant.
    exact = []
    for candidate in candidates.candidates:
        if near(candidate.scale(0.01), 1.0, 0.01):
            exact.append(candidate)
    return replace(candidates, candidates=exact)


def _has_rounded_weights(whole: Shown) -> bool:
    """Return whether weights in half precision are no values of the batch."""
    for term in whole.terms:
        for weight in term.weights:
            if is_half(weight) and term.weighs_unequally and not is_held(weight, whole.batch):
                return True
    return False


def _factors_vary(shown: Sequence[Shown]) -> bool:
    """Return whether numbers that the parts of a loss are multiplied with depend on the batch."""
    for terms_of_part in zip(*(seen.terms for seen in shown), strict=True):
        factors = {term.factor for term in terms_of_part if term.factor}
        if len(factors) > 1:
            return True
    return False


def _possible(whole: Shown, parts: Sequence[Shown], varies: bool) -> list[Divisor]:
    """Return all ways to count a batch, the likeliest first."""
    possible = list(divisors_of(whole.batch))
    possible += _counts_by_class(whole)
    divides = any(term.divides for seen in (whole, *parts) for term in seen.terms)
    if not (divides or varies):
        possible = [divisor for divisor in possible if divisor.items(whole.batch)]
        possible.insert(0, Divisor(NOTHING))
    for term in whole.terms:
        compared = None if term.call is None else compared_by(term.call, whole.batch)
        if compared is not None:
            possible.insert(0, compared.divisor)
    distinct: dict[Any, Divisor] = {}
    for divisor in possible:
        distinct.setdefault((*divisor[:-1], id(divisor.weight)), divisor)
    return list(distinct.values())


def _counts_by_class(whole: Shown) -> Iterator[Divisor]:
    """Yield the sums of weights of classes by which a loss multiplies its elements."""
    weights = [weight.reshape(-1) for term in whole.terms for weight in term.weights]
    for name, labels in tensors_of(whole.batch):
        if labels.is_floating_point() or labels.dtype == torch.bool or not labels.numel():
            continue
        for vector in whole.vectors:
            if labels.max() >= len(vector) or not spread_of(vector):
                continue
            if any(_is_of_classes(weight, vector, labels.reshape(-1)) for weight in weights):
                yield Divisor(LABELS, name, weight=vector.detach())


def _is_of_classes(weight: Tensor, vector: Tensor, labels: Tensor) -> bool:
    """Return whether a weight holds the weights of classes, in the order of classes or of labels.

    Negative labels are left out.
    """
    if weight.shape == vector.shape and torch.equal(weight, vector.to(weight)):
        return True
    is_class = labels >= 0
    if weight.numel() == labels.numel():
        weight = weight[is_class.to(weight.device)]
    of_labels = vector[labels[is_class].to(vector.device)]
    return torch.equal(of_labels.to(weight.device, weight.dtype), weight)


def _after_silent(candidates: Candidates, parts: Sequence[Shown]) -> Candidates:
    for part in parts:
        if part.tells_nothing:
            candidates = candidates.after(part.batch, part.loss, part.terms)
    return candidates


def _telling(whole: Shown, parts: Sequence[Shown]) -> list[Shown]:
    """Return the parts and the whole, without parts whose losses tell nothing."""
    telling = []
    for part in parts:
        if part.error is None and not part.tells_nothing and not _lacks_parts(part, whole):
            telling.append(part)
    return [*telling, whole]


def _lacks_parts(part: Shown, whole: Shown) -> bool:
    """Return whether a part of a batch multiplies a part of its loss with 0, and the batch not."""
    if len(part.terms) != len(whole.terms):
        return False
    pairs = zip(part.terms, whole.terms, strict=True)
    return any(not of_part.factor and of_whole.factor for of_part, of_whole in pairs)


def _as_a_sum(candidates: Candidates, whole: Shown, parts: Sequence[Shown]) -> Candidates:
    """Return that nothing, or a constant, divides the loss."""
    total = replace(candidates, candidates=[Candidate(Divisor(NOTHING))])
    for seen in _telling(whole, parts):
        total = total.after(seen.batch, seen.loss, seen.terms)
    return total


def _adds_up(candidates: Candidates, whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether each term of the whole is the mean of its parts, weighted by their items."""
    batches = [whole.batch, *(part.batch for part in parts)]
    if all(_is_mean(candidates, values, batches) for values in terms_in(whole, parts)):
        return True
    losses = sums_of_alike(whole, parts)
    return losses is not None and _is_mean(candidates, losses, batches)


def _is_mean(candidates: Candidates, values: Values, batches: Sequence[Any]) -> bool:
    """Return whether a value is the mean of its parts; the whole batch is the first of batches."""
    whole, *parts = batches
    if candidates.divisor.counts == NOTHING:
        return values.is_near(sum(values.parts))
    if any(value != value for value in values.parts):
        counts = [candidates.items(part) for part in parts]
        return values.is_near(weighted_mean(values.parts, counts))
    total = 0.0
    for part, value in zip(parts, values.parts, strict=True):
        total += candidates.multiplier(part) * value
    return values.is_near(total / candidates.multiplier(whole))


def _ranks_samples(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether the largest elements are taken of all samples, as in hard example mining."""
    for part in parts:
        ranked = [term.ranked for term in part.terms]
        if len(part.terms) == len(whole.terms) and ranked != [term.ranked for term in whole.terms]:
            return True
    return False


def _pairs_samples(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether a tensor has an element for each pair of samples, as in contrastive losses."""
    evaluations = [whole, *parts]
    if not parts or len({len(shown.shapes) for shown in evaluations}) > 1:
        return False
    samples = [batch_size(shown.batch) for shown in evaluations]
    for shapes in zip(*(shown.shapes for shown in evaluations), strict=True):
        if len({len(shape) for shape in shapes}) > 1:
            continue
        sizes_by_dimension = list(zip(*shapes, strict=True))
        if sizes_by_dimension.count(tuple(samples)) > 1:
            return True
    return False


def _penalties_vary(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether penalties of parameters are multiplied with other numbers in parts."""
    tolerance = tolerance_of(whole.loss, whole.terms, whole.batch)
    expected = penalties_of(whole.terms)
    for part in parts:
        multipliers = penalties_of(part.terms)
        if len(multipliers) != len(expected):
            continue
        pairs = zip(expected, multipliers, strict=True)
        if not all(near(first, second, tolerance) for first, second in pairs):
            return True
    return False


def _with_penalties_of(whole: Shown, part: Shown) -> Shown:
    """Return a part of a batch whose penalties are those of the batch.

    A parameter [1] that is compared with one sample looks like a penalty.
    """
    if len(part.terms) != len(whole.terms):
        return part
    pairs = zip(part.terms, whole.terms, strict=True)
    terms = [term._replace(is_penalty=of_whole.is_penalty) for term, of_whole in pairs]
    return part._replace(terms=terms)


def _adds_penalties(whole: Shown) -> bool:
    """Return whether a loss has penalties of parameters beside its samples."""
    return bool(penalties_of(whole.terms)) and any(not term.is_penalty for term in whole.terms)


def _has_sum(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether a part of a loss is a sum over samples, which nothing divides."""
    telling = _telling(whole, parts)
    if len({len(shown.terms) for shown in telling}) > 1:
        return False
    for terms in zip(*(shown.terms for shown in telling), strict=True):
        divisors = {term.divisor for term in terms}
        if len(divisors) > 1 or not terms[0].factor:
            continue
        elements = {term.summed for term in terms}
        selected = {_summed(term) for term in terms} - {0}
        if len(elements) > 1 and len(selected) > 1:
            return True
    return False


def _summed(term: Term) -> int:
    """Return how many elements a sum takes that no mask leaves out."""
    counts = [term.summed]
    for weight in term.weights:
        if weight.numel() == term.summed:
            counts.append(int(weight.count_nonzero()))
    return min(counts)


def _has_constant_divisors(candidates: Candidates, whole: Shown, parts: Sequence[Shown]) -> bool:
    if not parts:
        return False
    numbers = [candidates.read(shown.terms) for shown in _telling(whole, parts)]
    for divisors in numbers:
        if len(divisors) != len(numbers[0]):
            return False
        for first, divisor in zip(numbers[0], divisors, strict=True):
            if not near(first, divisor, candidates.tolerance):
                return False
    return True


def _is_a_sum(candidates: Candidates, whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether a loss that divides by constants is the sum of its parts' losses."""
    if not _has_constant_divisors(candidates, whole, parts):
        return False
    losses = losses_of(whole, parts)
    return losses.is_near(sum(losses.parts))


def _by_values(loss: WindowLoss, whole: Shown, parts: Sequence[Shown], reason: str) -> Finding:
    """Compare the loss of a batch with the losses of its parts, as its graph does not tell."""
    if reason or not parts:
        return Finding(reason=reason or _ONE_SAMPLE)

    losses = losses_of(whole, parts)
    reason = losses.tells_no_mean()
    if reason:
        return Finding(reason=reason, retry=True)
    likely_counts = [loss.items(part.batch).items for part in parts]
    is_likely = losses.is_mean(likely_counts)
    if not is_likely and not losses.is_between():
        return Finding(reason=OF_THE_BATCH)
    matching: dict[float, list[Candidate]] = {}
    for divisor in divisors_of(whole.batch):
        counts = [divisor.items(part.batch) for part in parts]
        share = first_share(counts)
        if share is not None and losses.is_mean(counts):
            matching.setdefault(share, []).append(Candidate(divisor))
    likely = first_share(likely_counts) if is_likely else None
    if likely in matching:
        # Those that give the parts other shares agree within the precision of the losses alone.
        matching = {likely: matching[likely]}
    elif is_likely:
        return Finding(reason=f"{whole.error}, and a batch in two parts shows what it holds alone")
    if len(matching) != 1:
        return _refused(loss, whole, parts)
    (candidates,) = matching.values()
    return Finding(Candidates(candidates, by_values=True), reason=str(whole.error))


def _refused(loss: WindowLoss, whole: Shown, parts: Sequence[Shown]) -> Finding:
    """Return why a loss is refused: what it is, what was expected, and what it divides by."""
    samples = batch_size(whole.batch)
    divides = f"divides by {whole.divisors} for a batch of {samples} samples"
    if parts:
        divides += f" and by {parts[0].divisors} and {parts[1].divisors} for its parts"
    divisors = _means_over(whole, parts)
    if divisors:
        over = " and ".join(f"over {divisor.described()}" for divisor in divisors)
        problem = _SEVERAL_MEANS.format(loss.name, divides, over)
        return Finding(problem=problem)
    unexplained = "which is no number of items that the batch holds"
    losses = losses_of(whole, parts)
    counts = [loss.items(part.batch).items for part in parts]
    expected = weighted_mean(losses.parts, counts) if parts else whole.value
    if losses.is_near(expected):
        return Finding(problem=f"{loss.name} {divides}, {unexplained}: {loss.ways_out}")
    numbers = _told_apart(whole.value, expected)
    because = f", as it {divides}, {unexplained}" if whole.terms else ""
    return Finding(
        problem=f"the mean loss of a batch is not that of its parts: {loss.name} is {numbers[0]} "
        f"for {samples} samples, but the mean over {loss.counted_as(whole.batch)} of its parts is "
        f"{numbers[1]}, so that its mean is over something else{because}: {loss.ways_out}"
    )


def _means_over(whole: Shown, parts: Sequence[Shown]) -> list[Divisor]:
    """Return what each term of a loss is a mean over, if each is one, and they differ."""
    telling = _telling(whole, parts)
    if len(telling) < 3 or len({len(shown.terms) for shown in telling}) > 1:
        return []
    over: list[Divisor] = []
    for number, term in enumerate(whole.terms):
        if term.is_penalty or not term.factor:
            continue
        divisors = [shown.terms[number].divisor for shown in telling]
        counted = _counted_as(divisors, [shown.batch for shown in telling], term.dtype)
        if counted is None:
            return []
        if counted not in over:
            over.append(counted)
    return over if len(over) > 1 else []


def _counted_as(
    divisors: Sequence[float], batches: Sequence[Any], dtype: torch.dtype | None
) -> Divisor | None:
    """Return the way to count that gives these divisors, up to a constant."""
    tolerance = 1e-9 if dtype in (None, torch.float64) else 1e-5
    for divisor in divisors_of(batches[-1]):
        counts = [divisor.items(batch) for batch in batches]
        if not all(counts) or not all(divisors):
            continue
        ratios = [number / count for number, count in zip(divisors, counts, strict=True)]
        if are_equal(ratios, tolerance):
            return divisor
    return None


def _told_apart(first: float, second: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to tell them apart."""
    texts = "", ""
    for digits in (6, 9, 12, 17):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts
