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
    best = found.best
    if best is None:
        reason = "recorded a metric" if found.metric is None else f"has a finite {found.metric}"
        return f"No answer yet: none of the {len(runs)} runs {reason}."
    if len(found.groups) == 1:
        return f"One setting, {plural(len(runs), 'run')}: {_score(found, best)}."
    word = "highest" if found.higher_is_better else "lowest"
    tied = [group for group in found.ranked if found.mean(group) == found.mean(best)]
    names = f"{', '.join(map(_name, tied[:3]))}{' …' if len(tied) > 3 else ''}"
    verb = "share" if len(tied) > 1 else "gave"
    sentence = f"{names} {verb} the {word} {found.metric}: {_score(found, best)}"
    sentence += _against(found, best, [group for group in found.ranked if group not in tied])
    clipped = found.clipped(best) if len(tied) == 1 else None
    return f"{sentence}{f'; it clipped {clipped}' if clipped else ''}."


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


def _against(found: Findings, best: Group, others: list[Group]) -> str:
    """Compare the best setting with no clipping, or else with the best of the others."""
    if not others:
        return ""
    unclipped = next((group for group in others if best.clips and not group.clips), None)
    other = unclipped or others[0]
    against, spread = found.mean(other)
    name = "without clipping" if other is unclipped else f"with {other.label}, the next best"
    text = f", against {rounded(against)} {name}"
    if spread is not None and not found.differ(best, other):
        text += " (within the spread of the seeds)"
    return text


def _seeds(found: Findings) -> str | None:
    if len(found.ranked) < 2 or any(len(group.runs) > 1 for group in found.groups):
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
