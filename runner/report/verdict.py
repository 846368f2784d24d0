"""The result of the runs in one sentence, and what to try next, remarks, and lost runs below it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
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


def verdict(findings: Findings) -> str:
    """Return the result in one sentence, and whether the seeds decide it in another one."""
    runs = findings.sweep.runs
    best = findings.best
    if not runs:
        return "This sweep holds no run yet."
    if len(runs) == 1:
        return _of_single_run(findings, runs[0])
    if best is None:
        why = f"mean {findings.metric} (a run of each diverged, or did not finish)"
        return f"No answer yet: no setting has a finite {why if findings.metric else 'metric'}."
    if len(findings.groups) == 1:
        return f"One setting, {plural(len(runs), 'run')}: {_score(findings, best)}."
    return _of_best(findings, best) + _undecided(findings)


def _of_best(findings: Findings, best: Group) -> str:
    word = "highest" if findings.higher_is_better else "lowest"
    tied = [group for group in findings.ranked if findings.mean(group)[0] == findings.mean(best)[0]]
    worse = [group for group in findings.ranked if group not in tied]
    names = first_few([_name(group) for group in tied], 3)
    comparison = _against(findings, best, worse)
    if len(tied) > 1:
        return f"{names} share the {word} {findings.metric}: {_score(findings, best)}{comparison}."
    verb = "wins with" if findings.winner else "gave"
    sentence = f"{names} {verb} the {word} {findings.metric}: {_score(findings, best)}{comparison}"
    return sentence + _clipped(findings, best)


def _undecided(findings: Findings) -> str:
    rivals = undecided(findings)
    if not rivals:
        return ""
    names = first_few([group.label for group, _ in rivals], 3)
    seeds = plural(min(difference.seeds for _, difference in rivals), "seed")
    size = rounded(max(difference.visible or 0.0 for _, difference in rivals), 2)
    return (
        f" Undecided: no difference to {names} could be seen. These {seeds} show a true "
        f"difference of {size} four times in five."
    )


def undecided(findings: Findings) -> list[tuple[Group, Difference]]:
    """Return the settings that several seeds do not tell from the best one, in order of rank."""
    rivals = []
    for group in findings.ranked[1:]:
        difference = findings.rivals.get(group.index)
        # More seeds would not separate settings whose runs are the same, such as two that never
        # clip: their difference is 0, and `visible` too.
        if difference and difference.visible and not difference.seen:
            rivals.append((group, difference))
    return rivals


def _of_single_run(findings: Findings, run: Run) -> str:
    score = findings.score(run)
    [group] = findings.groups
    state = "" if run.state == "unknown" else f" ({run.state})"
    sentence = f"This run{state} took {plural(run.steps, 'step')}"
    if score is not None:
        final = findings.measured[run.number].get(f"final/{findings.metric}")
        sentence += f", with a best {findings.metric} of {rounded(score)}"
        sentence += "" if final is None else f" and a final one of {rounded(final)}"
    return sentence + _clipped(findings, group)


def _clipped(findings: Findings, group: Group) -> str:
    share = findings.average(group, CLIP_FRACTION)
    parts = group.info.parts
    if share is None:
        share = findings.ratio(group)
        parts = "steps"
    return f"; it clipped {percent(share)} of its {parts}." if group.clips and share else "."


def _name(group: Group) -> str:
    return "No clipping" if group.label == "none" else f"clip={group.label}"


def _score(findings: Findings, group: Group) -> str:
    mean, spread = findings.mean(group)
    if spread is None:
        return rounded(mean)
    return (
        f"{rounded(mean)} ± {rounded(spread, 2)} over {plural(len(findings.seeds(group)), 'seed')}"
    )


def _against(findings: Findings, best: Group, others: list[Group]) -> str:
    """Compare the best setting with the baseline, no clipping, or the best of the others."""
    if not others:
        return ""
    unclipped = next((group for group in others if best.clips and not group.clips), None)
    if findings.baseline is not None and findings.baseline in others:
        rival = findings.baseline
        name = f"with the baseline, {rival.label}"
        difference = findings.comparisons.get(best.index)
    else:
        rival = unclipped or others[0]
        name = "without clipping" if unclipped else f"with {rival.label}"
        difference = findings.rivals.get(rival.index)
    against = f", against {rounded(findings.mean(rival)[0])} {name}"
    if difference is None or difference.low is None or difference.high is None:
        return against
    ends = f"95 % interval {signed(difference.low)} to {signed(difference.high)}"
    return f"{against} (difference {signed(difference.value)}, {ends})"


class Remark(NamedTuple):
    """A sentence, and a command that it ends with."""

    text: str
    command: str = ""


def remarks(findings: Findings) -> list[Remark]:
    """Return what the sweep shows, the remarks of its runs, and what is missing."""
    by_topic: dict[str, dict[str, str]] = {}  # texts by topic and setting
    for group in findings.groups:
        for run in group.runs:
            for topic, text in _recorded_remarks(run):
                by_topic.setdefault(topic, {}).setdefault(group.label, text)
    texts = []
    if "few" not in by_topic:
        edges = [edge(findings, key) for key in (THRESHOLD, RATE)]
        texts += [text for text in edges if text]
    for by_setting in by_topic.values():
        (label, text), *more = by_setting.items()
        settings = f"{label} and {plural(len(more), 'more setting')}" if more else label
        texts.append(text if len(findings.groups) == 1 else f"{settings}: {text}")
    return [*(Remark(text) for text in texts), *_seeds(findings), *_states(findings)]


def _recorded_remarks(run: Run) -> Iterator[tuple[str, str]]:
    """Yield topic and text of each remark in a run's summary that stands in its guidance too."""
    recorded = run.summary.get("remarks")
    guidance = run.summary.get("guidance")
    if not isinstance(recorded, list) or not isinstance(guidance, list):
        return
    for remark in recorded:
        if isinstance(remark, dict) and remark.get("text") in guidance:
            yield str(remark.get("topic")), str(remark.get("text"))


def edge(findings: Findings, key: str) -> str | None:
    """Return a sentence if the best value of ``key`` is the lowest or the highest tried."""
    best = findings.best
    value = None if best is None else _value(best, key)
    if best is None or value is None:
        return None
    fixed_keys = [column for column in findings.columns if column not in ("seed", key)]
    fixed = {column: choice(best.runs[0], column) for column in fixed_keys}
    tried = [group for group in findings.groups if _tried(findings, group, key, fixed)]
    values = [_value(group, key) or 0.0 for group in tried]
    if len(tried) < 2 or value not in (min(values), max(values)) or not findings.differ(tried):
        return None
    lowest = value == min(values)
    tries = _next_values(findings, best, key, value, lowest)
    if not tries:
        return None
    where = ", ".join(f"{column}={text}" for column, text in fixed.items())
    start = f"With {where} the" if where else "The"
    end, beyond = ("lowest", "lower") if lowest else ("highest", "higher")
    return (
        f"{start} best {key}, {rounded(value)}, is the {end} with a result: a {beyond} one may do "
        f"better (try {tries})."
    )


def _tried(findings: Findings, group: Group, key: str, fixed: Mapping[str, str]) -> bool:
    """Return whether a setting has a result for a value of ``key`` and is else as ``fixed``.

    A value that diverged limits the range, as one with a worse result does.
    """
    if not findings.seeds(group) or _value(group, key) is None:
        return False
    return all(choice(group.runs[0], column) == text for column, text in fixed.items())


def _next_values(findings: Findings, best: Group, key: str, value: float, lowest: bool) -> str:
    """Return the values to try beyond the range of a sweep; empty if none is left."""
    if lowest:
        return f"{typed(value * 0.5)} and {typed(value * 0.25)}"
    if key != THRESHOLD:
        return f"{typed(value * 2)} and {typed(value * 4)}"
    tried_without_clipping = any(not g.clips and findings.seeds(g) for g in findings.groups)
    clips_nothing = not findings.ratio(best)
    if tried_without_clipping or clips_nothing:
        return ""
    return f"{typed(value * 2)} and clip=none"


def _value(group: Group, key: str) -> float | None:
    if key == THRESHOLD:
        return group.threshold
    value = number(group.runs[0].config.get(key))
    return value if value is not None and 0 < value < math.inf else None


def _seeds(findings: Findings) -> Iterator[Remark]:
    """Yield a remark if more seeds would decide which setting is best."""
    # The sweeper of a search would take the seed for one more thing to choose.
    if findings.sweep.searches:
        return
    single_seed = []
    for group in findings.ranked[1:]:
        difference = findings.rivals.get(group.index)
        if difference and difference.low is None:
            single_seed.append(group.label)
    if single_seed:
        names = f"{first_few(single_seed, 3)} and {findings.ranked[0].label}"
        text = f"Undecided: {names} have at most one seed in common, so small differences may be "
        text += "chance. Five seeds tell more:"
        yield Remark(text, _with_seeds(findings, 5))
        return
    rivals = undecided(findings)
    if rivals:
        rival, difference = rivals[0]
        needed = difference.needed
        more = plural((needed or MOST_SEEDS) - difference.seeds, "more seed")
        size = rounded(abs(difference.value), 2)
        text = f"{findings.ranked[0].label} and {rival.label}: {'about' if needed else 'over'} "
        text += f"{more} would decide, if they differ by {size} as now"
        yield Remark(text, _with_seeds(findings, needed) if needed else "")


def _with_seeds(findings: Findings, count: int) -> str:
    """Return the command that adds seeds to the sweep until it has ``count``."""
    seeds = sorted({int(run.seed) for run in findings.sweep.runs if run.seed.isdecimal()})
    unused = [seed for seed in range(count + len(seeds)) if seed not in seeds]
    added = unused[: max(0, count - len(seeds))]
    return findings.sweep.command_with(sorted([*seeds, *added]))


def _states(findings: Findings) -> Iterator[Remark]:
    """Yield remarks on a baseline that does not exist, and on runs that diverged or ended early."""
    if findings.unknown is not None:
        labels = first_few([group.label for group in findings.groups], 8)
        yield Remark(f"report.baseline={findings.unknown} names no setting; there are {labels}.")
    yield from _diverged(findings)
    runs = findings.sweep.runs
    for run in [run for run in runs if run.error or run.state in ("failed", "killed")][:5]:
        yield _failed(run)
    unfinished = Counter(run.state for run in runs if run.state not in ("finished", "unknown"))
    if unfinished and len(runs) > 1:
        counts = ", ".join(f"{count} {state}" for state, count in unfinished.items())
        yield Remark(f"Not all runs have finished: {counts}.")


def _diverged(findings: Findings) -> Iterator[Remark]:
    diverged = []
    for group in findings.groups:
        for run in group.runs:
            step = findings.measured[run.number][DIVERGED]
            if step is not None:
                diverged.append(f"{group.label} (run {run.number}) at step {step:,.0f}")
    if diverged:
        share = f"{len(diverged)} of {plural(len(findings.sweep.runs), 'run')}"
        yield Remark(f"The loss diverged in {share}: {first_few(diverged)}.")


def _failed(run: Run) -> Remark:
    cause = (run.error or "").strip().rpartition("\n")[2][:300]
    ended = "was killed" if run.state == "killed" else run.state
    text = f"Run {run.number} {ended} at step {run.steps:,}"
    return Remark(f"{text}: {cause}" if cause else text)
