"""The answer of the runs: a title, sentences that explain it, the next command, and remarks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from runner.config.notation import first_few
from runner.config.notation import rounded as typed
from runner.report.findings import DIVERGED, DONE, Findings
from runner.report.look import joined, percent, plural, rounded
from runner.report.run import Run, SweepRuns, command_of
from runner.report.settings import MODE, RATE, THRESHOLD, Setting, choice, short
from runner.report.statistics import Difference
from runner.run_folder import keys

CLEARLY, PROBABLY, FEW, TIE, SAME = "clearly", "probably", "few", "tie", "same"
REVERSED = "reversed"  # better than the best mean, on the common seeds
SINGLE = "single"  # fewer than two common seeds
ALIKE = 0.05  # relative difference up to which results of single seeds count as equal
_NAMES = {THRESHOLD: "threshold", RATE: "learning rate", MODE: "mode"}


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
    runs = findings.sweep.runs
    if len(runs) == 1:
        title = _title_of_run(findings, runs[0])
        sentences = [*_facts_of_run(findings, runs[0])]
    else:
        title = _title(findings)
        sentences = [*_sentences(findings)]
    command, purpose = _next(findings)
    return Verdict(title, sentences, command, purpose)


def kind(difference: Difference | None) -> str:
    """Return what a difference is worth."""
    if difference is None or difference.p is None:
        return SINGLE
    if difference.same:
        return SAME
    if difference.seen:
        return CLEARLY
    if difference.probable:
        return PROBABLY
    return TIE if difference.needed is None else FEW


def in_words(findings: Findings, difference: Difference | None) -> str:
    """Return what a difference to `compared_with` is worth, in plain words."""
    worth = kind(difference)
    if difference is None:
        return ""
    better = (difference.value > 0) == findings.higher_is_better
    direction = "better" if better else "worse"
    if worth == FEW and difference.needed is not None:
        return f"too few seeds to tell: {difference.needed - difference.seeds} more would"
    texts = {SAME: "identical", TIE: "tie", SINGLE: "one seed: cannot tell"}
    texts |= {CLEARLY: f"clearly {direction}", PROBABLY: f"probably {direction}"}
    return texts[worth]


# ---- The title -----------------------------------------------------------------------------------


def question(findings: Findings) -> str:
    """Return what was swept as a question: ``Which threshold?``."""
    if THRESHOLD in findings.swept and len(findings.swept) == 1:
        return "Which threshold?"
    if len(findings.swept) == 1:
        key = findings.swept[0]
        return f"Which {_NAMES.get(key, short(key))}?"
    return "Which method?" if {*findings.swept} == {MODE, THRESHOLD} else "Which setting?"


def _title(findings: Findings) -> str:
    if not findings.sweep.runs:
        return "This sweep holds no run yet"
    best = findings.best
    if best is None:
        return _title_without_result(findings)
    if len(findings.settings) == 1:
        return f"One setting, {plural(len(findings.seeds(best)), 'seed')}: {_score(findings, best)}"
    if findings.identical:
        return _title_of_identical(findings)
    return f"{question(findings)} {_answer(findings, best)}"


def _title_without_result(findings: Findings) -> str:
    if findings.metric is None:
        return "No answer yet: no run recorded a metric"
    if all(findings.diverged(setting) for setting in findings.settings):
        return "Every setting diverged: no threshold made this training stable"
    states = {run.state for run in findings.sweep.runs}
    if "running" in states or "waiting" in states:
        return "No answer yet: no setting has a result"
    return "No answer: every setting diverged or failed"


def _title_of_identical(findings: Findings) -> str:
    if any(run.branch for run in findings.sweep.runs):
        return "These branches are identical"
    if all(not findings.ratio(setting) for setting in findings.settings):
        return "No threshold clipped a step: these runs are identical"
    return "All settings gave the same result: these runs are identical"


def _answer(findings: Findings, best: Setting) -> str:
    if findings.winner is not None:
        return f"{best.label} is best"
    by_kind: dict[str, list[Setting]] = {}
    for setting in findings.ranked[1:]:
        if not findings.is_worse(setting):
            worth = kind(findings.rivals.get(setting.index))
            by_kind.setdefault(worth, []).append(setting)
    equal = by_kind.get(SAME, []) + by_kind.get(TIE, [])
    if not by_kind:  # one setting has a mean, or no run has finished
        return (
            f"{best.label} is best so far"
            if findings.ranked[1:]
            else f"{best.label} is the only one with a result"
        )
    if SINGLE in by_kind:
        return f"{best.label} did best, in one seed"
    if FEW in by_kind:
        rivals = joined([setting.label for setting in by_kind[FEW]], 2)
        return f"Too few seeds to tell {best.label} from {rivals}"
    if equal:
        tied = sorted([best, *equal], key=lambda setting: setting.index)
        names = joined([setting.label for setting in tied], 4)
        return f"{names} are a tie"
    if CLEARLY in by_kind:  # on the common seeds, another setting is better than the best mean
        return f"{best.label} has the best mean, but not on the common seeds"
    return f"{best.label} is probably best"


def _title_of_run(findings: Findings, run: Run) -> str:
    [setting] = findings.settings
    share = findings.share(setting)
    parts = setting.info.parts or "steps"
    value = choice(run, THRESHOLD)
    count = plural(run.steps, "step")
    if run.state in ("failed", "killed", "interrupted"):
        return f"This run {_ended(run)} at step {run.steps:,}"
    if findings.diverged(setting):
        return f"This run diverged at step {findings.measured[run.number][DIVERGED]:,.0f}"
    if not setting.clips:
        return f"{count} without clipping"
    if share is None:
        return f"{count} with clip={run.mode} so far"
    threshold = f"The threshold {value}" if run.threshold is not None else f"clip={run.mode}"
    if not share:
        return f"{threshold} clipped none of {count}"
    what = (
        f"{percent(share)} of {count}" if parts == "steps" else f"{percent(share)} of the {parts}"
    )
    return f"{threshold} clipped {what}"


def _ended(run: Run) -> str:
    return {"failed": "failed", "killed": "was killed"}.get(run.state, "was interrupted")


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
    mean, spread = findings.mean(setting)
    score = f"{findings.metric} {rounded(mean)}"
    return score if spread is None else f"{score} ± {rounded(spread, 2)}"


def _how_much(findings: Findings, best: Setting) -> str:
    """Compare the best setting with the baseline, no clipping, or the best of the others."""
    seeds = plural(len(findings.seeds(best)), "seed")
    sentence = f"{best.label}: {_score(findings, best)} over {seeds}"
    others = findings.ranked[1:]
    if not others or findings.identical:
        return f"{sentence}."
    unclipped = next((s for s in others if best.clips and not s.clips), None)
    rival = unclipped or others[0]
    name = "without clipping" if unclipped else f"at {rival.label}"
    difference = findings.rivals.get(rival.index)
    if findings.baseline is not None and findings.baseline in others:
        rival = findings.baseline
        name = f"at the baseline {rival.label}"
        difference = findings.comparisons.get(best.index)
    against = f"{sentence}, against {rounded(findings.mean(rival)[0])} {name}"
    if difference is None or difference.low is None or difference.high is None:
        return f"{against}."
    ends = sorted((abs(difference.low), abs(difference.high)))
    if difference.seen:
        word = "more" if findings.higher_is_better else "less"
        size = rounded(abs(difference.value), 2)
        spans = f"{rounded(ends[0], 2)} to {rounded(ends[1], 2)}"
        return f"{against}: {size} {word} (95 % interval {spans})."
    return f"{against}."


def _how_sure(findings: Findings) -> Iterator[str]:
    """Yield what the other settings are worth beside the best one, in groups."""
    labels: dict[str, list[str]] = {}
    more = 0
    for setting in findings.ranked[1:]:
        difference = findings.rivals.get(setting.index)
        worth = kind(difference)
        if worth == FEW and difference is not None and difference.needed is not None:
            more = max(more, difference.needed - difference.seeds)
        if worth == CLEARLY and not findings.is_worse(setting):
            worth = REVERSED
        labels.setdefault(worth, []).append(setting.label)
    texts = {
        SAME: "identical",
        TIE: "tie",
        FEW: f"too few seeds to tell: {more} more would",
        PROBABLY: "probably worse",
        CLEARLY: "clearly worse",
        REVERSED: "better on the common seeds",
    }
    if SINGLE in labels:
        yield "Settings have one seed in common: small differences may be chance."
    listed = [f"{joined(labels[worth], 4)} – {texts[worth]}" for worth in texts if worth in labels]
    if listed and findings.best is not None:
        yield f"Beside {findings.best.label}: {'; '.join(listed)}."


def _where(findings: Findings) -> Iterator[str]:
    """Yield where a threshold matters, if another key was swept too: at which of its values."""
    if len(findings.swept) != 2 or THRESHOLD not in findings.swept or MODE in findings.swept:
        return
    [key] = [key for key in findings.swept if key != THRESHOLD]
    matters = {}
    for setting in findings.ranked:  # best first, so that the first of a value is its best
        value = choice(setting.runs[0], key)
        rivals = [s for s in findings.ranked if choice(s.runs[0], key) == value and s != setting]
        if value not in matters and rivals:
            differences = findings.differences_to(setting)
            pairs = [differences.get(rival.index) for rival in rivals]
            matters[value] = any(pair is not None and pair.seen for pair in pairs)
    deciding = sorted(value for value, differs in matters.items() if differs)
    if deciding and len(deciding) < len(matters):
        name = f"{_NAMES.get(key, short(key))}"
        yield f"The threshold makes a difference at {name} {joined(deciding, 4)} alone."


def _clipped(findings: Findings, setting: Setting) -> Iterator[str]:
    share = findings.share(setting)
    parts = setting.info.parts or "steps"
    if not setting.clips or share is None:
        return
    median = findings.average(setting, f"{keys.GRAD_NORM}/p50")
    high = findings.average(setting, f"{keys.GRAD_NORM}/p99")
    norms = f" (‖G‖: median {rounded(median, 3)}, 99 % below {rounded(high, 3)})" if median else ""
    amount = percent(share) if share else "none"
    yield f"{setting.label} clipped {amount} of its {parts}{norms}."


def _diverged(findings: Findings) -> Iterator[str]:
    texts = []
    for setting in findings.settings:
        lost = len(findings.diverged(setting))
        if lost:
            texts.append(f"{setting.label} ({lost} of {plural(len(setting.runs), 'seed')})")
    if texts:
        yield f"Diverged: {first_few(texts, 4)}."


def _facts_of_run(findings: Findings, run: Run) -> Iterator[str]:
    [setting] = findings.settings
    score = findings.score(run)
    final = findings.measured[run.number].get(f"final/{findings.metric}")
    if run.error:
        yield run.error.strip().rpartition("\n")[2][:300]
    if score is not None and math.isfinite(score):
        text = f"Best {findings.metric} {rounded(score)}"
        yield text + ("." if final is None else f", final {rounded(final)}.")
    if setting.clips and run.state in ("failed", "killed", "interrupted"):
        yield from _clipped(findings, setting)
        yield from _left_out(findings, run)
        return
    median = findings.average(setting, f"{keys.GRAD_NORM}/p50")
    high = findings.average(setting, f"{keys.GRAD_NORM}/p99")
    highest = findings.average(setting, f"{keys.GRAD_NORM}/max")
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


# ---- The next command ----------------------------------------------------------------------------


def _next(findings: Findings) -> tuple[str, str]:
    """Return the command to run next, and what it is for; empty texts if there is none."""
    sweep = findings.sweep
    runs = sweep.runs
    if not _has_commands(sweep):
        return "", ""
    unfinished = [run for run in runs if run.state not in DONE]
    if unfinished and not sweep.single and sweep.words:
        return sweep.command or "", "The same command finishes the sweep:"
    if sweep.single:
        return _sweep_around(findings, runs[0])
    best = findings.best
    if best is None:
        return _lower_rates(findings)
    more = _seeds_to_decide(findings)
    if more and not sweep.searches:
        return more, "More seeds would decide:"
    if findings.identical:
        return _lower_thresholds(findings, best)
    for key in (THRESHOLD, RATE):
        values = edge_values(findings, key)
        if values and not sweep.searches:
            return sweep.command_for(key, values), f"The best {_NAMES[key]} is at an end: go on"
    if sweep.searches:
        words = [word for word in best.runs[0].overrides if not word.startswith("seed=")]
        return command_of(["-m", *words, "seed=0,1,2,3,4"]), "The best trial, with five seeds:"
    return _train_with(findings, best)


def _has_commands(sweep: SweepRuns) -> bool:
    """Return whether commands of this project made the runs."""
    if all(run.own_loop for run in sweep.runs):
        return False
    return sweep.single or bool(sweep.words)


def _train_with(findings: Findings, best: Setting) -> tuple[str, str]:
    """Return the command that trains with the best setting."""
    sweep = findings.sweep
    words = [word for word in best.runs[0].overrides if not word.startswith("seed=")]
    if "-m" not in sweep.words and "--multirun" not in sweep.words:
        words.append("hydra.mode=RUN")  # a recipe asked for the sweep
    return command_of([*sweep.flags, *words]), "Train with it:"


def _sweep_around(findings: Findings, run: Run) -> tuple[str, str]:
    """Return the sweep of thresholds around the norms of a single run."""
    [setting] = findings.settings
    points = ("p50", "p90", "p99")
    norms = [findings.average(setting, f"{keys.GRAD_NORM}/{point}") for point in points]
    if run.own_loop or run.mode not in ("norm", "none"):
        return "", ""
    thresholds = list(dict.fromkeys(typed(norm, 2) for norm in norms if norm))
    if len(thresholds) < 2:
        return "", ""
    apart = ("clip=", "clip.threshold=", "seed=", "hydra.run.dir=", "clip.mode=")
    kept = [word for word in run.overrides if not word.startswith(apart)]
    swept = [f"clip.threshold={','.join(thresholds)}", "seed=0,1,2"]
    words = ["-m", *findings.sweep.flags, *kept, "clip=norm", *swept]
    return command_of(words), "Compare thresholds at p50, p90 and p99 of ‖G‖:"


def _lower_rates(findings: Findings) -> tuple[str, str]:
    """Return the sweep with lower learning rates, if every setting diverged."""
    lost = all(findings.diverged(setting) for setting in findings.settings)
    rates = [setting.number(RATE) for setting in findings.settings]
    known_rates = [rate for rate in rates if rate]
    if not lost or not known_rates or findings.sweep.searches:
        return "", ""
    lowest = min(known_rates)
    values = [typed(lowest / 2), typed(lowest / 4)]
    command = findings.sweep.command_for(RATE, values)
    return command, "Lower learning rates may be stable:"


def _lower_thresholds(findings: Findings, best: Setting) -> tuple[str, str]:
    """Return the sweep of thresholds that clip, if none did."""
    points = ("p50", "p90", "p99")
    norms = [findings.average(best, f"{keys.GRAD_NORM}/{point}") for point in points]
    values = list(dict.fromkeys(typed(norm, 2) for norm in norms if norm))
    if any(findings.ratio(s) for s in findings.settings) or not values or not best.info.limits_norm:
        return "", ""
    return findings.sweep.command_for(THRESHOLD, values), "These thresholds would clip:"


def undecided(findings: Findings) -> list[tuple[Setting, Difference]]:
    """Return the settings that more seeds would tell from the best one, in order of rank."""
    rivals = []
    for setting in findings.ranked[1:]:
        difference = findings.rivals.get(setting.index)
        if difference is not None and difference.needed is not None and not difference.seen:
            rivals.append((setting, difference))
    return rivals


def _seeds_to_decide(findings: Findings) -> str:
    """Return the command with the seeds that would decide; empty if none is needed."""
    others = findings.ranked[1:]
    if not others or findings.winner is not None:
        return ""
    single = [s for s in others if kind(findings.rivals.get(s.index)) == SINGLE]
    if single:
        return _with_seeds(findings, 5)
    rivals = undecided(findings)
    return _with_seeds(findings, max(d.needed or 0 for _, d in rivals)) if rivals else ""


def _with_seeds(findings: Findings, count: int) -> str:
    """Return the command that adds seeds to the sweep until it has ``count``."""
    seeds = sorted({int(run.seed) for run in findings.sweep.runs if run.seed.isdecimal()})
    unused = [seed for seed in range(count + len(seeds)) if seed not in seeds]
    added = unused[: max(0, count - len(seeds))]
    return findings.sweep.command_with(sorted([*seeds, *added]))


# ---- Remarks -------------------------------------------------------------------------------------


def remarks(findings: Findings) -> list[str]:
    """Return what the sweep shows beside its answer, the remarks of its runs, and lost runs."""
    by_topic: dict[str, dict[str, str]] = {}  # texts by topic and setting
    for setting in findings.settings:
        for run in setting.runs:
            for topic, text in _recorded_remarks(run):
                by_topic.setdefault(topic, {}).setdefault(setting.label, text)
    texts = []
    if "few" not in by_topic:
        edges = [edge(findings, key) for key in (THRESHOLD, RATE)]
        texts += [text for text in edges if text]
    for by_setting in by_topic.values():
        (label, text), *more = by_setting.items()
        settings = f"{label} and {plural(len(more), 'more setting')}" if more else label
        texts.append(text if len(findings.settings) == 1 else f"{settings}: {text}")
    return [*texts, *states(findings)]


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
    values = edge_values(findings, key)
    best = findings.best
    if not values or best is None:
        return None
    fixed = _fixed(findings, best, key)
    where = ", ".join(f"{column}={text}" for column, text in fixed.items())
    start = f"With {where} the" if where else "The"
    lowest = all(_size(value) < (best.number(key) or 0.0) for value in values)
    end, beyond = ("lowest", "lower") if lowest else ("highest", "higher")
    return (
        f"{start} best {key}, {rounded(best.number(key))}, is the {end} with a result: a {beyond} "
        f"one may do better (try {' and '.join(values)})."
    )


def _size(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _fixed(findings: Findings, best: Setting, key: str) -> dict[str, str]:
    """Return the other keys that were swept, with their values in the best setting."""
    others = [column for column in findings.columns if column not in ("seed", key)]
    if MODE not in findings.swept:
        others = [column for column in others if column != MODE]
    return {column: choice(best.runs[0], column) for column in others}


def edge_values(findings: Findings, key: str) -> list[str]:
    """Return the values to try beyond the range of a sweep, whose best is at an end of it."""
    best = findings.best
    value = None if best is None else best.number(key)
    if best is None or value is None:
        return []
    fixed = _fixed(findings, best, key)
    tried = [s for s in findings.settings if _tried(findings, s, key, fixed)]
    values = [setting.number(key) or 0.0 for setting in tried]
    if len(tried) < 2 or value not in (min(values), max(values)) or not _differ(findings, tried):
        return []
    if value == min(values):
        return [typed(value * 0.5), typed(value * 0.25)]
    if key != THRESHOLD:
        return [typed(value * 2), typed(value * 4)]
    tried_without_clipping = any(not s.clips and findings.seeds(s) for s in findings.settings)
    if tried_without_clipping or not findings.ratio(best):
        return []
    return [typed(value * 2), typed(value * 4)]


def _differ(findings: Findings, settings: Sequence[Setting]) -> bool:
    """Return whether seeds tell the best of ``settings`` from another one; a lost run does."""
    ranked = [setting for setting in findings.ranked if setting in settings]
    if len(ranked) < len(settings) or any(len(findings.seeds(s)) < 2 for s in settings):
        means = [findings.mean(setting)[0] for setting in settings]
        lost = not all(math.isfinite(mean) for mean in means)
        largest = max(abs(mean) for mean in means)
        return lost or max(means) - min(means) > ALIKE * largest
    differences = findings.differences_to(ranked[0])
    return any(differences[s.index].seen for s in ranked[1:] if s.index in differences)


def _tried(findings: Findings, setting: Setting, key: str, fixed: Mapping[str, str]) -> bool:
    """Return whether a setting has a result for a value of ``key`` and is else as ``fixed``.

    A value that diverged limits the range, as one with a worse result does.
    """
    if not findings.seeds(setting) or setting.number(key) is None:
        return False
    return all(choice(setting.runs[0], column) == text for column, text in fixed.items())


def states(findings: Findings) -> Iterator[str]:
    """Yield remarks on a baseline that does not exist, and on runs that ended early."""
    if findings.unknown is not None:
        labels = first_few([setting.label for setting in findings.settings], 8)
        yield f"report.baseline={findings.unknown} names no setting; there are {labels}."
    runs = findings.sweep.runs
    for run in [run for run in runs if run.error or run.state in ("failed", "killed")][:5]:
        yield _failed(run)
    unfinished = Counter(run.state for run in runs if run.state not in ("finished", "unknown"))
    if unfinished and len(runs) > 1:
        counts = ", ".join(f"{count} {state}" for state, count in unfinished.items())
        yield f"Not all runs have finished: {counts}."


def _failed(run: Run) -> str:
    cause = (run.error or "").strip().rpartition("\n")[2][:300]
    ended = "was killed" if run.state == "killed" else run.state
    text = f"Run {run.number} {ended} at step {run.steps:,}"
    return f"{text}: {cause}" if cause else text
