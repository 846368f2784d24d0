"""Rules of thumb, each for a sweep whose results leave its question open.

Source: V. Godbole et al., Deep Learning Tuning Playbook, 2023, the answers on unstable training
(https://github.com/google-research/tuning_playbook): clip just above the typical norm, beginning
with the 90th percentile; compare with a longer warm-up, which can mend what clipping cannot;
instability matters where it keeps the learning rate down, which a short run at twice the best rate
shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from runner.report.evidence import (
    RATE,
    THRESHOLD,
    Advice,
    along,
    apart,
    constant,
    row,
    topics_of,
    varied,
)
from runner.report.findings import Findings
from runner.report.groups import Group, choice
from runner.report.notation import rounded, typed
from runner.run_folder import keys

PROBE = 500
"""Steps of a run at twice the best rate."""

USUAL = (
    "(Usual for language models: 1 in pre-training, 10 in preference tuning, 0.1 in reinforcement "
    "learning.)"
)
"""MaxText's defaults, by task; pre-training as in GPT-3."""

EARLY = 0.25
"""Share of the steps within which a longer warm-up may prevent that a loss diverges."""

_WARM_UP = "scheduler.warmup_fraction"


def unstable(found: Findings) -> list[Advice]:
    """Return a sentence if instability keeps the learning rate down, or the loss is lost early."""
    best, differing = found.best, (*found.differences.columns, *found.differences.others)
    if best is None or any("warmup" in key or key == "scheduler" for key in differing):
        return []
    rates = along(found, best, RATE)
    rate = next((rate for rate, group in rates.items() if group is best), None)
    above = [one for one in rates if rate is not None and one > rate]
    if above and _lost(found, rates[above[0]]) is not None:
        text_of = choice(rates[above[0]].runs[0], RATE)
        if any(choice(group.runs[0], RATE) == text_of for group in found.ranked):
            return []  # another setting is stable at this rate
        text = (
            f"{RATE}={typed(above[0])} diverged, so instability keeps the learning rate at "
            f"{rounded(rate)}. A longer warm-up can mend what clipping cannot: at that rate, "
            f"try {_warmer(best)}, and try a lower threshold."
        )
        return [Advice(text, _divergence(found, [rates[above[0]]]) + row(found, best))]
    steps = max(run.steps for run in found.sweep.runs)
    lost = [g for g in found.groups if (at := _lost(found, g)) is not None and at <= EARLY * steps]
    # A higher rate that diverged beside a best one in between is what a sweep of rates looks for.
    if not lost or varied(found, RATE):
        return []
    text = (
        "The loss diverged early. A longer warm-up can mend what clipping cannot: compare "
        f"{_warmer(lost[0])} with a lower threshold."
    )
    return [Advice(text, _divergence(found, lost))]


def rules_of_thumb(found: Findings) -> list[Advice]:
    """Return what to try where the thresholds of the sweep could not be told apart."""
    compared = [g for g in found.groups if found.scores(g)]
    clipped = [g for g in compared if g.mode == "norm" and g.threshold]
    known = {kind for group in clipped for kind in topics_of(group)}
    if not clipped or known & {"cancels", "weighs", "nothing", "nonfinite"}:
        return []
    clips = {(group.mode, group.threshold) for group in compared}
    if len(clips) < 2 or apart(found, compared):
        return []
    return [*_typical(found, clipped), *_probe(found, compared)]


def _typical(found: Findings, clipped: Sequence[Group]) -> list[Advice]:
    """Return a sentence if no threshold lies just above the typical norm."""
    least = found.reference()
    spreads = [of for run in least.runs if (of := found.measured[run.number].norm)] if least else []
    if least is None or not spreads or not all({"p50", "p90"} <= of.keys() for of in spreads):
        return []
    typical, high = (fmean(of[name] for of in spreads) for name in ("p50", "p90"))
    tried = [group.threshold for group in clipped if group.threshold]
    if any(typical <= one <= 2 * high for one in tried):
        return []
    side = "below" if max(tried) < typical else "above" if min(tried) > 2 * high else "far from"
    text = (
        f"The thresholds lie {side} the typical gradient norm, and made no difference that could "
        f"be seen. Try one just above it: {THRESHOLD}={typed(high, 2)}, the 90th percentile."
    )
    finals = [run.summary.get("final") for run in least.runs]
    if any(isinstance(one, dict) and keys.TRAIN_TOKENS in one for one in finals):
        text += f" {USUAL}"
    fact = f"{least.label}: ‖G‖ p50 {rounded(typical)}, p90 {rounded(high)}"
    return [Advice(text, ((fact, least),))]


def _probe(found: Findings, compared: Sequence[Group]) -> list[Advice]:
    """Return a sentence if seeds showed no difference, at one learning rate only."""
    rate = compared[0].runs[0].config.get(RATE)
    single = any(len(found.seeds(group)) < 2 for group in compared)
    open_ = len(found.ranked) > 1 and constant(compared, RATE)
    if single or not open_ or not isinstance(rate, int | float):
        return []
    text = (
        f"Clipping pays where it lets the learning rate rise, and this sweep has one rate. Probe "
        f"{PROBE} steps at twice the rate, with and without clipping: {RATE}={typed(2 * rate)} "
        f"train.max_duration={PROBE}ba."
    )
    return [Advice(text, row(found, *found.ranked[:2]))]


def _warmer(group: Group) -> str:
    """Return the overrides of a warm-up that is longer than that of a setting."""
    share = group.runs[0].config.get(_WARM_UP)
    if isinstance(share, int | float) and 0 < share <= 0.25:
        return f"{_WARM_UP}={typed(2 * share)}"
    return f"scheduler=linear_warmup_cosine {_WARM_UP}=0.1"


def _lost(found: Findings, group: Group) -> int | None:
    """Return the earliest step at which a run of a setting diverged."""
    steps = [found.measured[run.number].diverged_at for run in group.runs]
    return min((step for step in steps if step is not None), default=None)


def _divergence(found: Findings, groups: Sequence[Group]) -> tuple[tuple[str, Group], ...]:
    facts = [f"{group.label}: diverged at step {_lost(found, group):,}" for group in groups]
    return tuple(zip(facts[:3], groups[:3], strict=True))
