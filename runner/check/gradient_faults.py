"""What is wrong with gradients before the clipping, and with a step that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

from runner.check.clipped import Clipped
from runner.check.measures import Change
from runner.check.parts import Facts
from runner.check.reference import near
from runner.check.whole import Whole
from runner.config.notation import first_few, ranks_as_text

_EXAMPLE = 'groups={"experts.*": process_group}'


def before_clipping(whole: Whole) -> Iterator[str]:
    """Yield what is wrong with the gradients that the clipping was given."""
    facts = [fact for facts in whole.ranks for fact in facts]
    if whole.undeclared:
        yield (
            f"plain tensors with other values on other ranks, in no group: "
            f"{first_few(whole.undeclared)}; they count as parameters of each rank: say on which "
            f"ranks they differ, as in {_EXAMPLE}, or broadcast them if they are replicas"
        )
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
    yield from _unequal_replicas(whole)


def _unequal_replicas(whole: Whole) -> Iterator[str]:
    """Yield replicas whose gradients differ, or are finite on some ranks alone."""
    nonfinite = _nonfinite_replicas(whole)
    if nonfinite:
        texts = [f"{ranks_as_text(ranks)} alone: {name}" for name, ranks in nonfinite.items()]
        yield (
            f"a gradient is not finite on {'; '.join(texts)}: replicas have a finite one, so "
            "gradients were not averaged before clipping"
        )
    unequal = [name for name in whole.unequal if name not in nonfinite]
    if unequal:
        yield (
            f"clipped before gradients were averaged: ranks differ in {first_few(unequal)} (or "
            f"each rank has parameters of its own: then name their ranks, as in {_EXAMPLE})"
        )


def _nonfinite_replicas(whole: Whole) -> dict[str, list[int]]:
    """Return ranks whose replica of a gradient is not finite, for the first parameters."""
    by_name: dict[str, list[int]] = {}
    for unit in whole.units:
        ranks = [rank for rank, fact in unit.holders.items() if not fact.finite]
        if ranks and len(ranks) < len(unit.holders):
            by_name[unit.name] = ranks
    return dict(list(by_name.items())[:3])


def where_not_finite(whole: Whole) -> str:
    """Return which gradients are not finite, and on which ranks."""
    names: dict[str, list[int]] = {}
    for rank, facts in enumerate(whole.ranks):
        for fact in facts:
            if not fact.finite:
                names.setdefault(fact.name, []).append(rank)
    texts = [f"{name} on {ranks_as_text(ranks)}" for name, ranks in names.items()]
    return f"gradients are not finite: {first_few(texts)}"


def of_nonfinite_step(clipped: Clipped) -> Iterator[str]:
    """Yield what is wrong with a step whose norm is not finite: ranks have to agree."""
    finite: dict[int, float] = {}
    for rank, norm in enumerate(clipped.returned):
        if norm is not None and math.isfinite(norm):
            finite[rank] = norm
    if finite:
        first = next(iter(finite.values()))
        yield (
            f"the norm is not finite, but {ranks_as_text(list(finite))} returned {first:.6g}: "
            f"{where_not_finite(clipped.whole)}"
        )
    ranks_by_action = _ranks_by_action(clipped)
    if len(ranks_by_action) > 1:
        texts = [f"{what} on {ranks_as_text(ranks)}" for what, ranks in ranks_by_action.items()]
        yield f"ranks did different things in a step that is not finite: {'; '.join(texts)}"


def _ranks_by_action(clipped: Clipped) -> dict[str, list[int]]:
    """Return what was done to finite gradients, and on which ranks."""
    ranks_by_action: dict[str, list[int]] = {}
    for rank, changes in enumerate(clipped.changes):
        facts = clipped.whole.ranks[rank]
        actions = {_action(*pair) for pair in zip(changes, facts, strict=True)}
        for action in sorted(actions - {""}):
            ranks_by_action.setdefault(action, []).append(rank)
    return ranks_by_action


def _action(change: Change, fact: Facts) -> str:
    """Return what was done to a finite gradient of a step that is not finite."""
    if not fact.has_gradient or not fact.finite or not fact.power or change.gone:
        return ""
    if not change.finite:
        return "made NaN"
    if near(change.coefficient, 1.0, 1e-6):
        return "left as it was"
    if change.coefficient == 0:
        return "set to zero"
    return f"scaled by {change.coefficient:.4g}"
