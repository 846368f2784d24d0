"""What is wrong with the norms that ranks returned, and with the values that they log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from runner.check.clipped import Clipped
from runner.check.mistakes import Explainer
from runner.check.parts import Part
from runner.check.ranks import Ranks
from runner.check.reference import coefficients, combined, near, root

_SUSPECT = 0.03  # errors up to which torch's own rounding is computed: it may explain them
_LOGGED = 1e-3  # logs round
_COEFFICIENT = "this is the coefficient that gradients are multiplied by, not the norm"
_NOTHING_ADDED = "no gradient was added up, as of an iterator that is used up, or an empty list"
_NOTEWORTHY = 1e-4  # rounding of a norm that a note mentions


def norm_in_the_type_of_the_gradients(
    clipped: Clipped, parts: Sequence[Part], ranks: Ranks
) -> float | None:
    """Return what torch's own rounding makes of the true norm, where this matters.

    On a CPU torch adds float32 one after another: a tensor of a million equal elements is off by
    4e-4. The norm is computed, by a collective, if an error is of a size that this may explain.
    """
    if not _is_suspect(clipped):
        return None
    exponent = 1.0 if math.isinf(clipped.p) or clipped.p == 0 else clipped.p
    powers_here = []
    for part in parts:
        if part.before is None:
            powers_here.append(0.0)
        else:
            norm = float(torch.linalg.vector_norm(part.before, clipped.p))
            powers_here.append(norm**exponent)
    powers = ranks.gather(powers_here)
    places = clipped.whole.places()
    total = combined([powers[rank][position] for rank, position in places], clipped.p)
    return root(total, clipped.p)


def _is_suspect(clipped: Clipped) -> bool:
    """Return whether an error is between the tolerance and what rounding may explain."""
    norms = [norm for norm in (*clipped.returned, *clipped.logged) if norm is not None]
    if clipped.mode == "norm":
        for change in clipped.all_changes:
            if 0 < change.coefficient < 1:
                norms.append(clipped.max_norm / change.coefficient)
    true = clipped.norm
    if not true:
        return False
    tolerance = clipped.tolerance
    return any(tolerance < abs(norm - true) / true < _SUSPECT for norm in norms)


def rounding_note(clipped: Clipped, rounded: float) -> str | None:
    """Return a note on a norm that torch's own sum rounds."""
    true = clipped.norm
    if near(rounded, true, clipped.tolerance) or not math.isfinite(rounded):
        return None
    return (
        f"torch's own sum in the type of the gradients is off by {abs(rounded / true - 1):.2g}: "
        f"{rounded:.6g} counts as right too"
    )


def bfloat16_note(clipped: Clipped) -> str | None:
    """Return a note on right norms that are rounded to bfloat16."""
    norms = [norm for norm in clipped.returned if norm is not None]
    if not norms or not _in_bfloat16(norms):
        return None
    worst = max(abs(norm - clipped.norm) for norm in norms) / (clipped.norm or 1.0)
    if worst <= _NOTEWORTHY:
        return None
    return f"the norm is rounded to bfloat16, the type of the gradients: off by {worst:.2g}"


def of_returned(clipped: Clipped, right: Sequence[float], explainer: Explainer) -> str | None:
    """Return what is wrong with the norms that ranks returned; ``right`` are norms that are not."""
    tolerance = clipped.tolerance
    for rank, norm in enumerate(clipped.returned):
        if norm is not None and not _near_any(norm, right, tolerance):
            reason: str | None = _NOTHING_ADDED
            if any(clipped.returned):
                reason = explainer.mistake_behind(clipped.returned, tolerance)
                reason = reason or _reason_of_returned(clipped)
            return _off(clipped, norm, f"rank {rank} returned", reason)
    return None


def _reason_of_returned(clipped: Clipped) -> str | None:
    """Return what norms that no known mistake predicts have in common."""
    returned = clipped.returned
    if all(norm is None or _is_coefficient(norm, clipped) for norm in returned):
        return _COEFFICIENT
    for group in clipped.groups:
        if all(norm is None or near(norm, group.norm, clipped.tolerance) for norm in returned):
            return f"the norm of these alone: {group.names}"
    digits = _reason_of_digits(clipped)
    if digits:
        return digits
    values: dict[int, float] = {}
    for rank, norm in enumerate(returned):
        if norm is not None:
            values[rank] = norm
    if len(set(values.values())) < 2:
        return None
    texts = [f"{norm:.6g} on rank {rank}" for rank, norm in values.items()]
    return f"ranks returned different norms: {', '.join(texts)}"


def _reason_of_digits(clipped: Clipped) -> str | None:
    """Return what the digits of the norms that were returned show."""
    norms = [norm for norm in clipped.returned if norm is not None]
    if not any(map(math.isfinite, norms)):
        return "a sum that overflowed, or that has more than these gradients, which are finite"
    for digits in range(5):
        if all(norm == round(clipped.norm, digits) for norm in norms):
            return f"the norm is rounded to {digits} decimal places"
    if _in_bfloat16(norms):
        return "it has the few digits of bfloat16, so it was computed in it, or is another number"
    return None


def of_logged(
    clipped: Clipped, right: Sequence[float], explainer: Explainer, norm_is_wrong: bool
) -> Iterator[str]:
    """Yield what is wrong with logged values; a wrong norm that was returned is named already."""
    tolerance = max(clipped.tolerance, _LOGGED)
    named: list[float] = []
    for rank, norm in enumerate(clipped.logged):
        if norm is None or _near_any(norm, [*right, *named], tolerance):
            continue
        returned = clipped.returned[rank]
        if norm_is_wrong and returned is not None and near(norm, returned, tolerance):
            continue
        norms: list[float | None] = [None] * clipped.whole.size
        norms[rank] = norm
        reason = explainer.mistake_behind(norms, tolerance)
        if reason is None and _is_coefficient(norm, clipped):
            reason = _COEFFICIENT
        named.append(norm)
        yield "the logged value is " + _off(clipped, norm, f"rank {rank} logs", reason)


def _is_coefficient(value: float, clipped: Clipped) -> bool:
    low, high = coefficients(clipped.norm, clipped.max_norm)
    return low * 0.999 <= value <= high * 1.001


def _off(clipped: Clipped, norm: float, who: str, reason: str | None) -> str:
    """Return by how much a norm is off, and why."""
    true = clipped.norm
    share = norm / true if true else math.inf
    reason = reason or "no known mistake gives this number"
    return f"{share:.4g} of the true norm: {reason} ({who} {norm:.6g}, the true norm is {true:.6g})"


def _in_bfloat16(values: Sequence[float | None]) -> bool:
    """Return whether bfloat16 has every one of these values."""
    for value in values:
        if value is not None:
            exact = torch.tensor(value)
            if float(exact.bfloat16()) != float(exact):
                return False
    return True


def _near_any(value: float, right: Sequence[float], tolerance: float) -> bool:
    return any(near(value, norm, tolerance) for norm in right)
