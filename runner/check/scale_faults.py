"""What is wrong with the coefficients that clipping by the norm applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from runner.check.clipped import Clipped, ScaledGroup, became_nan, names_of
from runner.check.measures import Change
from runner.check.mistakes import Explainer
from runner.check.reference import TORCH_EPS, coefficients, combined, near, root


def of_unequal_ranks(clipped: Clipped) -> str | None:
    """Return a parameter that ranks scaled differently, where their gradients differ too."""
    for name, changes in _by_name(clipped.all_changes).items():
        first = changes[0]
        for change in changes:
            tolerance = 1e-4 if change.coefficient > 1e-3 else 1e-2
            if not near(change.coefficient, first.coefficient, tolerance):
                return _scaled_differently(name, first, change)
    return None


def of_coefficients(
    clipped: Clipped, right: Sequence[float], explainer: Explainer, norm_is_wrong: bool
) -> Iterator[str]:
    """Yield what is wrong with the coefficients of clipping by the norm.

    ``right`` are the norms that count as right. A norm that is wrong is named already.
    """
    gone = [change for change in clipped.all_changes if change.gone]
    if gone:
        yield f"gradients are gone after the clipping: {names_of(gone)}"
    no_coefficient = _without_coefficient(clipped)
    if no_coefficient:
        yield no_coefficient
        return
    scaled = _scaled(clipped.all_changes)
    wrong = [change for change in scaled if not _follows(change, right, clipped)]
    if not wrong:
        return
    if norm_is_wrong:
        wrong = [change for change in scaled if not _follows_returned(change, clipped)]
        values = [change.coefficient for change in scaled]
        if not wrong and near(min(values), max(values), clipped.tolerance):
            yield _so_scaled(scaled[0], clipped)
            return
    yield _wrong_coefficients(clipped, scaled, wrong, explainer, norm_is_wrong)


def _scaled(changes: Sequence[Change]) -> list[Change]:
    """Return the changes that one coefficient describes."""
    return [change for change in changes if not math.isnan(change.coefficient)]


def _is_crooked(change: Change) -> bool:
    """Return whether elements were changed by more than one coefficient."""
    set_to_zero = change.largest == 0 and change.coefficient == 0
    return change.residual > change.least and not set_to_zero


def _without_coefficient(clipped: Clipped) -> str | None:
    """Return which gradients were changed by something else than one coefficient."""
    broken = [change for change in clipped.all_changes if not change.finite]
    if broken:
        return became_nan(broken)
    crooked = [change for change in clipped.all_changes if _is_crooked(change)]
    if not crooked:
        return None
    names = names_of(crooked)
    if all(near(change.largest, clipped.max_norm, 1e-4) for change in crooked):
        return f"clipped by value at {clipped.max_norm:g}, not by the norm: {names}"
    also = {change.also for change in crooked if change.also}
    if len(also) == 1:
        return f"not only scaled, but {also.pop()} too: {names}"
    return f"not scaled by one coefficient, but changed in another way: {names}"


def _follows(change: Change, norms: Sequence[float], clipped: Clipped) -> bool:
    """Return whether a coefficient follows from one of these norms, or from one between them."""
    bounds = [coefficients(norm, clipped.max_norm) for norm in norms]
    low = min(low for low, _ in bounds)
    high = max(high for _, high in bounds)
    return _between(change.coefficient, low, high, clipped.tolerance + change.least)


def _follows_returned(change: Change, clipped: Clipped) -> bool:
    """Return whether a coefficient follows from the wrong norm that its rank returned."""
    return _follows(change, [clipped.norm_on(change.rank)], clipped)


def _so_scaled(change: Change, clipped: Clipped) -> str:
    _, right = coefficients(clipped.norm, clipped.max_norm)
    return f"so gradients were scaled by {change.coefficient:.4g} instead of {right:.4g}"


def _wrong_coefficients(
    clipped: Clipped,
    scaled: Sequence[Change],
    wrong: Sequence[Change],
    explainer: Explainer,
    norm_is_wrong: bool,
) -> str:
    """Return the name of wrong coefficients."""
    _, right = coefficients(clipped.norm, clipped.max_norm)
    if all(near(change.coefficient, 1.0, 1e-6) for change in scaled):
        which = "whatever the norm" if norm_is_wrong else "right norm"
        return f"{which}, nothing was scaled: the coefficient is {right:.4g}"
    differently = _differ_by_name(clipped, scaled) or _differ_by_rank(scaled)
    if differently:
        return differently
    values = [change.coefficient for change in scaled]
    if near(min(values), max(values), clipped.tolerance + 1e-6):
        return _uniform(clipped, values[0], explainer)
    in_parts = _clipped_in_parts(clipped, scaled, norm_is_wrong)
    return in_parts or _some_wrong(scaled, wrong or scaled, right)


def _clipped_in_parts(
    clipped: Clipped, scaled: Sequence[Change], norm_is_wrong: bool
) -> str | None:
    """Return that parts were clipped by their own norms, or some of them before the others."""
    for level in ("parameter", "layer"):
        if _by_own_norm(clipped, scaled, level):
            return f"each {level} was clipped by its own norm, not by the norm of all"
    groups = clipped.groups
    if len(groups) > 1 and all(_is_of_own_norm(group, clipped) for group in groups):
        names = "; ".join(group.names for group in groups)
        return f"clipped in {len(groups)} groups, each by its own norm: {names}"
    first = _clipped_before(clipped, scaled) if norm_is_wrong else []
    return f"clipped before the rest, and again with it: {names_of(first)}" if first else None


def _is_of_own_norm(group: ScaledGroup, clipped: Clipped) -> bool:
    low, high = coefficients(group.norm, clipped.max_norm)
    return _between(group.coefficient, low, high, clipped.tolerance + 1e-6)


def _some_wrong(scaled: Sequence[Change], wrong: Sequence[Change], right: float) -> str:
    """Return which parameters were not scaled, or scaled by another coefficient."""
    names = names_of(wrong)
    if all(near(change.coefficient, 1.0, 1e-6) for change in wrong):
        lowest = min(change.coefficient for change in scaled)
        return f"not scaled, while others were scaled by {lowest:.4g}: {names}"
    first = wrong[0]
    return (
        f"{first.name} was scaled by {first.coefficient:.4g} on rank {first.rank} instead of "
        f"{right:.4g}, and so are others wrong: {names}"
    )


def _by_name(changes: Sequence[Change]) -> dict[str, list[Change]]:
    """Return the changes of each parameter that one coefficient describes, by rank."""
    by_name: dict[str, list[Change]] = {}
    for change in _scaled(changes):
        by_name.setdefault(change.name, []).append(change)
    return by_name


def _scaled_differently(name: str, first: Change, second: Change, more: str = "") -> str:
    return (
        f"{name} was scaled by {first.coefficient:.4g} on rank {first.rank} and by "
        f"{second.coefficient:.4g} on rank {second.rank}{more}"
    )


def _differ_by_name(clipped: Clipped, scaled: Sequence[Change]) -> str | None:
    """Return a parameter that ranks scaled differently."""
    apart: dict[str, tuple[Change, Change]] = {}
    for name, changes in _by_name(scaled).items():
        first = changes[0]
        for change in changes:
            tolerance = clipped.tolerance + change.least
            if name not in apart and not near(change.coefficient, first.coefficient, tolerance):
                apart[name] = (first, change)
    if not apart:
        return None
    # A parameter that the user names a group for tells more than others.
    in_groups = {unit.name for unit in clipped.whole.units if unit.facts.pattern}
    name = next((name for name in apart if name in in_groups), next(iter(apart)))
    more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
    return _scaled_differently(name, *apart[name], more)


def _differ_by_rank(scaled: Sequence[Change]) -> str | None:
    """Return two ranks that each applied one coefficient, but not the same."""
    by_rank: dict[int, set[float]] = {}
    for change in scaled:
        by_rank.setdefault(change.rank, set()).add(round(change.coefficient, 6))
    if any(len(values) > 1 for values in by_rank.values()):
        return None
    ranks = sorted(by_rank)
    first = next(iter(by_rank[ranks[0]]))
    for rank in ranks:
        value = next(iter(by_rank[rank]))
        if value != first:
            return (
                f"ranks applied different coefficients: {first:.4g} on rank {ranks[0]} and "
                f"{value:.4g} on rank {rank}"
            )
    return None


def _uniform(clipped: Clipped, value: float, explainer: Explainer) -> str:
    """Return why one coefficient was applied everywhere, but a wrong one."""
    norm = clipped.norm
    tolerance = clipped.tolerance
    low, high = coefficients(norm, clipped.max_norm)
    text = f"all gradients were scaled by {value:.4g} instead of {high:.4g}"
    if value == 0:
        return f"{text}: gradients were set to zero"
    if high < 1 and _between(value, low * low, high * high, 2 * tolerance + 1e-6):
        return f"{text}: clipped twice, the coefficient was applied two times"
    if high < 1 and near(value, _clipped_again(low, clipped), tolerance):
        return (
            f"{text}: clipped to the same norm again, and torch, which adds {TORCH_EPS:g} to the "
            "norm that it divides by, scales down further by that"
        )
    if value > 1 + tolerance:
        if near(value, clipped.max_norm / norm, tolerance):
            return f"{text}: a smaller gradient was scaled up to the threshold"
        if near(value, norm / clipped.max_norm, tolerance + 1e-6):
            return f"{text}: by the inverse of the coefficient"
        return f"{text}: scaled up"
    if value < 0:
        return f"{text}: the sign is wrong"
    return _of_another_norm(clipped, value, text, explainer)


def _clipped_again(coefficient: float, clipped: Clipped) -> float:
    """Return the coefficient of two calls of torch's clipping. ``coefficient`` is the first call's.

    The second call changes nothing where 1e-6 does not count beside the threshold.
    """
    norm_after = clipped.norm * coefficient
    return coefficient * min(1.0, clipped.max_norm / (norm_after + TORCH_EPS))


def _of_another_norm(clipped: Clipped, value: float, text: str, explainer: Explainer) -> str:
    """Return the norm, the loss scale or the threshold that gives a coefficient."""
    tolerance = clipped.tolerance
    norm = clipped.max_norm / value
    of_norm = f"{text}, that of a norm of {norm:.4g}"
    of_threshold = f"or of a threshold of {value * clipped.norm:.4g}"
    _, right = coefficients(clipped.norm, clipped.max_norm)
    times = right / value
    if times > 1.5 and near(times, round(times), 1e-4):
        of_threshold += f", or clipped gradients were divided by {round(times)}"
    if value < 1:
        norms = [norm] * clipped.whole.size
        reason = explainer.mistake_behind(norms, tolerance, factors=False)
        if reason:
            return f"{of_norm}: {reason}; {of_threshold}"
    power = math.log2(times)
    if power > 3 and near(power, round(power), 1e-4):
        return f"{text}: divided by 2^{round(power)}, as by unscaling inside of the block"
    return f"{of_norm}, {of_threshold}"


def _by_own_norm(clipped: Clipped, scaled: Sequence[Change], level: str) -> bool:
    """Return whether each parameter, or each layer, was scaled by the coefficient of its norm."""
    powers: dict[str, list[float]] = {}
    for unit in clipped.whole.units:
        powers.setdefault(_scope(unit.name, level), []).append(unit.power)
    for change in scaled:
        total = combined(powers.get(_scope(change.name, level), []), clipped.p)
        if not _follows(change, [root(total, clipped.p)], clipped):
            return False
    return True


def _scope(name: str, level: str) -> str:
    return name if level == "parameter" else name.rpartition(".")[0]


def _clipped_before(clipped: Clipped, scaled: Sequence[Change]) -> list[Change]:
    """Return parameters that were scaled twice, if this gives the norm that rank 0 returned."""
    returned = clipped.norm_on(0)
    _, last = coefficients(returned, clipped.max_norm)
    by_place = {(change.key, change.position): change for change in scaled}
    exponent = 1.0 if math.isinf(clipped.p) else clipped.p
    powers: list[float] = []
    before: list[Change] = []
    for unit in clipped.whole.units:
        change = by_place.get((unit.facts.key, unit.facts.position))
        factor = 1.0 if change is None else change.coefficient / last
        powers.append(unit.power * abs(factor) ** exponent)
        if change is not None and not near(factor, 1.0, 1e-3):
            before.append(change)
    norm = root(combined(powers, clipped.p), clipped.p)
    return before if near(norm, returned, 1e-4) else []


def _between(value: float, low: float, high: float, tolerance: float) -> bool:
    return low * (1 - tolerance) <= value <= high * (1 + tolerance)
