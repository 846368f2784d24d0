"""Sentences on what a sweep shows about the keys that it varied, and the remarks of its runs.

A key that the sweep varied is judged by the results alone: rules of thumb about it are left out. A
remark that several settings share is shown once, with their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations

from runner.report.findings import Findings
from runner.report.groups import Group, choice
from runner.report.notation import rounded

THRESHOLD, RATE = "clip.threshold", "optimizer.lr"

FULLY = 0.95
"""Share of clipped steps above which a lower threshold clips hardly more of them."""

ALIKE = 0.05
"""Relative difference below which the results of single runs count as equal."""

# Topics with a sentence of their own on a page of several settings, in the order of the page.
_SHARED = {
    "nonfinite": "some gradients were NaN or inf, which no threshold fixes: check the loss and the "
    "precision.",
    "never": "no step was clipped, so the threshold changed nothing.",
    "nothing": "clipping has no effect with {optimizer}, which uses the sign of each gradient "
    "element alone.",
    "limits": "clipping acts on ordinary gradients rather than on spikes; raise clip.threshold, "
    "and lower optimizer.lr if training then becomes unstable.",
    "weighs": "{optimizer} steps by the sign of a mean of gradients: clipping most gradients does "
    "not make its steps smaller.",
    "cancels": "clipping most gradients does not make the steps of {optimizer} smaller.",
}
# Keys that the sentence of a topic is about; it is left out if the sweep varied one of them.
_ABOUT = {"limits": (RATE, THRESHOLD), "cancels": (THRESHOLD,)}


def advice(found: Findings) -> list[str]:
    """Return what the sweep shows, and the remarks of its runs."""
    few = _few(found)
    if few:
        return [*_own(found, ("nonfinite",)), few]
    measured = [*_edges(found), *_best_rates(found), *_joint(found), *_alike(found)]
    return [*measured, *_own(found, tuple(_SHARED))]


def varied(found: Findings, key: str) -> bool:
    """Return whether settings that are otherwise equal differ in ``key``."""
    return any(len(_along(found, group, key)) > 1 for group in found.groups)


def edge(found: Findings, key: str) -> str | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried.

    Only settings that equal the best one in all other keys are compared. There is no sentence if
    seeds differ by more than these settings do, or if values beyond the edge change nothing.
    """
    best = next(iter(found.ranked()), None)
    if best is None or _value(best, key) is None:
        return None
    tried = _along(found, best, key)
    # A value that diverged limits the range as well as one with a worse result.
    judged = {value: group for value, group in tried.items() if found.scores(group)}
    known = list(judged)
    if len(known) < 2 or not _apart(found, list(judged.values())):
        return None
    top = [v for v, group in judged.items() if found.mean(group)[0] == found.mean(best)[0]]
    lowest, highest = known[0] in top, known[-1] in top
    if lowest == highest:
        return None
    which = "tried" if len(judged) == len(tried) else "with a result"
    the_best = _named(found, best, key)
    if lowest:
        if key == THRESHOLD and _train_alike(found, list(judged.values())):
            return None
        value = known[0]
        return (
            f"{the_best}, {rounded(value)}, is the lowest {which}: a lower one may do better "
            f"(try {rounded(value / 2)} and {rounded(value / 4)})."
        )
    value = known[-1]
    if key != THRESHOLD:
        return (
            f"{the_best}, {rounded(value)}, is the highest {which}: a higher one may do better "
            f"(try {rounded(value * 2)} and {rounded(value * 4)})."
        )
    # Beyond the highest threshold lies no clipping: there is nothing more to try if that was tried,
    # or if the threshold clipped nothing.
    unclipped = any(not group.clips and found.scores(group) for group in found.groups)
    if unclipped or not found.ratio(best):
        return None
    return (
        f"{the_best}, {rounded(value)}, is the highest {which}: a higher one, or none, may do "
        f"better (try {rounded(value * 2)} and clip=none)."
    )


def _edges(found: Findings) -> list[str]:
    said = [edge(found, key) for key in (THRESHOLD, RATE)]
    return [sentence for sentence in said if sentence]


def _best_rates(found: Findings) -> list[str]:
    """Return a sentence if the best learning rate depends on the threshold."""
    best = next(iter(found.ranked()), None)
    rates: dict[float, float] = {}
    for threshold, group in _along(found, best, THRESHOLD).items() if best else ():
        known = _along(found, group, RATE)
        ranked = [one for one in found.ranked() if one in known.values()]
        if len(known) > 1 and ranked and _apart(found, ranked):
            rates[threshold] = _value(ranked[0], RATE) or math.nan
    if len(set(rates.values())) < 2 or len(rates) > 6:
        return []
    each = ", ".join(
        f"{rounded(rate)} at {rounded(threshold)}" for threshold, rate in rates.items()
    )
    return [f"The best {RATE} depends on the threshold: {each}."]


def _joint(found: Findings) -> list[str]:
    """Return a sentence if rate and threshold act together, but only one was varied."""
    best = next(iter(found.ranked()), None)
    if best is None or "limits" not in _topics(best):
        return []
    known = [key for key in (THRESHOLD, RATE) if varied(found, key)]
    if len(known) != 1:
        return []
    other = RATE if known[0] == THRESHOLD else THRESHOLD
    return [
        f"The best setting clipped {found.clipped(best)}. There {THRESHOLD} and {RATE} act "
        f"together, and this sweep varied only {known[0]}: vary {other} as well."
    ]


def _alike(found: Findings) -> list[str]:
    """Return a sentence if thresholds train alike because the optimizer normalizes gradients.

    It is left out if the results differ.
    """
    for group in found.groups:
        members = [g for g in _along(found, group, THRESHOLD).values() if _scale_cancels(found, g)]
        if group in members[:1] and _train_alike(found, members):
            optimizer = _topics(group)["cancels"]
            return [
                f"{_who(found, members)}: nearly every step was clipped, and {optimizer} divides "
                "by the size of the gradients, so these thresholds train nearly alike."
            ]
    return []


def _train_alike(found: Findings, groups: list[Group]) -> bool:
    """Return whether thresholds bind in every step, cancel in the optimizer, and did as well."""
    cancels = all(_scale_cancels(found, group) for group in groups)
    return len(groups) > 1 and cancels and not _apart(found, groups)


def _apart(found: Findings, groups: list[Group]) -> bool:
    """Return whether the results of some of ``groups`` clearly differ.

    With one seed each, a relative difference above `ALIKE` counts as clear.
    """
    if all(len(found.scores(group)) > 1 for group in groups):
        return any(found.differ(one, other) for one, other in combinations(groups, 2))
    means = [found.mean(group)[0] for group in groups]
    if not all(map(math.isfinite, means)):
        return True
    return max(means) - min(means) > ALIKE * max(abs(min(means)), abs(max(means)))


def _few(found: Findings) -> str | None:
    """Return a sentence if the runs are too short to judge a threshold."""
    clipped = [group for group in found.groups if group.threshold is not None]
    short = [group for group in clipped if "few" in _topics(group)]
    if not short or len(found.groups) == 1:
        return None if not short else _texts(short[0]).get("few")
    return f"{_who(found, short)}: fewer than 50 steps are too few to tell what a threshold does."


def _own(found: Findings, topics: tuple[str, ...]) -> Iterator[str]:
    """Yield the remarks of runs; one that several settings share is given once."""
    if len(found.groups) == 1:
        texts = _texts(found.groups[0])
        yield from (texts[topic] for topic in topics if topic in texts)
        return
    for topic in topics:
        if any(varied(found, key) for key in _ABOUT.get(topic, ())):
            continue
        members: dict[str, list[Group]] = {}
        for group in found.groups:
            optimizer = _topics(group).get(topic)
            if optimizer is not None:
                members.setdefault(optimizer, []).append(group)
        for optimizer, groups in members.items():
            yield f"{_who(found, groups)}: {_SHARED[topic].format(optimizer=optimizer)}"


def _topics(group: Group) -> dict[str, str]:
    """Return the topics that most runs of a setting remark on, and the optimizer they name."""
    counts: dict[str, list[str]] = {}
    for run in group.runs:
        for remark in _remarks(run.summary):
            counts.setdefault(str(remark["topic"]), []).append(str(remark.get("optimizer", "")))
    return {topic: who[0] for topic, who in counts.items() if 2 * len(who) > len(group.runs)}


def _texts(group: Group) -> dict[str, str]:
    """Return the text of each topic, from the first run of a setting that has it.

    The guidance of a run leaves out remarks on keys that its sweep varies.
    """
    texts: dict[str, str] = {}
    for run in group.runs:
        given = run.summary.get("guidance")
        for remark in _remarks(run.summary):
            if isinstance(given, list) and remark.get("text") in given:
                texts.setdefault(str(remark["topic"]), str(remark["text"]))
    return texts


def _remarks(summary: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = summary.get("remarks")
    listed = found if isinstance(found, list) else []
    return [one for one in listed if isinstance(one, dict) and "topic" in one]


def _scale_cancels(found: Findings, group: Group) -> bool:
    """Return whether nearly every step was clipped under an optimizer that cancels it."""
    clips_whole = group.info.parts is None and (found.ratio(group) or 0.0) > FULLY
    return clips_whole and "cancels" in _topics(group)


def _along(found: Findings, group: Group, key: str) -> dict[float, Group]:
    """Return the settings that equal ``group`` in all but ``key``, by rising value of ``key``."""
    others = [column for column in found.differences.columns if column not in ("seed", key)]
    members = [
        one
        for one in found.groups
        if all(choice(one.runs[0], c) == choice(group.runs[0], c) for c in others)
    ]
    values = [(_value(one, key), one) for one in members if one.mode == group.mode]
    known = [(value, one) for value, one in values if value is not None]
    return dict(sorted(known, key=lambda pair: pair[0]))


def _value(group: Group, key: str) -> float | None:
    """Return the value of ``key`` in a setting if it is a number above 0."""
    if key == THRESHOLD:
        return group.threshold
    value = group.runs[0].config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value < math.inf else None


def _named(found: Findings, best: Group, key: str) -> str:
    """Return the subject of a sentence on the best value of ``key``, and its other keys."""
    modes = {group.mode for group in found.groups if group.clips}
    name = "threshold" if key == THRESHOLD else key
    if key == THRESHOLD and len(modes) > 1:
        name = f"threshold of clip={best.mode}"
    others = [c for c in found.differences.columns if c not in ("seed", "clip.mode", key)]
    where = [f"{column}={choice(best.runs[0], column)}" for column in others]
    return f"With {', '.join(where)} the best {name}" if where else f"The best {name}"


def _who(found: Findings, groups: list[Group]) -> str:
    if len(groups) == len(found.groups):
        return "All settings"
    labels = [group.label for group in groups]
    if len(labels) <= 4:
        return ", ".join(labels)
    return f"{', '.join(labels[:3])} and {len(labels) - 3} more settings"
