"""The result of the runs in one sentence, and remarks on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from runner.config.notation import first_few
from runner.report.advice import advice
from runner.report.findings import Findings, Group, clipping_modes
from runner.report.look import Child, Markup, join, plural, rounded, signed, tag
from runner.report.run import Run
from runner.report.statistics import MOST_SEEDS, Difference


def verdict(found: Findings) -> str:
    """Return the result in one sentence."""
    runs = found.sweep.runs
    if not runs:
        return "This sweep holds no run yet."
    if len(runs) == 1:
        return _of_one(found, runs[0])
    best = found.best
    if best is None:
        if found.metric is None:
            return f"No answer yet: none of the {len(runs)} runs recorded a metric."
        why = "a run of each diverged, or did not finish"
        return f"No answer yet: no setting has a finite mean {found.metric} ({why})."
    if len(found.groups) == 1:
        return f"One setting, {plural(len(runs), 'run')}: {_score(found, best)}."
    word = "highest" if found.higher_is_better else "lowest"
    tied = [group for group in found.ranked if found.mean(group)[0] == found.mean(best)[0]]
    named = " and ".join(map(_name, tied[:3])).replace("and No", "and no")
    names = f"{named}{' …' if len(tied) > 3 else ''}"
    verb = "share" if len(tied) > 1 else "wins with" if found.winner else "gave"
    sentence = f"{names} {verb} the {word} {found.metric}: {_score(found, best)}"
    sentence += _against(found, best, [group for group in found.ranked if group not in tied])
    clipped = found.clipped(best) if len(tied) == 1 else None
    return f"{sentence}{f'; it clipped {clipped}' if clipped else ''}.{_open(found)}"


def remarks(found: Findings) -> list[Markup]:
    """Return advice with links to what it rests on, and remarks on seeds and failures."""
    if not found.sweep.runs:
        return []
    advised = [
        join([one.text, " [", *_links(one.because), "]"] if one.because else [one.text])
        for one in advice(found)
    ]
    notes = [_baseline(found), _seeds(found), _lost(found), _modes(found), *_states(found)]
    return [*advised, *(join([note]) for note in notes if note)]


def _links(because: Sequence[tuple[str, Group]]) -> Iterator[Child]:
    """Yield facts as links to the rows of the table, with semicolons between them."""
    for place, (fact, group) in enumerate(because):
        yield "; " if place else None
        yield tag("a", fact, href=f"#setting-{group.index}")


def _of_one(found: Findings, run: Run) -> str:
    group = found.groups[0]
    score = found.score(run)
    verb = {
        "finished": "finished after",
        "running": "is running; so far",
        "failed": "failed after",
        "interrupted": "was interrupted after",
        "killed": "was killed after",
    }.get(run.state, f"({run.state}) took")
    sentence = f"This run {verb} {plural(run.steps, 'step')}"
    if score is not None:
        final = found.measured[run.number].final.get(found.metric or "")
        sentence += f" with a best {found.metric} of {rounded(score)}"
        sentence += "" if final is None else f" and a final one of {rounded(final)}"
    clipped = found.clipped(group)
    if clipped is not None:
        sentence += f"; {group.label} clipped {clipped}"
    return sentence + "."


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
    against, _ = found.mean(other)
    name = f"with {other.label}{', the next best' if other is others[0] else ''}"
    name = "without clipping" if other is unclipped else name
    name = f"with the baseline, {other.label}" if other is found.baseline else name
    one = found.rivals.get(other.index)
    if other is found.baseline:
        one = found.comparisons.get(best.index)
    if one is None or one.low is None or one.high is None:
        return f", against {rounded(against)} {name}"
    ends = f"95 % interval {signed(one.low)} to {signed(one.high)}"
    most = max(len(found.seeds(group)) for group in (best, other))
    shared = one.paired and one.seeds < most
    seeds = f" on the {plural(one.seeds, 'seed')} that both have" if shared else ""
    return f", against {rounded(against)} {name} (difference {signed(one.value)}, {ends}{seeds})"


def _open(found: Findings) -> str:
    """Return what the seeds could not tell, and the difference that they would have shown."""
    open_ = _undecided(found)
    if not open_ or len(found.ranked) < 2:
        return ""
    every = len(open_) == len(found.ranked) - 1
    whom = "the others" if every else first_few([group.label for group, _ in open_], 3)
    seeds = plural(min(one.seeds for _, one in open_), "seed")
    sizes = sorted((one.visible or 0.0, group.label) for group, one in open_)
    size = rounded(sizes[-1][0], 2)
    if sizes[-1][0] > 2 * sizes[0][0]:
        size = f"{rounded(sizes[0][0], 2)} ({sizes[0][1]}) to {size} ({sizes[-1][1]})"
    return (
        f" No winner: no difference to {whom} could be seen. These {seeds} show a true difference "
        f"of {size} four times in five."
    )


def _undecided(found: Findings) -> list[tuple[Group, Difference]]:
    """Return the settings that several seeds do not tell from the best one, in order of rank."""
    pairs = [(group, found.rivals.get(group.index)) for group in found.ranked[1:]]
    # Settings whose runs are the same, as those that clip nothing, are no question of seeds.
    return [(group, one) for group, one in pairs if one and one.visible and not one.seen]


def _baseline(found: Findings) -> str | None:
    if found.unknown is None:
        return None
    labels = first_few([group.label for group in found.groups], 8)
    return f"report.baseline={found.unknown} names no setting of this page, which has {labels}."


def _seeds(found: Findings) -> Markup | None:
    """Return how many seeds would decide, with the command that runs them."""
    if len(found.ranked) < 2:
        return None
    if single := [group.label for group in found.ranked if len(found.seeds(group)) < 2]:
        who = "Each setting" if len(single) == len(found.ranked) else first_few(single, 3)
        text = f"{who} has a result of one seed, so small differences may be chance. "
        return _more(found, f"{text}Five seeds tell more: ", 5)
    if not (undecided := _undecided(found)):
        return None
    rival, one = undecided[0]
    pair = f"{found.ranked[0].label} and {rival.label}"
    size = f"if they differ by {rounded(abs(one.value), 2)}, as it looks now"
    if one.needed is None:
        return join([f"{pair}: more than {MOST_SEEDS} seeds would be needed to decide, {size}."])
    more = plural(one.needed - one.seeds, "more seed")
    return _more(found, f"{pair}: about {more} would decide, {size}: ", one.needed)


def _more(found: Findings, text: str, count: int) -> Markup | None:
    """Return a remark with the command for so many seeds, those of the sweep included."""
    if found.sweep.searches:
        return None  # its sweeper would take the seed for one more thing to choose
    kept = sorted({int(run.seed) for run in found.sweep.runs if run.seed.isdecimal()})
    free = (seed for seed in range(count + len(kept)) if seed not in kept)
    seeds = sorted([*kept, *islice(free, max(0, count - len(kept)))])
    command = found.sweep.command_with(seeds)
    return join([text, tag("code", command or f"seed={','.join(map(str, seeds))}")])


def _lost(found: Findings) -> str | None:
    lost = [
        f"{group.label} (run {run.number}) at step {at:,}"
        for group in found.groups
        for run in group.runs
        if (at := found.measured[run.number].diverged_at) is not None
    ]
    if not lost:
        return None
    runs = plural(len(found.sweep.runs), "run")
    return f"The loss diverged in {len(lost)} of {runs}: {first_few(lost)}."


def _modes(found: Findings) -> str | None:
    modes = clipping_modes(found.groups)
    if len(modes) < 2:
        return None
    return (
        f"Thresholds of different modes ({', '.join(modes)}) do not compare: "
        "each mode has its own axis."
    )


def _states(found: Findings) -> list[str]:
    """Return remarks on runs that failed, with the last line of the error, or have not ended."""
    runs = found.sweep.runs
    causes = [(run, (run.error or "").strip().rpartition("\n")[2][:300]) for run in runs]
    if len(runs) == 1:
        return [cause for _, cause in causes if cause]
    notes = [
        f"Run {run.number} {'was ' if run.state == 'killed' else ''}{run.state} at step "
        f"{run.steps:,}{f': {cause}' if cause else ''}"
        for run, cause in causes
        if run.state in ("failed", "killed")
    ]
    if len(notes) > 5:
        notes = [*notes[:5], f"{len(notes) - 5} more runs failed or were killed; see the table."]
    ended = ("finished", "failed", "killed", "unknown")
    others = Counter(run.state for run in runs if run.state not in ended)
    if others:
        counts = ", ".join(f"{count} {state}" for state, count in others.items())
        notes.append(f"Not all runs have finished: {counts}.")
    return notes
