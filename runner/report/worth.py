"""What a difference between settings is worth, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.findings import Findings
from runner.report.look import joined, plural
from runner.report.settings import Setting
from runner.report.statistics import Difference

CLEARLY, PROBABLY, FEW, TIE, SAME = "clearly", "probably", "few", "tie", "same"
REVERSED = "reversed"  # better than the best mean, on the common seeds
LONGEST_NAMES = 70  # most characters of the names of settings in a title
SINGLE = "single"  # fewer than two common seeds


def kind(difference: Difference | None) -> str:
    """Return what a difference is worth."""
    if difference is None or difference.p is None:
        return SINGLE
    if difference.same:
        return SAME
    if difference.seen:
        return CLEARLY
    if difference.probable:
        return PROBABLY
    return TIE if difference.needed is None else FEW


def in_words(findings: Findings, difference: Difference | None) -> str:
    """Return what a difference to `compared_with` is worth, in plain words."""
    worth = kind(difference)
    if difference is None:
        return ""
    better = (difference.value > 0) == findings.higher_is_better
    direction = "better" if better else "worse"
    if worth == FEW and difference.needed is not None:
        return f"too few seeds to tell: {difference.needed - difference.seeds} more would"
    texts = {SAME: "identical", TIE: "tie", SINGLE: "too few common seeds to tell"}
    texts |= {CLEARLY: f"clearly {direction}", PROBABLY: f"probably {direction}"}
    return texts[worth]


def names(settings: Sequence[Setting]) -> str:
    """Return the names of one or two settings if they are short, else their number."""
    text = joined([setting.label for setting in settings], 2)
    short = len(settings) <= 2 and len(text) <= LONGEST_NAMES
    return text if short else plural(len(settings), "other")


def rivals_by_worth(findings: Findings) -> dict[str, list[Setting]]:
    """Return the settings after the best one, by what their difference to it is worth."""
    by_worth: dict[str, list[Setting]] = {}
    for setting in findings.ranked[1:]:
        worth = kind(findings.rivals.get(setting.index))
        if worth == CLEARLY and not findings.is_worse(setting):
            worth = REVERSED
        by_worth.setdefault(worth, []).append(setting)
    return by_worth


def undecided(findings: Findings) -> list[tuple[Setting, Difference]]:
    """Return the settings that more seeds would tell from the best one, in order of rank."""
    rivals = []
    for setting in findings.ranked[1:]:
        difference = findings.rivals.get(setting.index)
        if difference is not None and difference.needed is not None and not difference.seen:
            rivals.append((setting, difference))
    return rivals
