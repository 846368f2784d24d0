"""What is wrong with clipping by value, or by units."""

from __future__ import annotations

from runner.check.clipped import Clipped, applied, became_nan, names_of
from runner.check.reference import near


def of_elements(clipped: Clipped) -> str | None:
    """Return what is wrong with the elements after clipping by value or by units."""
    broken = [change for change in clipped.all_changes if not change.finite]
    if broken:
        return became_nan(broken)
    wrong = {change.name for change in clipped.all_changes if change.error > _least(change.least)}
    if not wrong:
        return None
    mode = clipped.mode
    limit = clipped.max_norm
    what = f"elements in [-{limit:g}, {limit:g}]" if mode == "value" else "units"
    changes = [change for change in clipped.all_changes if change.name in wrong]
    names = names_of(changes)
    if all(change.residual <= change.least for change in changes):
        if all(near(change.coefficient, 1.0, 1e-6) for change in changes):
            return f"nothing was clipped by {mode}: {names}"
        coefficients = applied(clipped.all_changes)
        return f"scaled by one coefficient ({coefficients}) instead of clipping {what}: {names}"
    worst = max(change.error for change in changes)
    largest = max(change.largest for change in changes)
    return (
        f"not clipped by {mode}: {names} differ by up to {worst:.2g} of their largest element "
        f"from what {what} should be (the largest is {largest:.4g})"
    )


def _least(rounding: float) -> float:
    """Return the least error of an element that is a fault."""
    return max(rounding, 1e-5)
