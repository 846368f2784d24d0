"""The answer of the runs: a title, sentences that explain it, and the next command."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runner.config.notation import first_few
from runner.report.findings import DIVERGED, Findings
from runner.report.look import joined, percent, plural, rounded
from runner.report.next_command import next_command
from runner.report.run import Run
from runner.report.settings import MODE, NAMES, THRESHOLD, Setting, choice, short
from runner.report.statistics import Difference
from runner.report.worth import (
    CLEARLY,
    FEW,
    LONGEST_NAMES,
    PROBABLY,
    REVERSED,
    SAME,
    SINGLE,
    TIE,
    names,
    rivals_by_worth,
)
from runner.run_folder import keys

_MOST_TIED = 4  # most settings that a title names
_ENDED = {"failed": "failed", "killed": "was killed", "interrupted": "was interrupted"}


class Verdict(NamedTuple):
    """What the first screen says.

    Attributes:
        title: the answer in one sentence.
        sentences: how much better, how sure, and what clipping did.
        command: the command to run next, empty if there is none, and what it is ``for``.
    """

    title: str
    sentences: list[str]
    command: str
    purpose: str


def verdict(findings: Findings) -> Verdict:
    """Return the title of the page, its sentences, and the next command."""
    runs = findings.sweep.runs
    if len(runs) == 1:
        title = _title_of_run(findings, runs[0])
        sentences = [*_facts_of_run(findings, runs[0])]
    else:
        title = _title(findings)
        sentences = [*_sentences(findings)]
    command, purpose = next_command(findings)
    return Verdict(title, sentences, command, purpose)


# ---- The title -----------------------------------------------------------------------------------


def question(findings: Findings) -> str:
    """Return what was swept as a question: ``Which threshold?``."""
    if THRESHOLD in findings.swept and len(findings.swept) == 1:
        return "Which threshold?"
    if len(findings.swept) == 1:
        key = findings.swept[0]
        return f"Which {NAMES.get(key, short(key))}?"
    return "Which method?" if {*findings.swept} == {MODE, THRESHOLD} else "Which setting?"


def _title(findings: Findings) -> str:
    if not findings.sweep.runs:
        return "This sweep holds no run yet"
    best = findings.best
    if best is None:
        return _title_without_result(findings)
    if len(findings.settings) == 1:
        seeds = plural(len(findings.scores.seeds(best)), _noun(findings))
        return f"One setting, {seeds}: {_score(findings, best)}"
    if findings.identical:
        return _title_of_identical(findings)
    return f"{question(findings)} {_answer(findings, best)}"


def _title_without_result(findings: Findings) -> str:
    if findings.metric is None:
        return "No answer yet: no run recorded a metric"
    if all(findings.scores.diverged(setting) for setting in findings.settings):
        return "Every setting diverged: no threshold made this training stable"
    states = {run.state for run in findings.sweep.runs}
    if "running" in states or "waiting" in states:
        return "No answer yet: no setting has a result"
    return "No answer: every setting diverged or failed"


def _title_of_identical(findings: Findings) -> str:
    if any(run.branch for run in findings.sweep.runs):
        return "These branches are identical"
    if all(not findings.scores.ratio(setting) for setting in findings.settings):
        return "No threshold clipped a step: these runs are identical"
    return "All settings gave the same result: these runs are identical"


def _answer(findings: Findings, best: Setting) -> str:
    if findings.winner is not None:
        return f"{best.label} is best"
    by_worth = rivals_by_worth(findings)
    if not by_worth:
        return f"{best.label} is the only one with a result"
    if by_worth.keys() == {CLEARLY}:  # no run has finished
        return f"{best.label} is best so far"
    if SINGLE in by_worth:
        return f"{best.label} did best, {_without_pairs(findings)}"
    open_rivals = by_worth.get(FEW, [])
    equal = by_worth.get(SAME, []) + by_worth.get(TIE, [])
    if equal and open_rivals:
        verb = "needs" if len(open_rivals) == 1 else "need"
        return f"{_tie(best, equal)}; {names(open_rivals)} {verb} more seeds"
    if equal:
        return _tie(best, equal)
    if open_rivals:
        return f"Too few seeds to tell {best.label} from {names(open_rivals)}"
    if REVERSED in by_worth:
        return f"{best.label} has the best mean, but not on the common seeds"
    return f"{best.label} is probably best"


def _without_pairs(findings: Findings) -> str:
    """Return why settings are not compared: one run each, or several without common seeds."""
    most_seeds = max(len(findings.scores.seeds(setting)) for setting in findings.ranked)
    if most_seeds > 1:
        return "but settings have fewer than two seeds in common"
    return f"in one {_noun(findings)}"


def _noun(findings: Findings) -> str:
    """Return what the scores of a setting are counted in: seeds, or runs without one."""
    runs = findings.sweep.runs
    return "seed" if any(run.has_seed for run in runs) else "run"


def _tie(best: Setting, equal: Sequence[Setting]) -> str:
    """Return that settings are a tie: by their names if these are short, else their number."""
    tied = sorted([best, *equal], key=lambda setting: setting.index)
    if len(tied) <= _MOST_TIED:
        text = joined([setting.label for setting in tied], _MOST_TIED)
        if len(text) <= LONGEST_NAMES:
            return f"{text} are a tie"
    return f"{best.label} ties with {plural(len(equal), 'other')}"


def _title_of_run(findings: Findings, run: Run) -> str:
    [setting] = findings.settings
    before = run.branch[1] if run.branch else 0
    count = plural(max(run.steps - before, 0), "step")
    if run.state in _ENDED:
        return f"This run {_ENDED[run.state]} at step {run.steps:,}"
    if findings.scores.diverged(setting):
        return f"This run diverged at step {findings.measured[run.number][DIVERGED]:,.0f}"
    if not setting.clips:
        return f"{count} without clipping"
    share = findings.scores.share(setting)
    if share is None:
        return f"{count} with clip={run.mode} so far"
    has_threshold = run.threshold is not None
    name = f"The threshold {choice(run, THRESHOLD)}" if has_threshold else f"clip={run.mode}"
    if not share:
        return f"{name} clipped none of {count}"
    parts = setting.info.parts or "steps"
    total = count if parts == "steps" else f"the {parts}"
    return f"{name} clipped {percent(share)} of {total}"


# ---- The sentences -------------------------------------------------------------------------------


def _sentences(findings: Findings) -> Iterator[str]:
    best = findings.best
    if best is not None:
        yield _how_much(findings, best)
        if len(findings.settings) > 1 and not findings.identical:
            yield from _how_sure(findings)
            yield from _where(findings)
        if not findings.identical:
            yield from _clipped(findings, best)
    yield from _diverged(findings)


def _score(findings: Findings, setting: Setting) -> str:
    mean, spread = findings.scores.mean(setting)
    score = f"{findings.metric} {rounded(mean)}"
    return score if spread is None else f"{score} ± {rounded(spread, 2)}"


def _how_much(findings: Findings, best: Setting) -> str:
    """Compare the best setting with the baseline, no clipping, or the next best."""
    seeds = plural(len(findings.scores.seeds(best)), _noun(findings))
    sentence = f"{best.label}: {_score(findings, best)} over {seeds}"
    if not findings.ranked[1:] or findings.identical:
        return f"{sentence}."
    rival, name, difference = _rival(findings, best)
    against = f"{sentence}, against {rounded(findings.scores.mean(rival)[0])} {name}"
    if difference is None or difference.low is None or difference.high is None:
        return f"{against}."
    if not difference.seen:
        return f"{against}."
    word = "more" if findings.higher_is_better else "less"
    size = rounded(abs(difference.value), 2)
    low, high = sorted((abs(difference.low), abs(difference.high)))
    interval = f"{rounded(low, 2)} to {rounded(high, 2)}"
    return f"{against}: {size} {word} (95 % interval {interval})."


def _rival(findings: Findings, best: Setting) -> tuple[Setting, str, Difference | None]:
    """Return what the best setting is compared with, its name, and the difference."""
    rivals = findings.ranked[1:]
    baseline = findings.baseline
    if baseline is not None and baseline in rivals:
        name = f"at the baseline {baseline.label}"
        return baseline, name, findings.comparisons.get(best.index)
    unclipped = [setting for setting in rivals if not setting.clips]
    if best.clips and unclipped:
        return unclipped[0], "without clipping", findings.rivals.get(unclipped[0].index)
    return rivals[0], f"at {rivals[0].label}", findings.rivals.get(rivals[0].index)


def _seeds_that_tell(findings: Findings, setting: Setting) -> int:
    """Return how many more seeds would tell a setting from the best one."""
    difference = findings.rivals[setting.index]
    return (difference.needed or 0) - difference.seeds


def _how_sure(findings: Findings) -> Iterator[str]:
    """Yield what all settings after the best one are worth, in groups."""
    by_worth = rivals_by_worth(findings)
    more = [_seeds_that_tell(findings, setting) for setting in by_worth.get(FEW, [])]
    texts = {
        SAME: "identical",
        TIE: "tie",
        FEW: f"too few seeds to tell: {max(more, default=0)} more would",
        PROBABLY: "probably worse",
        CLEARLY: "clearly worse",
        REVERSED: "better on the common seeds",
    }
    if SINGLE in by_worth:
        most_seeds = max(len(findings.scores.seeds(setting)) for setting in findings.ranked)
        one_each = f"One {_noun(findings)} each"
        seeds = one_each if most_seeds == 1 else "Seeds differ between settings"
        yield f"{seeds}: small differences may be chance."
        if any(run.branch for run in findings.sweep.runs):
            yield "The same branches of a run with another seed would tell more."
    named = 4 if len(findings.swept) == 1 else 2
    groups = []
    for worth, text in texts.items():
        if worth in by_worth:
            labels = [setting.label for setting in by_worth[worth]]
            groups.append(f"{joined(labels, named)} – {text}")
    if groups and findings.best is not None:
        yield f"Beside {findings.best.label}: {'; '.join(groups)}."


def _where(findings: Findings) -> Iterator[str]:
    """Yield where a threshold matters, if another key was swept too: at which of its values."""
    if len(findings.swept) != 2 or THRESHOLD not in findings.swept or MODE in findings.swept:
        return
    [key] = [key for key in findings.swept if key != THRESHOLD]
    by_value: dict[str, list[Setting]] = {}
    for setting in findings.ranked:  # best first
        by_value.setdefault(choice(setting.runs[0], key), []).append(setting)
    matters = {}
    for value, (best, *rivals) in by_value.items():
        if rivals:
            matters[value] = _any_seen(findings, best, rivals)
    deciding = sorted(value for value, differs in matters.items() if differs)
    if deciding and len(deciding) < len(matters):
        name = NAMES.get(key, short(key))
        yield f"The threshold makes a difference at {name} {joined(deciding, 4)} alone."


def _any_seen(findings: Findings, best: Setting, rivals: Sequence[Setting]) -> bool:
    """Return whether any of the settings differs clearly from the best one."""
    differences = findings.differences_to(best)
    pairs = [differences.get(rival.index) for rival in rivals]
    return any(pair is not None and pair.seen for pair in pairs)


def _clipped(findings: Findings, setting: Setting) -> Iterator[str]:
    share = findings.scores.share(setting)
    parts = setting.info.parts or "steps"
    if not setting.clips or share is None:
        return
    median = findings.scores.average(setting, f"{keys.GRAD_NORM}/p50")
    high = findings.scores.average(setting, f"{keys.GRAD_NORM}/p99")
    norms = f" (‖G‖: median {rounded(median, 3)}, 99 % below {rounded(high, 3)})" if median else ""
    amount = percent(share) if share else "none"
    yield f"{setting.label} clipped {amount} of its {parts}{norms}."


def _diverged(findings: Findings) -> Iterator[str]:
    texts = []
    for setting in findings.settings:
        lost = len(findings.scores.diverged(setting))
        if lost:
            texts.append(f"{setting.label} ({lost} of {plural(len(setting.runs), 'seed')})")
    if texts:
        yield f"Diverged: {first_few(texts, 4)}."


def _facts_of_run(findings: Findings, run: Run) -> Iterator[str]:
    [setting] = findings.settings
    score = findings.scores.score(run)
    final = findings.measured[run.number].get(f"final/{findings.metric}")
    if run.error:
        yield run.error.strip().rpartition("\n")[2][:300]
    if score is not None and math.isfinite(score):
        text = f"Best {findings.metric} {rounded(score)}"
        yield text + ("." if final is None else f", final {rounded(final)}.")
    if setting.clips and run.state in _ENDED:
        yield from _clipped(findings, setting)
        yield from _left_out(findings, run)
        return
    median = findings.scores.average(setting, f"{keys.GRAD_NORM}/p50")
    high = findings.scores.average(setting, f"{keys.GRAD_NORM}/p99")
    highest = findings.scores.average(setting, f"{keys.GRAD_NORM}/max")
    if median is not None:
        yield (
            f"‖G‖ before clipping: median {rounded(median, 3)}, 99 % of steps below "
            f"{rounded(high, 3)}, highest {rounded(highest, 3)}."
        )
    yield from _left_out(findings, run)


def _left_out(findings: Findings, run: Run) -> Iterator[str]:
    """Yield how many steps were skipped, and why."""
    measured = findings.measured[run.number]
    spikes = measured.get(keys.CLIP_SKIPPED) or 0
    lost = measured.get(keys.GRAD_NONFINITE) or 0
    reasons = []
    if spikes:
        reasons.append(f"{spikes:,.0f} as spikes (clip.skip)")
    if lost:
        reasons.append(f"{lost:,.0f} because their gradient was not finite")
    if reasons:
        yield f"{plural(int(spikes + lost), 'step')} left out: {' and '.join(reasons)}."
    elif keys.CLIP_SKIPPED in measured and measured[keys.CLIP_SKIPPED] is not None:
        yield "clip.skip left out no step."
