"""The result of the runs in one sentence, and what to try next, remarks, and lost runs below it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from runner.config.notation import first_few
from runner.config.notation import rounded as typed
from runner.report.findings import DIVERGED, Findings, Group, choice
from runner.report.look import plural, rounded, signed
from runner.report.run import Run, drawn
from runner.report.statistics import MOST_SEEDS, Difference

THRESHOLD, RATE = "clip.threshold", "optimizer.lr"

ALIKE = 0.05  # relative difference up to which the results of single runs count as equal


def verdict(found: Findings) -> str:
    """Return the result in one sentence, and whether the seeds decide it in another one."""
    runs, best = found.sweep.runs, found.best
    if not runs:
        return "This sweep holds no run yet."
    if len(runs) == 1:
        return _of_one(found, runs[0])
    if best is None:
        if found.metric is None:
            return f"No answer yet: none of the {len(runs)} runs recorded a metric."
        why = "a run of each diverged, or did not finish"
        return f"No answer yet: no setting has a finite mean {found.metric} ({why})."
    if len(found.groups) == 1:
        return f"One setting, {plural(len(runs), 'run')}: {_score(found, best)}."
    word = "highest" if found.higher_is_better else "lowest"
    tied = [group for group in found.ranked if found.mean(group)[0] == found.mean(best)[0]]
    names = " and ".join(map(_name, tied[:3])).replace("and No", "and no")
    names += " …" if len(tied) > 3 else ""
    verb = "share" if len(tied) > 1 else "wins with" if found.winner else "gave"
    sentence = f"{names} {verb} the {word} {found.metric}: {_score(found, best)}"
    sentence += _against(found, best, [group for group in found.ranked if group not in tied])
    clipped = found.clipped(best) if len(tied) == 1 else None
    sentence += f"; it clipped {clipped}." if clipped else "."
    if not (rivals := undecided(found)):
        return sentence
    every = len(rivals) == len(found.ranked) - 1
    whom = "the others" if every else first_few([group.label for group, _ in rivals], 3)
    seeds = plural(min(one.seeds for _, one in rivals), "seed")
    size = rounded(max(one.visible or 0.0 for _, one in rivals), 2)
    return (
        f"{sentence} Undecided: no difference to {whom} could be seen. These {seeds} show a true "
        f"difference of {size} four times in five."
    )


def undecided(found: Findings) -> list[tuple[Group, Difference]]:
    """Return the settings that several seeds do not tell from the best one, in order of rank."""
    pairs = [(group, found.rivals.get(group.index)) for group in found.ranked[1:]]
    # Settings whose runs are the same, as those that clip nothing, are no question of seeds.
    return [(group, one) for group, one in pairs if one and one.visible and not one.seen]


def _of_one(found: Findings, run: Run) -> str:
    score, [group] = found.score(run), found.groups
    state = "" if run.state == "unknown" else f" ({run.state})"
    sentence = f"This run{state} took {plural(run.steps, 'step')}"
    if score is not None:
        final = found.measured[run.number].get(f"final/{found.metric}")
        sentence += f", with a best {found.metric} of {rounded(score)}"
        sentence += "" if final is None else f" and a final one of {rounded(final)}"
    clipped = found.clipped(group)
    return sentence + (f"; it clipped {clipped}." if clipped else ".")


def _name(group: Group) -> str:
    return "No clipping" if group.label == "none" else f"clip={group.label}"


def _score(found: Findings, group: Group) -> str:
    mean, spread = found.mean(group)
    if spread is None:
        return rounded(mean)
    return f"{rounded(mean)} ± {rounded(spread, 2)} over {plural(len(found.seeds(group)), 'seed')}"


def _against(found: Findings, best: Group, others: list[Group]) -> str:
    """Compare the best setting with the baseline, no clipping, or the best of the others."""
    if not others:
        return ""
    unclipped = next((group for group in others if best.clips and not group.clips), None)
    other = found.baseline if found.baseline in others else unclipped or others[0]
    assert other is not None
    name = f"with {other.label}{', the next best' if other is others[0] else ''}"
    name = "without clipping" if other is unclipped else name
    one = found.rivals.get(other.index)
    if other is found.baseline:
        name, one = f"with the baseline, {other.label}", found.comparisons.get(best.index)
    against = f", against {rounded(found.mean(other)[0])} {name}"
    if one is None or one.low is None or one.high is None:
        return against
    ends = f"95 % interval {signed(one.low)} to {signed(one.high)}"
    return f"{against} (difference {signed(one.value)}, {ends})"


class Remark(NamedTuple):
    """A sentence, and a command that it ends with."""

    text: str
    command: str = ""


def remarks(found: Findings) -> list[Remark]:
    """Return what the sweep shows, the remarks of its runs, and what is missing."""
    topics = topics_of(found)
    swept = () if "few" in topics else (THRESHOLD, RATE)
    edges = [one for key in swept if (one := edge(found, key))]
    own = []
    for texts in topics.values():
        (label, text), *more = texts.items()
        who = f"{label} and {plural(len(more), 'more setting')}" if more else label
        own.append(text if len(found.groups) == 1 else f"{who}: {text}")
    return [*map(Remark, edges), *map(Remark, own), *_seeds(found), *_states(found)]


def topics_of(found: Findings) -> dict[str, dict[str, str]]:
    """Return the remarks of runs by topic, each with the settings that have it and their texts."""
    topics: dict[str, dict[str, str]] = {}
    for group in found.groups:
        for run in group.runs:
            made, given = (run.summary.get(key) for key in ("remarks", "guidance"))
            if isinstance(made, list) and isinstance(given, list):
                for one in made:
                    if isinstance(one, Mapping) and one.get("text") in given:
                        texts = topics.setdefault(str(one.get("topic")), {})
                        texts.setdefault(group.label, str(one["text"]))
    return topics


def edge(found: Findings, key: str) -> str | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried."""
    best = found.best
    value = None if best is None else value_of(best, key)
    if best is None or value is None:
        return None
    tried = along(found, best, key)
    # A value that diverged limits the range, as one with a worse result does.
    judged = {value: group for value, group in tried.items() if found.seeds(group)}
    if len(judged) < 2 or not apart(found, [*judged.values()]):
        return None
    if value not in (min(judged), max(judged)):
        return None
    lowest = value == min(judged)
    end, beyond, factors = (
        ("lowest", "lower", (0.5, 0.25)) if lowest else ("highest", "higher", (2, 4))
    )
    tries = " and ".join(typed(value * factor) for factor in factors)
    if key == THRESHOLD and not lowest:
        # Nothing is left to try if the sweep tried no clipping, or if this threshold clips nothing.
        if any(not g.clips and found.seeds(g) for g in found.groups) or not found.ratio(best):
            return None
        tries = f"{typed(value * 2)} and clip=none"
    name = "threshold" if key == THRESHOLD else key
    if key == THRESHOLD and len({group.mode for group in found.groups if group.clips}) > 1:
        name = f"threshold of clip={best.mode}"
    others = [c for c in found.columns if c not in ("seed", "clip.mode", key)]
    where = ", ".join(f"{column}={choice(best.runs[0], column)}" for column in others)
    among = "tried" if len(judged) == len(tried) else "with a result"
    return (
        f"{f'With {where} the' if where else 'The'} best {name}, {rounded(value)}, is the {end} "
        f"{among}: a {beyond} one may do better (try {tries})."
    )


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
    if key == THRESHOLD:
        return group.threshold
    value = drawn(group.runs[0].config.get(key))
    return value if value is not None and 0 < value < math.inf else None


def apart(found: Findings, groups: Sequence[Group]) -> bool:
    """Return whether the results of some of ``groups`` clearly differ."""
    if all(len(found.seeds(group)) > 1 for group in groups):
        return found.differ(groups)
    means = [found.mean(group)[0] for group in groups]
    if not all(map(math.isfinite, means)):
        return True
    return max(means) - min(means) > ALIKE * max(map(abs, means))


def _seeds(found: Findings) -> Iterator[Remark]:
    """Yield how many seeds would decide, with the command that runs them."""
    known = [(group.label, found.rivals.get(group.index)) for group in found.ranked[1:]]
    single = [label for label, one in known if one and one.low is None]
    rivals = undecided(found)
    # The sweeper of a search would take the seed for one more thing to choose.
    if found.sweep.searches or not (single or rivals):
        return
    if single:
        who = "the others" if len(single) == len(known) else first_few(single, 3)
        text = f"Undecided: {who} and {found.ranked[0].label} have at most one seed in common, so "
        text += "small differences may be chance. Five seeds tell more:"
        yield Remark(text, _with_seeds(found, 5))
        return
    rival, one = rivals[0]
    pair = f"{found.ranked[0].label} and {rival.label}"
    size = f"if they differ by {rounded(abs(one.value), 2)}, as it looks now"
    if one.needed is None:
        yield Remark(f"{pair}: more than {MOST_SEEDS} seeds would be needed to decide, {size}.")
    else:
        more = plural(one.needed - one.seeds, "more seed")
        text = f"{pair}: about {more} would decide, {size}:"
        yield Remark(text, _with_seeds(found, one.needed))


def _with_seeds(found: Findings, count: int) -> str:
    kept = sorted({int(run.seed) for run in found.sweep.runs if run.seed.isdecimal()})
    free = (seed for seed in range(count + len(kept)) if seed not in kept)
    return found.sweep.command_with(sorted([*kept, *islice(free, max(0, count - len(kept)))]))


def _states(found: Findings) -> Iterator[Remark]:
    """Yield remarks on an unknown baseline, and on runs that were lost or have not ended."""
    runs = found.sweep.runs
    if found.unknown is not None:
        labels = first_few([group.label for group in found.groups], 8)
        yield Remark(f"report.baseline={found.unknown} names no setting; there are {labels}.")
    lost = [
        f"{group.label} (run {run.number}) at step {at:,.0f}"
        for group in found.groups
        for run in group.runs
        if (at := found.measured[run.number][DIVERGED]) is not None
    ]
    if lost:
        of = f"{len(lost)} of {plural(len(runs), 'run')}"
        yield Remark(f"The loss diverged in {of}: {first_few(lost)}.")
    for run in [run for run in runs if run.error or run.state in ("failed", "killed")][:5]:
        cause = (run.error or "").strip().rpartition("\n")[2][:300]
        ended = "was killed" if run.state == "killed" else run.state
        what = f"Run {run.number} {ended} at step {run.steps:,}"
        yield Remark(f"{what}: {cause}" if cause else what)
    others = Counter(run.state for run in runs if run.state not in ("finished", "unknown"))
    if others and len(runs) > 1:
        counts = ", ".join(f"{count} {state}" for state, count in others.items())
        yield Remark(f"Not all runs have finished: {counts}.")
