"""What is wrong with gradients before clipping, and with the coefficients that were applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from runner.check.measures import Change
from runner.check.norm_faults import Finder
from runner.check.parts import Whole
from runner.check.reference import coefficients, combined, root
from runner.config.notation import first_few, ranks_as_text

EXAMPLE = 'groups={"experts.*": process_group}'


def before(whole: Whole) -> Iterator[str]:
    """Yield what is wrong with the gradients that the clipping was given."""
    if whole.undeclared:
        yield (
            f"plain tensors with other values on other ranks, in no group: "
            f"{first_few(whole.undeclared)}; they count as parameters of each rank: say on which "
            f"ranks they differ, as in {EXAMPLE}, or broadcast them if they are replicas"
        )
    facts = [fact for rank in whole.ranks for fact in rank]
    partial = list(dict.fromkeys(fact.name for fact in facts if fact.partial))
    if partial:
        yield (
            "clipped before gradients were added up over ranks: a Partial placement on "
            f"{first_few(partial)}"
        )
    if not any(fact.has_gradient for fact in facts):
        yield (
            "no parameter has a gradient: clipped before backward(), after zero_grad(), or before "
            "gradients were synchronised (set_requires_gradient_sync)"
        )
    elif all(fact.power == 0 for fact in facts):
        yield "every gradient is zero: clipped before backward() or after zero_grad()"
    alone = _nonfinite_replicas(whole)
    unequal = [name for name in whole.unequal if name not in alone]
    if alone:
        yield (
            "a gradient is not finite on "
            + "; ".join(f"{ranks_as_text(ranks)} alone: {name}" for name, ranks in alone.items())
            + ": replicas have a finite one, so gradients were not averaged before clipping"
        )
    if unequal:
        yield (
            f"clipped before gradients were averaged: ranks differ in {first_few(unequal)} (or "
            f"each rank has parameters of its own: then name their ranks, as in {EXAMPLE})"
        )


def _nonfinite_replicas(whole: Whole) -> dict[str, list[int]]:
    """Return ranks whose replica of a gradient is not finite, by parameter."""
    found: dict[str, list[int]] = {}
    for unit in whole.units:
        ranks = [rank for rank, fact in unit.holders.items() if not fact.finite]
        if ranks and len(ranks) < len(unit.holders):
            found[unit.name] = ranks
    return dict(list(found.items())[:3])


def where_not_finite(whole: Whole) -> str:
    """Return which gradients are not finite, and on which ranks."""
    names: dict[str, list[int]] = {}
    for rank, facts in enumerate(whole.ranks):
        for fact in facts:
            if not fact.finite:
                names.setdefault(fact.name, []).append(rank)
    texts = [f"{name} on {ranks_as_text(ranks)}" for name, ranks in names.items()]
    return f"gradients are not finite: {first_few(texts)}"


def not_finite(
    whole: Whole, said: Sequence[Any], changes: Sequence[Sequence[Change]]
) -> Iterator[str]:
    """Yield what is wrong with a step whose norm is not finite: ranks have to agree."""
    finite = [
        rank
        for rank, one in enumerate(said)
        if one.returned is not None and math.isfinite(one.returned)
    ]
    if finite:
        rank = finite[0]
        yield (
            f"the norm is not finite, but {ranks_as_text(finite)} returned "
            f"{said[rank].returned:.6g}: {where_not_finite(whole)}"
        )
    decided: dict[str, list[int]] = {}
    for rank, row in enumerate(changes):
        for what in sorted({_done(change, whole.ranks[rank][i]) for i, change in enumerate(row)}):
            if what:
                decided.setdefault(what, []).append(rank)
    if len(decided) > 1:
        texts = [f"{what} on {ranks_as_text(ranks)}" for what, ranks in decided.items()]
        yield f"ranks did different things in a step that is not finite: {'; '.join(texts)}"


def _done(change: Change, fact: Any) -> str:
    """Return what was done to a finite gradient of a step that is not finite."""
    if not fact.has_gradient or not fact.finite or not fact.power or change.gone:
        return ""
    if not change.finite:
        return "made NaN"
    if _is(change.coefficient, 1.0, 1e-6):
        return "left as it was"
    if change.coefficient == 0:
        return "set to zero"
    return f"scaled by {change.coefficient:.4g}"


def applied(changes: Sequence[Sequence[Change]]) -> str:
    """Return the coefficients that were applied, in short."""
    values = [
        change.coefficient
        for row in changes
        for change in row
        if not math.isnan(change.coefficient)
    ]
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low:.6g}" if _is(low, high, 1e-5) else f"{low:.6g} to {high:.6g}"


def by_elements(
    whole: Whole, changes: Sequence[Sequence[Change]], mode: str, limit: float
) -> Iterator[str]:
    """Yield what is wrong with clipping by value or by units."""
    wrong: dict[str, list[int]] = {}
    worst = 0.0
    for rank, row in enumerate(changes):
        for change in row:
            if change.error > max(change.least, 1e-5):
                wrong.setdefault(change.name, []).append(rank)
                worst = max(worst, change.error)
    if not wrong:
        return
    what = f"elements in [-{limit:g}, {limit:g}]" if mode == "value" else "units"
    involved = [change for row in changes for change in row if change.name in wrong]
    plain = [change for change in involved if change.residual <= change.least]
    names = first_few(list(wrong))
    if len(plain) == len(involved) and all(_is(one.coefficient, 1.0, 1e-6) for one in plain):
        yield f"nothing was clipped by {mode}: {names}"
    elif len(plain) == len(involved):
        yield (
            f"scaled by one coefficient ({applied(changes)}) instead of clipping {what}: {names}"
        )
    else:
        largest = max(change.largest for change in involved)
        yield (
            f"not clipped by {mode}: {names} differ by up to {worst:.2g} of their largest element "
            f"from what {what} should be (the largest is {largest:.4g})"
        )


def ranks_differ(whole: Whole, changes: Sequence[Sequence[Change]]) -> Iterator[str]:
    """Yield coefficients that differ between ranks."""
    by_key: dict[Any, dict[int, float]] = {}
    for rank, row in enumerate(changes):
        for change in row:
            if not math.isnan(change.coefficient):
                by_key.setdefault(change.name, {})[rank] = change.coefficient
    for name, values in by_key.items():
        first = next(iter(values))
        for rank, value in values.items():
            if not _is(value, values[first], 1e-4 if value > 1e-3 else 1e-2):
                yield (
                    f"{name} was scaled by {values[first]:.4g} on rank {first} and by "
                    f"{value:.4g} on rank {rank}"
                )
                return


def by_coefficient(
    whole: Whole,
    changes: Sequence[Sequence[Change]],
    *,
    returned: Sequence[float] | None,
    norms: Sequence[float],
    max_norm: float,
    p: float,
    tolerance: float,
    explain: Finder,
) -> Iterator[str]:
    """Yield what is wrong with the coefficients of clipping by the norm.

    ``returned`` are norms of ranks that are wrong, and already named; ``norms`` the right ones.
    """
    norm = norms[0]
    flat = [(rank, change) for rank, row in enumerate(changes) for change in row]
    gone = [change.name for _, change in flat if change.gone]
    if gone:
        yield f"gradients are gone after the clipping: {first_few(list(dict.fromkeys(gone)))}"
    broken = [change.name for _, change in flat if not change.finite]
    if broken:
        yield f"gradients became NaN or inf: {first_few(list(dict.fromkeys(broken)))}"
        return
    crooked = [
        change
        for _, change in flat
        if change.residual > change.least and not (change.largest == 0 and change.coefficient == 0)
    ]
    if crooked:
        yield _crooked(crooked, max_norm)
        return
    known = [(rank, change) for rank, change in flat if not math.isnan(change.coefficient)]
    right = [coefficients(value, max_norm) for value in norms]
    low = min(bounds[0] for bounds in right)
    high = max(bounds[1] for bounds in right)
    wrong = [
        (rank, change)
        for rank, change in known
        if not _between(change.coefficient, low, high, tolerance + change.least)
    ]
    if not wrong:
        return
    yield from _wrong(whole, known, wrong, returned, norm, max_norm, p, tolerance, explain)


def _crooked(crooked: Sequence[Change], max_norm: float) -> str:
    names = first_few(list(dict.fromkeys(change.name for change in crooked)))
    at_limit = [_is(change.largest, max_norm, 1e-4) for change in crooked]
    if all(at_limit):
        return f"clipped by value at {max_norm:g}, not by the norm: {names}"
    return f"not scaled by one coefficient, but changed in another way: {names}"


def _wrong(
    whole: Whole,
    known: Sequence[tuple[int, Change]],
    wrong: Sequence[tuple[int, Change]],
    returned: Sequence[float] | None,
    norm: float,
    max_norm: float,
    p: float,
    tolerance: float,
    explain: Finder,
) -> Iterator[str]:
    """Yield the name of wrong coefficients."""
    _, high = coefficients(norm, max_norm)
    if returned is not None:
        # What does not follow from the wrong norm is wrong in itself.
        wrong = [
            (rank, change)
            for rank, change in known
            if not _between(
                change.coefficient,
                *coefficients(returned[rank], max_norm),
                tolerance + change.least,
            )
        ]
        if not wrong and len({round(change.coefficient, 9) for _, change in known}) == 1:
            applied_everywhere = known[0][1].coefficient
            yield f"so gradients were scaled by {applied_everywhere:.4g} instead of {high:.4g}"
            return
    all_ones = all(_is(change.coefficient, 1.0, 1e-6) for _, change in known)
    if all_ones:
        which = "right norm" if returned is None else "whatever the norm"
        yield f"{which}, nothing was scaled: the coefficient is {high:.4g}"
        return
    values = [change.coefficient for _, change in known]
    apart = _apart(whole, known, tolerance)
    if apart:
        yield apart
    elif _is(min(values), max(values), tolerance + 1e-6):
        yield _uniform(whole, values[0], norm, max_norm, tolerance, explain)
    else:
        pattern = _pattern_of_norms(whole, known, returned, max_norm, p, tolerance)
        yield pattern or _some_wrong(known, wrong, high)


def _pattern_of_norms(
    whole: Whole,
    known: Sequence[tuple[int, Change]],
    returned: Sequence[float] | None,
    max_norm: float,
    p: float,
    tolerance: float,
) -> str | None:
    """Return that parts were clipped by norms of their own, or some of them before the others."""
    for level in ("parameter", "layer"):
        if _by_own_norm(whole, known, level, max_norm, p, tolerance):
            return f"each {level} was clipped by its own norm, not by the norm of all"
    if returned is None:
        return None
    first = _clipped_before(whole, known, returned[0], max_norm, p)
    return f"clipped before the rest, and again with it: {first_few(first)}" if first else None


def _some_wrong(
    known: Sequence[tuple[int, Change]], wrong: Sequence[tuple[int, Change]], high: float
) -> str:
    """Return which parameters were not scaled, or scaled by another coefficient."""
    lowest = min(change.coefficient for _, change in known)
    unscaled = [change.name for _, change in wrong if _is(change.coefficient, 1.0, 1e-6)]
    if unscaled and len(unscaled) == len(wrong):
        names = first_few(list(dict.fromkeys(unscaled)))
        return f"not scaled, while others were scaled by {lowest:.4g}: {names}"
    rank, change = (wrong or known)[0]
    names = first_few(list(dict.fromkeys(change.name for _, change in wrong or known)))
    return (
        f"{change.name} was scaled by {change.coefficient:.4g} on rank {rank} instead of "
        f"{high:.4g}, and so are others wrong: {names}"
    )


def _apart(whole: Whole, known: Sequence[tuple[int, Change]], tolerance: float) -> str | None:
    """Return that ranks scaled one parameter, or parameters of one pattern, differently."""
    names: dict[str, dict[int, Change]] = {}
    for rank, change in known:
        names.setdefault(change.name, {})[rank] = change
    apart: dict[str, tuple[int, int]] = {}
    for name, by_rank in names.items():
        first = next(iter(by_rank))
        for rank, change in by_rank.items():
            least = tolerance + change.least
            if not _is(change.coefficient, by_rank[first].coefficient, least):
                apart[name] = (first, rank)
                break
    if apart:
        # A parameter that the user names a group for tells most.
        patterns = {unit.name for unit in whole.units if unit.facts.pattern}
        name = next((name for name in apart if name in patterns), next(iter(apart)))
        first, rank = apart[name]
        one = names[name][first].coefficient
        other = names[name][rank].coefficient
        more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
        return (
            f"{name} was scaled by {one:.4g} on rank {first} and by {other:.4g} on rank "
            f"{rank}{more}"
        )
    by_rank_alone: dict[int, set[float]] = {}
    for rank, change in known:
        by_rank_alone.setdefault(rank, set()).add(round(change.coefficient, 6))
    single = {
        rank: next(iter(values)) for rank, values in by_rank_alone.items() if len(values) == 1
    }
    if len(single) == len(by_rank_alone) > 1 and len(set(single.values())) > 1:
        ranks = sorted(single)
        first = ranks[0]
        rank = next(rank for rank in ranks if single[rank] != single[first])
        return (
            f"ranks applied different coefficients: {single[first]:.4g} on rank {first} and "
            f"{single[rank]:.4g} on rank {rank}"
        )
    return None


def _uniform(
    whole: Whole,
    value: float,
    norm: float,
    max_norm: float,
    tolerance: float,
    explain: Finder,
) -> str:
    """Return why one coefficient was applied everywhere, but a wrong one."""
    low, high = coefficients(norm, max_norm)
    text = f"all gradients were scaled by {value:.4g} instead of {high:.4g}"
    if value == 0:
        return f"{text}: gradients were set to zero"
    if high < 1 and _between(value, low * low, high * high, 2 * tolerance + 1e-6):
        return f"{text}: clipped twice, the coefficient was applied two times"
    if value > 1 + tolerance:
        if _is(value, max_norm / norm, tolerance):
            return f"{text}: a smaller gradient was scaled up to the threshold"
        return f"{text}: scaled up"
    if value < 0:
        return f"{text}: the sign is wrong"
    other = f"{text}, that of a norm of {max_norm / value:.4g}"
    why = explain([max_norm / value] * whole.size, tolerance, False) if value < 1 else None
    if why:
        return f"{other}: {why}"
    power = math.log2(high / value)
    if power > 3 and _is(power, round(power), 1e-4):
        return f"{text}: divided by 2^{round(power)}, as by unscaling inside of the block"
    return f"{other}, or of a threshold of {value * norm:.4g}"


def _by_own_norm(
    whole: Whole,
    known: Sequence[tuple[int, Change]],
    level: str,
    max_norm: float,
    p: float,
    tolerance: float,
) -> bool:
    """Return whether each parameter, or each layer, was scaled by the coefficient of its norm."""
    powers: dict[str, list[float]] = {}
    for unit in whole.units:
        powers.setdefault(_scope(unit.name, level), []).append(unit.power)
    for _, change in known:
        norm = root(combined(powers.get(_scope(change.name, level), []), p), p)
        low, high = coefficients(norm, max_norm)
        if not _between(change.coefficient, low, high, tolerance + change.least):
            return False
    return True


def _scope(name: str, level: str) -> str:
    return name if level == "parameter" else name.rpartition(".")[0]


def _clipped_before(
    whole: Whole,
    known: Sequence[tuple[int, Change]],
    returned: float,
    max_norm: float,
    p: float,
) -> list[str]:
    """Return parameters that were scaled twice, if this gives the norm that was returned."""
    _, last = coefficients(returned, max_norm)
    factors = {(change.key, change.position): change.coefficient / last for _, change in known}
    powers: list[float] = []
    names: dict[str, None] = {}
    exponent = 1.0 if math.isinf(p) else p
    for unit in whole.units:
        factor = factors.get((unit.facts.key, unit.facts.position), 1.0)
        powers.append(unit.power * abs(factor) ** exponent)
        if not _is(factor, 1.0, 1e-3):
            names[unit.name] = None
    explained = _is(root(combined(powers, p), p), returned, 1e-4)
    return list(names) if explained else []


def _between(value: float, low: float, high: float, tolerance: float) -> bool:
    return low * (1 - tolerance) <= value <= high * (1 + tolerance)


def _is(value: float, other: float, tolerance: float) -> bool:
    return abs(value - other) <= tolerance * max(abs(value), abs(other))
