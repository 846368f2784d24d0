"""Histograms of elements and units, against sorted values and over ranks."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from runner.calibrate.distribution import Histogram
from runner.clip import GradStats, Layout, apply_gradient_clipping, build
from runner.clip.tally import HIGHEST, LOWEST, PER_DECADE, Tally
from tests.distributed.cases import Case, trainer
from tests.on_device import Waits, kept_on_device
from tests.ranks import run_ranks

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


def tallied(mode: str, steps: int = 1, skip: int = 0) -> Histogram:
    made = model()
    layout = Layout.of_model(made)
    clipper = build(mode, threshold=1e30)
    clipper.bind(layout)
    tally = clipper.tally = Tally(skip)
    for _ in range(steps):
        clipper.clip(layout)
    return histogram(tally, layout)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_the_share_above_a_threshold_is_the_fraction_that_it_clips(mode, factor):
    threshold = MODES[mode] * factor
    observed = apply_gradient_clipping(model(), mode, threshold).fraction
    assert tallied(mode).share_above(threshold) == pytest.approx(observed, abs=0.01)


def test_quantiles_are_those_of_the_elements_that_are_not_zero():
    found = tallied("value")
    values = torch.cat([p.grad.abs().flatten() for p in model().parameters()]).double().numpy()
    assert found.total == len(values)
    assert found.nonzero == np.count_nonzero(values)
    for share in (0.5, 0.1, 0.01):
        wanted = np.quantile(values[values > 0], 1 - share)
        assert found.largest(share) == pytest.approx(wanted, rel=0.05)


def test_units_of_zero_gradient_count_as_units_and_not_for_quantiles():
    found = tallied("adaptive")
    assert found.total - found.nonzero == 90
    # The head is left out; a bias is one unit.
    assert found.total == 100 + 30 + 4 + 3


def test_first_steps_are_left_out():
    assert tallied("value", steps=3, skip=2).total == tallied("value").total
    assert tallied("value", steps=2, skip=2).total == 0
    assert math.isnan(tallied("value", steps=2, skip=2).largest(0.5))


def test_steps_that_are_not_finite_count_nothing():
    """Modes see them on accelerators alone, where the host does not decide."""
    tally = Tally()
    tally.add(torch.tensor([1.0, math.nan, math.inf]), 1.0)
    tally.end_step(torch.tensor(math.nan))
    tally.add(torch.tensor([1.0, 0.0]), 0.5)
    tally.end_step(torch.tensor(1.0))
    found = histogram(tally, Layout([]))
    assert (found.total, found.nonzero) == (1.0, 0.5)


@pytest.mark.parametrize("mode", list(MODES))
def test_an_accelerator_counts_the_same_and_is_never_waited_for(mode):
    wanted = tallied(mode)
    made = model()
    layout = Layout.of_model(made)
    clipper = build(mode, threshold=1e30)
    clipper.bind(layout)
    tally = clipper.tally = Tally()
    with kept_on_device():
        stats = GradStats.of(layout)
        with Waits() as waits:
            clipper.clip(layout, stats)
    assert waits.found == []
    assert histogram(tally, layout) == wanted


def test_counting_changes_no_gradient():
    for mode, threshold in MODES.items():
        plain, looked = model(), model()
        apply_gradient_clipping(plain, mode, threshold)
        layout = Layout.of_model(looked)
        clipper = build(mode, threshold=threshold)
        clipper.bind(layout)
        clipper.tally = Tally()
        clipper.clip(layout)
        for one, other in zip(plain.parameters(), looked.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def counted(plugin: str | None, mode: str) -> tuple[list[float], float]:
    made = trainer(Case("tied", mode, steps=3), plugin)
    tally = made.state.mode.tally = Tally(skip=1)
    made.fit()
    return tally.gather(made.optimizer.layout)


def everything(plugins: tuple[str, ...]) -> dict[tuple[str, str], tuple[list[float], float]]:
    return {(plugin, mode): counted(plugin, mode) for plugin in plugins for mode in MODES}


def test_ranks_count_what_one_process_counts():
    ranks = run_ranks(everything, 2, ("ddp", "fsdp", "zero1", "tensor", "1f1b"))
    # Gradients that are zero but for rounding lie anywhere below.
    first = (-12 - LOWEST) * PER_DECADE
    alone = {mode: counted(None, mode) for mode in MODES}
    for found in ranks:
        for (plugin, mode), (counts, total) in found.items():
            wanted, all_of_it = alone[mode]
            assert total == pytest.approx(all_of_it, rel=1e-12), (plugin, mode)
            assert counts[first:] == pytest.approx(wanted[first:], abs=1e-6), (plugin, mode)
            assert sum(counts[first:]) > 0.5 * total


def test_a_tally_that_counted_nothing_has_as_many_bins():
    counted = Tally()
    counted.add(torch.tensor([0.5, 2.0]), 1.0)
    counted.end_step(1.0)
    bins, total = counted.gather(Layout([]))
    assert (sum(bins), total) == (2.0, 2.0)
    assert Tally().gather(Layout([])) == ([0.0] * len(bins), 0.0)
