"""Sentences on the keys that a sweep varied, and the remarks of its runs.

Only results judge a key that the sweep varied: remarks that are rules of thumb about it are left
out. A remark that several settings share is shown once, with their names. Each sentence comes with
the rows of the table that it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.config.notation import first_few
from runner.report.findings import Findings, Group, choice
from runner.report.look import rounded, typed
from runner.report.run import drawn

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
    others = [column for column in found.columns if column not in ("seed", key)]
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


FULLY = 0.95
"""Share of clipped steps from which a lower threshold clips hardly any further steps."""

_SHARED = {
    "nonfinite": "some gradients were NaN or inf, which no threshold fixes: check the loss and the "
    "precision.",
    "spikes": "some steps were skipped as spikes; if they are many, raise clip.skip.k, or lower "
    "the learning rate.",
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


def advice(found: Findings) -> list[Advice]:
    """Return what the sweep shows, and the remarks of its runs."""
    if few := _few(found):
        return [*_own(found, ("nonfinite", "spikes")), few]
    edges = [one for key in (THRESHOLD, RATE) if (one := edge(found, key))]
    return [*edges, *_best_rates(found), *_alike(found), *_own(found, tuple(_SHARED))]


def edge(found: Findings, key: str) -> Advice | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried."""
    best = found.best
    if best is None or value_of(best, key) is None:
        return None
    tried = along(found, best, key)
    # A value that diverged limits the range, as one with a worse result does.
    judged = {value: group for value, group in tried.items() if found.scores(group)}
    values, groups = list(judged), list(judged.values())
    if len(groups) < 2 or not apart(found, groups):
        return None
    top = [value for value in values if found.mean(judged[value])[0] == found.mean(best)[0]]
    if (values[0] in top) == (values[-1] in top):
        return None
    if values[0] in top:
        end, value, beyond = "lowest", values[0], "a lower one"
        tries = f"{typed(value / 2)} and {typed(value / 4)}"
    elif key == THRESHOLD:
        # Nothing is left to try if the sweep tried no clipping, or if this threshold clips nothing.
        unclipped = any(not group.clips and found.scores(group) for group in found.groups)
        if unclipped or not found.ratio(best):
            return None
        end, value, beyond = "highest", values[-1], "a higher one, or none,"
        tries = f"{typed(value * 2)} and clip=none"
    else:
        end, value, beyond = "highest", values[-1], "a higher one"
        tries = f"{typed(value * 2)} and {typed(value * 4)}"
    among = "tried" if len(judged) == len(tried) else "with a result"
    return Advice(
        f"{_named(found, best, key)}, {rounded(value)}, is the {end} {among}: {beyond} may do "
        f"better (try {tries}).",
        row(found, *sorted(groups, key=lambda group: group is not best)[:2]),
    )


def _best_rates(found: Findings) -> list[Advice]:
    """Return a sentence if the best learning rate depends on the threshold."""
    best: dict[float, Group] = {}
    for threshold, group in along(found, found.best, THRESHOLD).items() if found.best else ():
        known = list(along(found, group, RATE).values())
        ranked = [one for one in found.ranked if one in known]
        if len(known) > 1 and ranked and apart(found, ranked):
            best[threshold] = ranked[0]
    rates = {threshold: rounded(value_of(one, RATE)) for threshold, one in best.items()}
    if len(set(rates.values())) < 2 or len(rates) > 6:
        return []
    each = ", ".join(f"{rate} at {rounded(threshold)}" for threshold, rate in rates.items())
    text = f"The best {RATE} depends on the threshold: {each}."
    return [Advice(text, row(found, *best.values()))]


def _alike(found: Findings) -> list[Advice]:
    """Return a sentence if thresholds train alike because the optimizer normalizes gradients."""

    def cancels(group: Group) -> bool:
        clips_whole = group.info.parts is None and (found.ratio(group) or 0.0) > FULLY
        return clips_whole and "cancels" in topics_of(group)

    for group in found.groups:
        members = [one for one in along(found, group, THRESHOLD).values() if cancels(one)]
        if group in members[:1] and len(members) > 1 and not apart(found, members):
            text = (
                f"{_who(found, members)}: nearly every step was clipped, and "
                f"{topics_of(group)['cancels']} divides by the size of the gradients, so these "
                "thresholds train nearly alike."
            )
            return [Advice(text, row(found, *members))]
    return []


def _few(found: Findings) -> Advice | None:
    """Return a sentence if the runs are too short to judge a threshold."""
    short = [group for group in found.groups if group.threshold and "few" in topics_of(group)]
    if not short or any(group.threshold and group not in short for group in found.groups):
        return None
    facts = tuple((f"{group.label}: {group.runs[0].steps} steps", group) for group in short[:3])
    if len(found.groups) == 1:
        text = _texts(short[0]).get("few")
        return Advice(text, facts) if text else None
    who = _who(found, short)
    text = "fewer than 50 steps were taken, too few to tell what a threshold does"
    return Advice(f"{who}: {text}.", facts)


def _own(found: Findings, topics: Sequence[str]) -> Iterator[Advice]:
    """Yield the remarks of runs; one that several settings share is given once."""
    if len(found.groups) == 1:
        texts, facts = _texts(found.groups[0]), row(found, found.groups[0])
        yield from (Advice(texts[topic], facts) for topic in topics if topic in texts)
        return
    for topic in topics:
        if any(varied(found, key) for key in _ABOUT.get(topic, ())):
            continue
        members: dict[str, list[Group]] = {}
        for group in found.groups:
            if (optimizer := topics_of(group).get(topic)) is not None:
                members.setdefault(optimizer, []).append(group)
        for optimizer, groups in members.items():
            text = f"{_who(found, groups)}: {_SHARED[topic].format(optimizer=optimizer)}"
            yield Advice(text, row(found, *groups))


def _texts(group: Group) -> dict[str, str]:
    """Return the text of each topic, from the first run of a setting that has it."""
    texts: dict[str, str] = {}
    for run in group.runs:
        given = run.summary.get("guidance")
        for remark in remarks_of(run.summary):
            if isinstance(given, list) and remark.get("text") in given:
                texts.setdefault(str(remark["topic"]), str(remark["text"]))
    return texts


def _named(found: Findings, best: Group, key: str) -> str:
    """Return the subject of a sentence on the best value of ``key``, and its other keys."""
    modes = {group.mode for group in found.groups if group.clips}
    name = "threshold" if key == THRESHOLD else key
    if key == THRESHOLD and len(modes) > 1:
        name = f"threshold of clip={best.mode}"
    others = [c for c in found.columns if c not in ("seed", "clip.mode", key)]
    where = [f"{column}={choice(best.runs[0], column)}" for column in others]
    return f"With {', '.join(where)} the best {name}" if where else f"The best {name}"


def _who(found: Findings, groups: Sequence[Group]) -> str:
    if len(groups) == len(found.groups):
        return "All settings"
    labels = [group.label for group in groups]
    return ", ".join(labels) if len(labels) <= 4 else f"{first_few(labels, 3)} settings"
