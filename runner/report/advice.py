"""Sentences on the keys that a sweep varied, and the remarks of its runs.

Only results judge a key that the sweep varied: remarks that are rules of thumb about it are left
out. A remark that several settings share is shown once, with their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from runner.report.findings import Findings
from runner.report.groups import Group, choice
from runner.report.notation import rounded

THRESHOLD, RATE = "clip.threshold", "optimizer.lr"

FULLY = 0.95
"""Share of clipped steps from which a lower threshold clips hardly any further steps."""

ALIKE = 0.05
"""Relative difference up to which the results of single runs count as equal."""

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
"""Sentence for each topic on a page of several settings, in the order of the page."""

_ABOUT = {"limits": (RATE, THRESHOLD), "cancels": (THRESHOLD,)}
"""Keys that a topic is about: its sentence is left out if the sweep varied one of them."""


def advice(found: Findings) -> list[str]:
    """Return what the sweep shows, and the remarks of its runs."""
    if few := _few(found):
        return [*_own(found, ("nonfinite",)), few]
    edges = [sentence for key in (THRESHOLD, RATE) if (sentence := edge(found, key))]
    measured = [*edges, *_best_rates(found), *_joint(found), *_alike(found)]
    return [*measured, *_own(found, tuple(_SHARED))]


def edge(found: Findings, key: str) -> str | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried.

    Only settings that equal the best one in all other keys are compared. There is no sentence if
    seeds differ by more than these settings do, or if values beyond the edge change nothing.
    """
    best = found.best
    if best is None or _value(best, key) is None:
        return None
    tried = _along(found, best, key)
    # A value that diverged limits the range, as one with a worse result does.
    judged = {value: group for value, group in tried.items() if found.scores(group)}
    values, groups = list(judged), list(judged.values())
    if len(groups) < 2 or not _apart(found, groups):
        return None
    top = [value for value in values if found.mean(judged[value])[0] == found.mean(best)[0]]
    if (values[0] in top) == (values[-1] in top):
        return None
    if values[0] in top:
        if key == THRESHOLD and _train_alike(found, groups):
            return None
        end, value, beyond = "lowest", values[0], "a lower one"
        tries = f"{rounded(value / 2)} and {rounded(value / 4)}"
    elif key == THRESHOLD:
        # No clipping lies beyond the highest threshold. There is nothing more to try if the sweep
        # tried it, or if this threshold clipped nothing.
        unclipped = any(not group.clips and found.scores(group) for group in found.groups)
        if unclipped or not found.ratio(best):
            return None
        end, value, beyond = "highest", values[-1], "a higher one, or none,"
        tries = f"{rounded(value * 2)} and clip=none"
    else:
        end, value, beyond = "highest", values[-1], "a higher one"
        tries = f"{rounded(value * 2)} and {rounded(value * 4)}"
    among = "tried" if len(judged) == len(tried) else "with a result"
    return (
        f"{_named(found, best, key)}, {rounded(value)}, is the {end} {among}: {beyond} may do "
        f"better (try {tries})."
    )


def _best_rates(found: Findings) -> list[str]:
    """Return a sentence if the best learning rate depends on the threshold."""
    rates: dict[float, float] = {}
    for threshold, group in _along(found, found.best, THRESHOLD).items() if found.best else ():
        known = _along(found, group, RATE)
        ranked = [one for one in found.ranked if one in known.values()]
        if len(known) > 1 and ranked and _apart(found, ranked):
            rates[threshold] = next(rate for rate, one in known.items() if one is ranked[0])
    if len(set(rates.values())) < 2 or len(rates) > 6:
        return []
    each = ", ".join(
        f"{rounded(rate)} at {rounded(threshold)}" for threshold, rate in rates.items()
    )
    return [f"The best {RATE} depends on the threshold: {each}."]


def _joint(found: Findings) -> list[str]:
    """Return a sentence if learning rate and threshold act together, but only one was varied."""
    if found.best is None or "limits" not in _topics(found.best):
        return []
    keys = [key for key in (THRESHOLD, RATE) if _varied(found, key)]
    if len(keys) != 1:
        return []
    other = RATE if keys == [THRESHOLD] else THRESHOLD
    return [
        f"The best setting clipped {found.clipped(found.best)}. There {THRESHOLD} and {RATE} act "
        f"together, and this sweep varied only {keys[0]}: vary {other} as well."
    ]


def _alike(found: Findings) -> list[str]:
    """Return a sentence if thresholds train alike because the optimizer normalizes gradients."""
    for group in found.groups:
        members = [g for g in _along(found, group, THRESHOLD).values() if _scale_cancels(found, g)]
        if group in members[:1] and _train_alike(found, members):
            optimizer = _topics(group)["cancels"]
            return [
                f"{_who(found, members)}: nearly every step was clipped, and {optimizer} divides "
                "by the size of the gradients, so these thresholds train nearly alike."
            ]
    return []


def _varied(found: Findings, key: str) -> bool:
    """Return whether settings that are otherwise equal differ in ``key``."""
    return any(len(_along(found, group, key)) > 1 for group in found.groups)


def _train_alike(found: Findings, groups: Sequence[Group]) -> bool:
    """Return whether the optimizer cancels the clipping of all ``groups``, with equal results."""
    cancels = all(_scale_cancels(found, group) for group in groups)
    return len(groups) > 1 and cancels and not _apart(found, groups)


def _apart(found: Findings, groups: Sequence[Group]) -> bool:
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
    short = [group for group in found.groups if group.threshold and "few" in _topics(group)]
    if not short:
        return None
    if len(found.groups) == 1:
        return _texts(short[0]).get("few")
    return f"{_who(found, short)}: fewer than 50 steps are too few to tell what a threshold does."


def _own(found: Findings, topics: Sequence[str]) -> Iterator[str]:
    """Yield the remarks of runs; one that several settings share is given once."""
    if len(found.groups) == 1:
        texts = _texts(found.groups[0])
        yield from (texts[topic] for topic in topics if topic in texts)
        return
    for topic in topics:
        if any(_varied(found, key) for key in _ABOUT.get(topic, ())):
            continue
        members: dict[str, list[Group]] = {}
        for group in found.groups:
            if (optimizer := _topics(group).get(topic)) is not None:
                members.setdefault(optimizer, []).append(group)
        for optimizer, groups in members.items():
            yield f"{_who(found, groups)}: {_SHARED[topic].format(optimizer=optimizer)}"


def _topics(group: Group) -> dict[str, str]:
    """Return the topics of the remarks of most runs of a setting, and the optimizer they name."""
    optimizers: dict[str, list[str]] = {}
    for run in group.runs:
        for remark in _remarks(run.summary):
            named = optimizers.setdefault(str(remark["topic"]), [])
            named.append(str(remark.get("optimizer", "")))
    return {
        topic: named[0] for topic, named in optimizers.items() if 2 * len(named) > len(group.runs)
    }


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
    """Return whether nearly every step was clipped under an optimizer that cancels the clipping."""
    clips_whole = group.info.parts is None and (found.ratio(group) or 0.0) > FULLY
    return clips_whole and "cancels" in _topics(group)


def _along(found: Findings, group: Group, key: str) -> dict[float, Group]:
    """Return the settings that equal ``group`` in all but ``key``, by rising value of ``key``."""
    others = [column for column in found.differences.columns if column not in ("seed", key)]
    members = {
        value: one
        for one in found.groups
        if one.mode == group.mode
        and all(choice(one.runs[0], c) == choice(group.runs[0], c) for c in others)
        and (value := _value(one, key)) is not None
    }
    return dict(sorted(members.items()))


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


def _who(found: Findings, groups: Sequence[Group]) -> str:
    if len(groups) == len(found.groups):
        return "All settings"
    labels = [group.label for group in groups]
    if len(labels) <= 4:
        return ", ".join(labels)
    return f"{', '.join(labels[:3])} and {len(labels) - 3} more settings"
