"""The result of the runs in one sentence, and what to try next, remarks, and lost runs below it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from runner.config.notation import first_few
from runner.config.notation import rounded as typed
from runner.report.findings import DIVERGED, Findings, Group, choice
from runner.report.look import percent, plural, rounded, signed
from runner.report.run import Run
from runner.report.statistics import MOST_SEEDS, Difference
from runner.run_folder.keys import CLIP_FRACTION
from runner.run_folder.strict_json import number

THRESHOLD, RATE = "clip.threshold", "optimizer.lr"


def verdict(found: Findings) -> str:
    """Return the result in one sentence, and whether the seeds decide it in another one."""
    runs, best = found.sweep.runs, found.best
    if not runs:
        return "This sweep holds no run yet."
    if len(runs) == 1:
        return _of_one(found, runs[0])
    if best is None:
        why = f"mean {found.metric} (a run of each diverged, or did not finish)"
        return f"No answer yet: no setting has a finite {why if found.metric else 'metric'}."
    if len(found.groups) == 1:
        return f"One setting, {plural(len(runs), 'run')}: {_score(found, best)}."
    word = "highest" if found.higher_is_better else "lowest"
    tied = [group for group in found.ranked if found.mean(group)[0] == found.mean(best)[0]]
    verb = "share" if len(tied) > 1 else "wins with" if found.winner else "gave"
    names = first_few([_name(group) for group in tied], 3)
    sentence = f"{names} {verb} the {word} {found.metric}: {_score(found, best)}"
    sentence += _against(found, best, [group for group in found.ranked if group not in tied])
    sentence += _clipped(found, best) if len(tied) == 1 else "."
    if not (rivals := undecided(found)):
        return sentence
    whom = first_few([group.label for group, _ in rivals], 3)
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
    return sentence + _clipped(found, group)


def _clipped(found: Findings, group: Group) -> str:
    share, parts = found.average(group, CLIP_FRACTION), group.info.parts
    if share is None:
        share, parts = found.ratio(group), "steps"
    return f"; it clipped {percent(share)} of its {parts}." if group.clips and share else "."


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
    one, name = found.rivals.get(other.index), f"with {other.label}"
    if other is found.baseline:
        name, one = f"with the baseline, {other.label}", found.comparisons.get(best.index)
    elif other is unclipped:
        name = "without clipping"
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
    said: dict[str, dict[str, str]] = {}  # texts of runs by topic and setting
    for group, run in ((of, run) for of in found.groups for run in of.runs):
        recorded = (run.summary.get(key) for key in ("remarks", "guidance"))
        made, given = (one if isinstance(one, list) else [] for one in recorded)
        for remark in (one for one in made if isinstance(one, dict)):
            if (said_by := remark.get("text")) in given:
                said.setdefault(str(remark.get("topic")), {}).setdefault(group.label, str(said_by))
    swept = () if "few" in said else (THRESHOLD, RATE)
    texts = [one for key in swept if (one := edge(found, key))]
    for of in said.values():
        (label, text), *more = of.items()
        who = f"{label} and {plural(len(more), 'more setting')}" if more else label
        texts.append(text if len(found.groups) == 1 else f"{who}: {text}")
    return [*map(Remark, texts), *_seeds(found), *_states(found)]


def edge(found: Findings, key: str) -> str | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried."""
    best = found.best
    if best is None or (value := _value(best, key)) is None:
        return None
    others = [one for one in found.columns if one not in ("seed", key)]
    same = [choice(best.runs[0], one) for one in others]
    tried = [g for g in found.groups if [choice(g.runs[0], one) for one in others] == same]
    # A value that diverged limits the range, as one with a worse result does.
    judged = [(one, g) for g in tried if found.seeds(g) and (one := _value(g, key)) is not None]
    ends = [end(one for one, _ in judged) for end in (min, max)]
    if len(judged) < 2 or value not in ends or not found.differ([g for _, g in judged]):
        return None
    lowest = value == ends[0]
    tries = " and ".join(typed(value * by) for by in ((0.5, 0.25) if lowest else (2, 4)))
    if key == THRESHOLD and not lowest:
        # Nothing is left to try if the sweep tried no clipping, or if this threshold clips nothing.
        if any(not g.clips and found.seeds(g) for g in found.groups) or not found.ratio(best):
            return None
        tries = f"{typed(value * 2)} and clip=none"
    pairs = zip(others, same, strict=True)
    where = ", ".join(f"{one}={of}" for one, of in pairs)
    return (
        f"{f'With {where} the' if where else 'The'} best {key}, {rounded(value)}, is the "
        f"{'lowest' if lowest else 'highest'} with a result: a {'lower' if lowest else 'higher'} "
        f"one may do better (try {tries})."
    )


def _value(group: Group, key: str) -> float | None:
    if key == THRESHOLD:
        return group.threshold
    value = number(group.runs[0].config.get(key))
    return value if value is not None and 0 < value < math.inf else None


def _seeds(found: Findings) -> Iterator[Remark]:
    known = [(group.label, found.rivals.get(group.index)) for group in found.ranked[1:]]
    single = [label for label, one in known if one and one.low is None]
    # The sweeper of a search would take the seed for one more thing to choose.
    if found.sweep.searches:
        return
    if single:
        text = f"Undecided: {first_few(single, 3)} and {found.ranked[0].label} have at most one "
        text += "seed in common, so small differences may be chance. Five seeds tell more:"
        yield Remark(text, _with_seeds(found, 5))
    elif rivals := undecided(found):
        rival, one = rivals[0]
        more = plural((one.needed or MOST_SEEDS) - one.seeds, "more seed")
        text = f"{found.ranked[0].label} and {rival.label}: {'about' if one.needed else 'over'} "
        text += f"{more} would decide, if they differ by {rounded(abs(one.value), 2)} as now"
        yield Remark(text, _with_seeds(found, one.needed) if one.needed else "")


def _with_seeds(found: Findings, count: int) -> str:
    kept = sorted({int(run.seed) for run in found.sweep.runs if run.seed.isdecimal()})
    free = (seed for seed in range(count + len(kept)) if seed not in kept)
    return found.sweep.command_with(sorted([*kept, *islice(free, max(0, count - len(kept)))]))


def _states(found: Findings) -> Iterator[Remark]:
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
