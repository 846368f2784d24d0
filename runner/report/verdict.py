"""The result of the runs in one sentence, and remarks on it."""

from __future__ import annotations

from collections import Counter

from runner.config.notation import first_few
from runner.report.advice import advice
from runner.report.findings import Findings
from runner.report.groups import Group, clipping_modes
from runner.report.notation import plural, rounded
from runner.report.run import Run


def verdict(found: Findings) -> str:
    """Return the result in one sentence."""
    runs = found.sweep.runs
    if not runs:
        return "This sweep holds no run yet."
    if len(runs) == 1:
        return _of_one(found, runs[0])
    ranked = found.ranked()
    if not ranked:
        reason = "recorded a metric" if found.metric is None else f"has a finite {found.metric}"
        return f"No answer yet: none of the {len(runs)} runs {reason}."
    if len(found.groups) == 1:
        return f"One setting, {plural(len(runs), 'run')}: {_score(found, ranked[0])}."
    best = ranked[0]
    word = "highest" if found.higher_is_better else "lowest"
    tied = [group for group in ranked if found.mean(group) == found.mean(best)]
    if len(tied) > 1:
        names = f"{', '.join(map(_name, tied[:3]))}{' …' if len(tied) > 3 else ''}"
        sentence = f"{names} share the {word} {found.metric}: {_score(found, best)}"
        rest = [group for group in ranked if group not in tied]
        return f"{sentence}{_against(found, [best, *rest])}."
    sentence = f"{_name(best)} gave the {word} {found.metric}: {_score(found, best)}"
    return f"{sentence}{_against(found, ranked)}{_clipped(found, best)}."


def remarks(found: Findings) -> list[str]:
    """Return remarks on seeds and failures, on the sweep, and those of its runs."""
    if not found.sweep.runs:
        return []
    notes = [_seeds(found), _lost(found), _modes(found)]
    return [*advice(found), *(note for note in notes if note), *_states(found)]


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
    return f"{rounded(mean)} ± {rounded(spread, 2)} over {plural(len(found.scores(group)), 'seed')}"


def _against(found: Findings, ranked: list[Group]) -> str:
    """Compare the best setting with no clipping, or else with the second best."""
    best = ranked[0]
    unclipped = next((group for group in ranked if not group.clips), None)
    other = unclipped if unclipped not in (None, best) else next(iter(ranked[1:]), None)
    if other is None:
        return ""
    against, spread = found.mean(other)
    name = "without clipping" if other is unclipped else f"with {other.label}, the next best"
    text = f", against {rounded(against)} {name}"
    if spread is not None and not found.differ(best, other):
        text += " (within the spread of the seeds)"
    return text


def _clipped(found: Findings, group: Group) -> str:
    clipped = found.clipped(group)
    return "" if clipped is None else f"; it clipped {clipped}"


def _seeds(found: Findings) -> str | None:
    if len(found.ranked()) < 2 or any(len(group.runs) > 1 for group in found.groups):
        return None
    return (
        "Each setting ran with one seed, so small differences may be chance; "
        "add seed=0,1,2 to see how far seeds lie apart."
    )


def _lost(found: Findings) -> str | None:
    lost = [
        f"{group.label} (run {run.number}) at step {at:,}"
        for group in found.groups
        for run in group.runs
        for at in [found.measured[run.number].diverged_at]
        if at is not None
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
    runs = found.sweep.runs
    if len(runs) == 1:
        return [cause for cause in [_cause(runs[0])] if cause]
    notes = [
        f"Run {run.number} {'was ' if run.state == 'killed' else ''}{run.state} at step "
        f"{run.steps:,}{f': {cause}' if cause else ''}"
        for run in runs
        for cause in [_cause(run)]
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


def _cause(run: Run) -> str:
    """Return the last line of a run's error; empty if there is none."""
    return (run.error or "").strip().rpartition("\n")[2][:300]
