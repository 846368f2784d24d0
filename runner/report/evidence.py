"""Sentences with what they rest on, and the comparisons of settings that they need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.report.findings import Findings
from runner.report.groups import Group, choice
from runner.report.notation import rounded
from runner.report.series import drawn

THRESHOLD, RATE = "clip.threshold", "optimizer.lr"

ALIKE = 0.05
"""Relative difference up to which the results of single runs count as equal."""


@dataclass(frozen=True)
class Advice:
    """One sentence and what it rests on."""

    text: str
    because: tuple[tuple[str, Group], ...]


def row(found: Findings, *groups: Group) -> tuple[tuple[str, Group], ...]:
    """Return what the rows of settings say, of three at most."""
    facts = []
    for group in groups[:3]:
        mean = found.mean(group)[0]
        parts = [f"{found.metric} {rounded(mean)}"] if found.scores(group) else []
        clipped = found.clipped(group)
        parts += [f"clipped {clipped}"] if clipped else []
        facts.append((f"{group.label}: {', '.join(parts) or 'no result'}", group))
    return tuple(facts)


def varied(found: Findings, key: str) -> bool:
    """Return whether settings that are otherwise equal differ in ``key``."""
    return any(len(along(found, group, key)) > 1 for group in found.groups)


def constant(groups: Sequence[Group], key: str) -> bool:
    """Return whether all settings have the same value of ``key``."""
    return len({value_of(group, key) for group in groups}) == 1


def apart(found: Findings, groups: Sequence[Group]) -> bool:
    """Return whether the results of some of ``groups`` clearly differ."""
    if all(len(found.seeds(group)) > 1 for group in groups):
        return found.differ(groups)
    means = [found.mean(group)[0] for group in groups]
    if not all(map(math.isfinite, means)):
        return True
    if found.higher_is_better and all(0 <= mean <= 1 for mean in means):
        means = [1 - mean for mean in means]  # of accuracies, the shares of errors
    return max(means) - min(means) > ALIKE * max(abs(min(means)), abs(max(means)))


def along(found: Findings, group: Group, key: str) -> dict[float, Group]:
    """Return the settings that equal ``group`` in all but ``key``, by rising value of ``key``."""
    others = [column for column in found.differences.columns if column not in ("seed", key)]
    members = {
        value: one
        for one in found.groups
        if one.mode == group.mode
        and all(choice(one.runs[0], c) == choice(group.runs[0], c) for c in others)
        and (value := value_of(one, key)) is not None
    }
    return dict(sorted(members.items()))


def value_of(group: Group, key: str) -> float | None:
    """Return the value of ``key`` in a setting if it is a number above 0."""
    if key == THRESHOLD:
        return group.threshold
    value = drawn(group.runs[0].config.get(key))
    return value if value is not None and 0 < value < math.inf else None


def topics_of(group: Group) -> dict[str, str]:
    """Return the topics of the remarks of most runs of a setting, and the optimizer they name."""
    optimizers: dict[str, list[str]] = {}
    for run in group.runs:
        for remark in remarks_of(run.summary):
            named = optimizers.setdefault(str(remark["topic"]), [])
            named.append(str(remark.get("optimizer", "")))
    return {
        topic: named[0] for topic, named in optimizers.items() if 2 * len(named) > len(group.runs)
    }


def remarks_of(summary: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the remarks in the summary of a run."""
    found = summary.get("remarks")
    listed = found if isinstance(found, list) else []
    return [one for one in listed if isinstance(one, dict) and "topic" in one]
