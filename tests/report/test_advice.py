"""What the page of a sweep says above its table: each situation and all that is said in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.config.modes import info_of
from runner.optim.effects import PLAIN, Effect
from runner.report import read
from runner.report.advice import advice
from runner.report.findings import Findings, find
from runner.report.verdict import remarks, verdict
from runner.run_folder.strict_json import decode, encode
from runner.telemetry import guidance
from tests.report.examples import config, rows, write_run

ADAM = Effect("AdamW", "normalized")
LION = Effect("Lion", "sign")
RPROP = Effect("Rprop", "sign only")


@dataclass(frozen=True)
class Trial:
    """One finished run: its setting, the share it clipped, and its best evaluation loss."""

    threshold: float | None
    loss: float
    ratio: float = 0.3
    lr: float = 0.1
    mode: str = "norm"
    fraction: float | None = None
    seed: int = 0
    effect: Effect = PLAIN
    nonfinite: int = 0
    steps: int = 300
    diverges_at: int | None = None
    tokens: bool = False
    warm_up: float | None = None


def page(folder: Path, *trials: Trial, **changes: Any) -> Findings:
    """A sweep of ``trials`` with what each run remarks about itself, read back."""
    for number, one in enumerate(trials):
        taken = 20 if one.diverges_at is None else one.steps
        made = rows(one.mode, one.threshold, taken, evaluations=0, diverges_at=one.diverges_at)
        made[-1] |= {"eval/loss": one.loss} | ({"train/tokens": 9} if one.tokens else {})
        of = config(
            clip__mode=one.mode,
            clip__threshold=one.threshold,
            optimizer__lr=one.lr,
            seed=one.seed,
            **({} if one.warm_up is None else {"scheduler__warmup_fraction": one.warm_up}),
            **changes,
        )
        write_run(folder / str(number), made, of, overrides=(f"optimizer.lr={one.lr}",))
        file = folder / str(number) / "summary.json"
        summary = decode(file.read_text())
        summary |= {
            "steps": one.steps,
            "grad/nonfinite": one.nonfinite,
            "clip/ratio_total": one.ratio,
            "clip/fraction": one.ratio if one.fraction is None else one.fraction,
            "clip/peak": {"p90": 1.25, "max": 3.2},
        }
        setting = guidance.Setting(info_of(one.mode), one.threshold, "skip", one.effect)
        summary["remarks"] = [asdict(remark) for remark in guidance.remarks(summary, setting)]
        summary["guidance"] = guidance.sentences(summary["remarks"])
        file.write_text(encode(summary))
    return find(read(folder))


def thresholds(*losses: float, **options: Any) -> list[Trial]:
    return [Trial(t, loss, **options) for t, loss in zip((0.1, 0.5, 2.0), losses, strict=False)]


def rates(*losses: float, threshold: float = 0.25, **options: Any) -> list[Trial]:
    return [
        Trial(threshold, loss, lr=lr, **options)
        for lr, loss in zip((0.02, 0.1, 0.5), losses, strict=False)
    ]


def seeds(
    *settings: tuple[float | None, float], noise: float, of_seed: float = 0.0, **options: Any
) -> list[Trial]:
    """Three seeds of each threshold, whose losses differ by seed and by chance."""
    random = np.random.default_rng(round(1000 * settings[0][1]))
    return [
        Trial(
            threshold,
            loss + of_seed * seed + noise * float(random.uniform(-1, 1)),
            seed=seed,
            **options | ({} if threshold else {"mode": "none"}),
        )
        for threshold, loss in settings
        for seed in range(3)
    ]


PROBE = (
    "Clipping pays where it lets the learning rate rise, and this sweep has one rate. Probe 500 "
    "steps at twice the rate, with and without clipping: optimizer.lr=0.2 train.max_duration=500ba."
)
P90 = np.percentile([row["grad/norm"] for row in rows(steps=20)], 90)
TYPICAL = (
    "the typical gradient norm, and made no difference that could be seen. Try one just above it: "
    f"clip.threshold={P90:.2g}, the 90th percentile."
)
LOWEST = "The best threshold, 0.1, is the lowest tried: a lower one may do better (try 0.05 and "
HIGHEST = "The best threshold, 2, is the highest tried: a higher one, or none, may do better (try "
RATE = "The best optimizer.lr, 0.5, is the highest tried: a higher one may do better (try 1 and 2)."
JOINT = (
    "The best setting clipped {} of its steps. There clip.threshold and optimizer.lr act "
    "together, and this sweep varied only {}: vary {} as well."
)
LIMITS = (
    "clipping acts on ordinary gradients rather than on spikes; raise clip.threshold, and lower "
    "optimizer.lr if training then becomes unstable."
)
FULL = {"ratio": 0.98}
SITUATIONS: dict[str, tuple[list[Trial], list[str]]] = {
    "the best lies between": (thresholds(0.3, 0.1, 0.2), []),
    "the lowest is best": (thresholds(0.1, 0.2, 0.3), [f"{LOWEST}0.025)."]),
    "the highest is best": (thresholds(0.3, 0.2, 0.1), [f"{HIGHEST}4 and clip=none)."]),
    "the highest is best, and clipped nothing": (
        [*thresholds(0.3, 0.2), Trial(2.0, 0.1, ratio=0.0)],
        ["norm 2: no step was clipped, so the threshold changed nothing."],
    ),
    "the highest is best, and no clipping was tried": (
        [*thresholds(0.3, 0.2, 0.1), Trial(None, 0.2, mode="none")],
        [],
    ),
    "the lowest is best and clips nearly all: nothing says to raise it": (
        thresholds(0.1, 0.2, 0.3, **FULL),
        [f"{LOWEST}0.025).", JOINT.format("98\u00a0%", "clip.threshold", "optimizer.lr")],
    ),
    "the best rate is the highest: nothing says to lower it": (
        rates(0.3, 0.2, 0.1, **FULL),
        [RATE, JOINT.format("98\u00a0%", "optimizer.lr", "clip.threshold")],
    ),
    "the best rate lies between": (rates(0.3, 0.1, 0.2), []),
    "rates and thresholds, all clipped: both at an edge": (
        [*rates(0.3, 0.2, 0.1, **FULL), *rates(0.5, 0.4, 0.3, threshold=1.0, **FULL)],
        [
            "With optimizer.lr=0.5 the best threshold, 0.25, is the lowest tried: a lower one may "
            "do better (try 0.125 and 0.0625).",
            f"With clip.threshold=0.25 the best{RATE.removeprefix('The best')}",
        ],
    ),
    "each threshold has its own best rate": (
        [*rates(0.7, 0.2, 0.04), *rates(0.3, 0.05, 0.1, threshold=1.0)],
        [
            "With optimizer.lr=0.5 the best threshold, 0.25, is the lowest tried: a lower one may "
            "do better (try 0.125 and 0.0625).",
            f"With clip.threshold=0.25 the best{RATE.removeprefix('The best')}",
            "The best optimizer.lr depends on the threshold: 0.5 at 0.25, 0.1 at 1.",
        ],
    ),
    "nothing but the seed": (
        [Trial(0.1, loss, seed=seed, **FULL) for seed, loss in enumerate((0.1, 0.2, 0.3))],
        [
            "The threshold 0.1 clipped 98 % of the steps. A threshold that clips so many steps "
            "acts like a lower learning rate, not as a limit on spikes. To clip spikes alone, "
            "raise clip.threshold to about 1.25, the 90th percentile of ‖G‖, and lower "
            "optimizer.lr if training then becomes unstable."
        ],
    ),
    "modes at one threshold each": (
        [Trial(0.1, 0.1, **FULL), Trial(0.2, 0.2, mode="value", ratio=1.0, fraction=0.9)],
        [f"All settings: {LIMITS}"],
    ),
    "modes and thresholds": (
        [
            *thresholds(0.3, 0.4),
            *thresholds(0.1, 0.2, mode="adaptive", ratio=1.0, fraction=0.2),
            *thresholds(0.5, 0.5, mode="value", ratio=0.0),
        ],
        [
            "The best threshold of clip=adaptive, 0.1, is the lowest tried: a lower one may do "
            "better (try 0.05 and 0.025).",
            "value 0.1, value 0.5: no step was clipped, so the threshold changed nothing.",
        ],
    ),
    "thresholds that differ by less than their seeds": (
        seeds((0.1, 0.30), (0.5, 0.31), (2.0, 0.32), noise=0.05),
        [PROBE],
    ),
    "thresholds that differ by less than seeds do, but by as much in each seed": (
        seeds((0.1, 0.30), (0.5, 0.31), (2.0, 0.32), noise=0.0001, of_seed=0.05),
        [f"{LOWEST}0.025)."],
    ),
    "thresholds that differ by more than their seeds": (
        seeds((0.1, 0.30), (0.5, 0.4), (2.0, 0.5), noise=0.001),
        [f"{LOWEST}0.025)."],
    ),
    "no difference, and no clipping among them": (
        [*seeds((0.5, 0.30), (2.0, 0.31), noise=0.05), *seeds((None, 0.32), noise=0.05)],
        [PROBE],
    ),
    "no difference between rates either": (
        [*seeds((0.5, 0.30), noise=0.05), *seeds((0.5, 0.31), noise=0.05, lr=0.2)],
        [],
    ),
    "no difference, with one seed each": (thresholds(0.200, 0.201, 0.202), []),
    "no difference, all far below the typical norm": (
        seeds((0.01, 0.30), (0.02, 0.31), noise=0.05),
        [f"The thresholds lie below {TYPICAL}", PROBE],
    ),
    "no difference, all far below the typical norm, of a language model": (
        seeds((0.01, 0.30), (0.02, 0.31), noise=0.05, tokens=True),
        [
            f"The thresholds lie below {TYPICAL} (Usual for language models: 1 in pre-training, "
            "10 in preference tuning, 0.1 in reinforcement learning.)",
            PROBE,
        ],
    ),
    "a difference, all far below the typical norm": (
        seeds((0.01, 0.30), (0.02, 0.4), noise=0.001),
        [
            "The best threshold, 0.01, is the lowest tried: a lower one may do better (try 0.005 "
            "and 0.0025)."
        ],
    ),
    "no difference, all far above the typical norm": (
        seeds((50.0, 0.30), (90.0, 0.31), noise=0.05),
        [f"The thresholds lie above {TYPICAL}", PROBE],
    ),
    "no difference, far from the typical norm, with Adam": (
        seeds((0.01, 0.30), (0.02, 0.31), noise=0.05, effect=ADAM, **FULL),
        [
            "All settings: nearly every step was clipped, and AdamW divides by the size of the "
            "gradients, so these thresholds train nearly alike."
        ],
    ),
    "a rate above the best one diverged": (
        [*rates(0.3, 0.1), Trial(0.25, 0.5, lr=0.5, diverges_at=100)],
        [
            "optimizer.lr=0.5 diverged, so instability keeps the learning rate at 0.1. A longer "
            "warm-up can mend what clipping cannot: at that rate, try "
            "scheduler=linear_warmup_cosine scheduler.warmup_fraction=0.1, and try a lower "
            "threshold."
        ],
    ),
    "a rate above the best one diverged, but not at another threshold": (
        [
            *rates(0.3, 0.1),
            Trial(0.25, 0.5, lr=0.5, diverges_at=100),
            *rates(0.3, 0.15, 0.2, threshold=0.1),
        ],
        [
            "With optimizer.lr=0.1 the best threshold, 0.25, is the highest tried: a higher one, "
            "or none, may do better (try 0.5 and clip=none)."
        ],
    ),
    "a threshold diverged early": (
        [*thresholds(0.2, 0.1), Trial(8.0, 0.5, diverges_at=40)],
        [
            "The loss diverged early. A longer warm-up can mend what clipping cannot: compare "
            "scheduler=linear_warmup_cosine scheduler.warmup_fraction=0.1 with a lower threshold."
        ],
    ),
    "a threshold diverged early, in a sweep of warm-ups": (
        [
            Trial(1.0, 0.2, warm_up=0.01, diverges_at=40),
            *(Trial(1.0, loss, warm_up=share) for share, loss in ((0.1, 0.2), (0.2, 0.3))),
        ],
        [],
    ),
    "a threshold diverged early, after a short warm-up": (
        [*thresholds(0.2, 0.1, warm_up=0.02), Trial(8.0, 0.5, warm_up=0.02, diverges_at=40)],
        [
            "The loss diverged early. A longer warm-up can mend what clipping cannot: compare "
            "scheduler.warmup_fraction=0.04 with a lower threshold."
        ],
    ),
    "a threshold diverged late": ([*thresholds(0.2, 0.1), Trial(8.0, 0.5, diverges_at=250)], []),
    "all the same": (
        thresholds(0.2, 0.2, 0.2, ratio=0.0),
        ["All settings: no step was clipped, so the threshold changed nothing."],
    ),
    "Adam, thresholds that clip every step, results alike": (
        thresholds(0.200, 0.201, 0.202, effect=ADAM, **FULL),
        [
            "All settings: nearly every step was clipped, and AdamW divides by the size of the "
            "gradients, so these thresholds train nearly alike."
        ],
    ),
    "Adam, thresholds that clip every step, results that differ": (
        thresholds(0.2, 0.3, 0.4, effect=ADAM, **FULL),
        [
            f"{LOWEST}0.025).",
        ],
    ),
    "Lion": (
        thresholds(0.3, 0.2, 0.4, effect=LION, **FULL),
        [
            "All settings: Lion steps by the sign of a mean of gradients: clipping most gradients "
            "does not make its steps smaller."
        ],
    ),
    "Rprop": (
        thresholds(0.2, 0.2, 0.2, effect=RPROP),
        [
            "All settings: clipping has no effect with Rprop, which uses the sign of each gradient "
            "element alone."
        ],
    ),
    "few steps": (
        thresholds(0.1, 0.2, 0.3, steps=20, **FULL),
        ["All settings: fewer than 50 steps were taken, too few to tell what a threshold does."],
    ),
    "few steps, some not finite": (
        [*thresholds(0.1, 0.2, steps=20, **FULL), Trial(2.0, 0.3, steps=20, nonfinite=4)],
        [
            "norm 2: some gradients were NaN or inf, which no threshold fixes: check the loss "
            "and the precision.",
            "All settings: fewer than 50 steps were taken, too few to tell what a threshold does.",
        ],
    ),
    "many settings with the same remark": (
        [Trial(0.1 * n, 0.3 + 0.01 * abs(n - 6), ratio=0.0 if n > 1 else 0.2) for n in range(1, 9)],
        [
            "norm 0.2, norm 0.3, norm 0.4 and 4 more settings: no step was clipped, so the "
            "threshold changed nothing."
        ],
    ),
    "a rate that diverged closes the range": (
        [*rates(0.3, 0.1), Trial(0.25, float("nan"), lr=0.5, nonfinite=200)],
        [
            "norm 0.25, lr=0.5: some gradients were NaN or inf, which no threshold fixes: check "
            "the loss and the precision."
        ],
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_and_all_that_is_said_in_it(name: str, tmp_path: Path) -> None:
    trials, sentences = SITUATIONS[name]
    found = page(tmp_path, *trials)
    assert [one.text for one in advice(found)] == sentences
    for one in advice(found):  # each names what it rests on
        assert one.because
        assert all(fact.startswith(group.label) for fact, group in one.because)


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_sentence_speaks_against_another_or_the_results(name: str, tmp_path: Path) -> None:
    trials, _ = SITUATIONS[name]
    found = page(tmp_path, *trials)
    text = " ".join(remarks(found))
    assert not ("lower one may do better" in text and "raise clip.threshold" in text)
    assert not ("higher one may do better" in text and "ower optimizer.lr" in text)
    assert len(remarks(found)) <= 5


def test_the_page_of_one_run_of_a_sweep_leaves_out_what_the_sweep_decides(tmp_path: Path) -> None:
    page(tmp_path, *thresholds(0.1, 0.2, 0.3, **FULL))
    own = find(read(tmp_path / "0"))
    assert "lower optimizer.lr" in " ".join(one.text for one in advice(own))
    file = tmp_path / "0" / "summary.json"
    summary = json.loads(file.read_text())
    summary["guidance"] = guidance.sentences(summary["remarks"], ["clip.threshold"])
    file.write_text(json.dumps(summary))
    assert advice(find(read(tmp_path / "0"))) == []


def test_settings_of_one_score_share_the_verdict(tmp_path: Path) -> None:
    found = page(tmp_path, *thresholds(0.3, 0.2, 0.2))
    assert verdict(found) == (
        "clip=norm 0.5 and clip=norm 2 share the lowest eval/loss: 0.2, "
        "against 0.3 with norm 0.1, the next best."
    )


def test_a_mode_of_units_is_described_by_its_units(tmp_path: Path) -> None:
    trials = thresholds(0.3, 0.2, mode="adaptive", ratio=1.0, fraction=0.031)
    assert verdict(page(tmp_path, *trials)).endswith(
        "; it clipped 3.1\u00a0% of the units on average."
    )


def test_the_direction_of_the_objective_is_the_configured_one(tmp_path: Path) -> None:
    sweep = {"objective": "eval/loss", "direction": "maximize"}
    found = page(tmp_path, *thresholds(0.1, 0.2, 0.3), sweep=sweep)
    assert verdict(found).startswith("clip=norm 2 gave the highest eval/loss: 0.3")
    [sentence] = advice(found)
    assert sentence.text.startswith("The best threshold, 2, is the highest tried")


def test_sentences_of_an_earlier_version_are_not_shown(tmp_path: Path) -> None:
    """They recommend quantiles of the largest unit."""
    found = page(tmp_path, *thresholds(0.3, 0.1, 0.2))
    for run in found.sweep.runs:
        assert run.folder is not None
        file = run.folder / "summary.json"
        old = json.loads(file.read_text()) | {"guidance": ["raise clip.threshold to about 1560"]}
        del old["remarks"]
        file.write_text(json.dumps(old))
    assert not any("1560" in note for note in remarks(find(read(tmp_path))))
