"""The result of the runs in one sentence."""

from __future__ import annotations

from runner.config.notation import first_few
from runner.report.findings import Findings, Group
from runner.report.look import plural, rounded, signed
from runner.report.run import Run
from runner.report.statistics import Difference


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
    sentence = f"This run ({run.state}) took {plural(run.steps, 'step')}"
    if score is not None:
        final = found.measured[run.number].get(f"final/{found.metric}")
        sentence += f", with a best {found.metric} of {rounded(score)}"
        sentence += "" if final is None else f" and a final one of {rounded(final)}"
    clipped = found.clipped(group)
    return sentence + (f"; {group.label} clipped {clipped}." if clipped else ".")


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
