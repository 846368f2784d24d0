"""What the page of a sweep says above its table: each situation and all that is said in it."""

import re
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import pytest

from runner.config.modes import info_of
from runner.optim.effects import PLAIN, Effect
from runner.report import read
from runner.report.findings import find
from runner.report.verdict import remarks
from runner.run_folder.strict_json import decode, encode
from runner.telemetry import guidance
from tests.report.examples import config, rows, write_run

RPROP = Effect("Rprop", "sign only")


class Trial(NamedTuple):
    """One finished run: its setting, the share it clipped, and its best evaluation loss."""

    threshold: float | None
    loss: float
    ratio: float = 0.3
    lr: float = 0.1
    mode: str = "norm"
    fraction: float | None = None
    seed: int = 0
    effect: Effect = PLAIN
    steps: int = 300
    diverges_at: int | None = None


def page(folder, *trials):
    """A sweep of ``trials`` with what each run remarks about itself, read back."""
    for number, one in enumerate(trials):
        taken = 20 if one.diverges_at is None else one.steps
        made = rows(one.mode, one.threshold, taken, evaluations=0, diverges_at=one.diverges_at)
        made[-1] |= {"eval/loss": one.loss}
        keys = {"clip__mode": one.mode, "clip__threshold": one.threshold, "optimizer__lr": one.lr}
        of = config(**keys, seed=one.seed)
        write_run(folder / str(number), made, of, overrides=(f"optimizer.lr={one.lr}",))
        file = folder / str(number) / "summary.json"
        summary = decode(file.read_text())
        summary |= {"steps": one.steps, "grad/nonfinite": 0}
        summary |= {"clip/ratio_total": one.ratio, "clip/fraction": one.fraction or one.ratio}
        summary |= {"clip/peak": {"p90": 1.25, "max": 3.2}}
        setting = guidance.Setting(info_of(one.mode), one.threshold, "skip", one.effect)
        summary["remarks"] = [asdict(remark) for remark in guidance.remarks(summary, setting)]
        varied = len({(one.mode, one.threshold, one.lr) for one in trials}) > 1
        swept = ("clip.threshold", "optimizer.lr") if varied else ()
        summary["guidance"] = guidance.sentences(summary["remarks"], swept)
        file.write_text(encode(summary))
    return find(read(folder))


def thresholds(*losses, **options):
    return [Trial(t, loss, **options) for t, loss in zip((0.1, 0.5, 2.0), losses, strict=False)]


def rates(*losses, threshold=0.25, **options):
    each = zip((0.02, 0.1, 0.5), losses, strict=False)
    return [Trial(threshold, loss, lr=lr, **options) for lr, loss in each]


def seeds(settings, noise=0.05, of_seed=0.0, **options):
    """Three seeds of each threshold, whose losses differ by seed and by chance."""
    random, made = np.random.default_rng(round(1000 * settings[0][1])), []
    for threshold, loss in settings:
        more = options if threshold else options | {"mode": "none"}
        for seed in range(3):
            found = loss + of_seed * seed + noise * float(random.uniform(-1, 1))
            made.append(Trial(threshold, found, seed=seed, **more))
    return made


LOWEST = "best threshold, 0.1, is the lowest tried … try 0.05 and 0.025"
HIGHEST = "best threshold, 2, is the highest tried … try 4 and clip=none"
RATE = "best optimizer.lr, 0.5, is the highest tried … try 1 and 2"
BOTH = [
    "With optimizer.lr=0.5 the best threshold, 0.25, is the lowest tried … try 0.125 and 0.0625",
    f"With clip.threshold=0.25 the {RATE}",
]
FEW = "norm 0.1 and 2 more settings: 20 steps are too few"
SIGN = "norm 0.1 and 2 more settings: Clipping has no effect with Rprop"
SPIKES = "clipped 98 % … raise clip.threshold to about 1.25 … lower optimizer.lr if"
UNITS = "best threshold of clip=adaptive, 0.1, is the lowest tried … try 0.05 and 0.025"
FULL = {"ratio": 0.98}
SLIGHT = ((0.1, 0.30), (0.5, 0.31), (2.0, 0.32))
EARLY = Trial(8.0, 0.5, diverges_at=40)
MODES = [
    *(*thresholds(0.3, 0.4), *thresholds(0.5, 0.5, mode="value", ratio=0.0)),
    *thresholds(0.1, 0.2, mode="adaptive", ratio=1.0, fraction=0.2),
]
# The runs of a sweep, and for each sentence its parts: evidence, and silence.
SITUATIONS = [
    # The best threshold or rate lies between others, or at an edge.
    (thresholds(0.3, 0.1, 0.2), []),
    (thresholds(0.1, 0.2, 0.3), [LOWEST]),
    (thresholds(0.3, 0.2, 0.1), [HIGHEST]),
    ([*thresholds(0.3, 0.2, 0.1), Trial(None, 0.2, mode="none")], []),
    (MODES, [UNITS]),
    (rates(0.3, 0.2, 0.1, **FULL), [RATE]),
    ([*rates(0.3, 0.2, 0.1, **FULL), *rates(0.5, 0.4, 0.3, threshold=1.0, **FULL)], BOTH),
    ([Trial(0.1, 0.1 + seed / 10, seed=seed, **FULL) for seed in range(3)], [SPIKES]),
    # Thresholds differ by less than their seeds, by more, or by as much in each seed.
    (seeds(SLIGHT), []),
    (seeds(SLIGHT, noise=0.0001, of_seed=0.05), [LOWEST]),
    (seeds(((0.5, 0.30), (2.0, 0.31), (None, 0.32))), []),
    # Runs diverged.
    ([*thresholds(0.2, 0.1), EARLY], []),
    # What the optimizer makes of it, and few steps.
    (thresholds(0.2, 0.2, 0.2, effect=RPROP), [SIGN]),
    (thresholds(0.1, 0.2, 0.3, steps=20, **FULL), [FEW]),
]


@pytest.mark.parametrize(("trials", "sentences"), SITUATIONS)
def test_a_situation_and_all_that_is_said_in_it(trials, sentences, tmp_path):
    found = page(tmp_path, *trials)
    said = [one.text for one in remarks(found)]
    own = [text for text in said if not re.search(r"seed|diverged", text)]
    assert len(own) == len(sentences), own
    for text, parts in zip(own, sentences, strict=True):
        assert [part for part in parts.split(" … ") if part not in text] == [], text
    assert len(said) <= 5
