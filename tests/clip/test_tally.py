"""Histograms of elements and units, against sorted values and over ranks."""

import math

import pytest
import torch
from torch import nn

from runner.clip import GradStats, Layout, apply_gradient_clipping, build
from runner.clip.mode import HIGHEST, LOWEST, Tally
from runner.tools.calibrate import Histogram
from tests.clip.reference import on, unwaited
from tests.clip.test_layout import Ranks, one_layout, shards, whole

MODES = {"value": 0.02, "adaptive": 0.05}


def model() -> nn.Module:
    """Layers of each kind; a tenth of the embedding has a gradient."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Embedding(100, 8), nn.Conv2d(2, 30, 3), nn.ConvTranspose2d(30, 4, 2), nn.Linear(5, 6)
    )
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.1
    made[0].weight.grad[10:] = 0
    return made


def histogram(tally: Tally, layout: Layout) -> Histogram:
    return Histogram(*tally.gather(layout), LOWEST, HIGHEST)


def tallied(mode: str, steps: int = 1, skip: int = 0, kept: bool = False) -> Histogram:
    layout = Layout.of_model(model())
    clipper = build(mode, threshold=1e30)
    clipper.bind(layout)
    tally = clipper.tally = Tally(skip)
    with on(kept):
        for _ in range(steps):
            stats = GradStats.of(layout)
            with unwaited(kept):
                clipper.clip(layout, stats)
    return histogram(tally, layout)


@pytest.mark.parametrize("mode", MODES)
def test_the_share_above_a_threshold_is_the_fraction_that_it_clips(mode):
    found = tallied(mode)
    assert tallied(mode, kept=True) == found
    for threshold in (0.25 * MODES[mode], MODES[mode], 4 * MODES[mode]):
        observed = apply_gradient_clipping(model(), mode, threshold).fraction
        assert found.share_above(threshold) == pytest.approx(observed, abs=0.01)


def test_first_steps_and_steps_that_are_not_finite_are_left_out():
    assert tallied("value", steps=3, skip=2).total == tallied("value").total
    assert tallied("value", steps=2, skip=2).total == 0
    assert math.isnan(tallied("value", steps=2, skip=2).largest(0.5))
    tally = Tally()
    tally.add(torch.tensor([1.0, math.nan, math.inf]), 1.0)
    tally.end_step(torch.tensor(math.nan))
    assert tally.gather(Layout([]))[1] == 0.0
    tally.add(torch.tensor([1.0, 0.0]), 0.5)
    tally.end_step(torch.tensor(1.0))
    bins, total = tally.gather(Layout([]))
    assert (sum(bins), total) == (0.5, 1.0)
    assert Tally().gather(Layout([])) == ([0.0] * len(bins), 0.0)


def tally_of(layout: Layout, mode: str) -> tuple[list[float], float]:
    clipper = build(mode, threshold=1e30, **({"exclude": ()} if mode == "adaptive" else {}))
    clipper.bind(layout)
    clipper.tally = Tally()
    clipper.clip(layout)
    return clipper.tally.gather(layout)


@pytest.mark.parametrize("mode", [*MODES, "per_parameter"])
def test_ranks_count_what_one_process_counts(mode):
    counts, total = tally_of(one_layout(whole()), mode)
    for found in Ranks(2).run(lambda ranks: tally_of(Layout(shards(whole(), ranks), ranks), mode)):
        assert found[0] == pytest.approx(counts, abs=1e-12)
        assert found[1] == pytest.approx(total, rel=1e-12)
    assert sum(counts) == pytest.approx(total)
