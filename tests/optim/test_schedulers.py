"""The learning rate of each step, against the formula of each schedule."""

import math

import pytest
import torch

from runner.optim.schedulers import (
    CosineAnnealingLR,
    LinearWarmupCosineLR,
    LinearWarmupLR,
    LinearWarmupPolynomialLR,
    PlateauLR,
    StaircaseLR,
    WarmupStableDecayLR,
)
from tests.clip.reference import refused

RATE = 0.5
LINE = {"warmup_fraction": 0.1, "power": 1.0}


def optimizer_and_schedule(kind, steps, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    return optimizer, kind(optimizer, steps, **options)


def rates(kind, steps, taken=None, **options):
    """Return the share of the rate in each step, and after step ``taken`` also both objects."""
    optimizer, schedule = optimizer_and_schedule(kind, steps, **options)
    shares = []
    for _ in range(taken or steps):
        shares.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        schedule.step()
    return (shares, optimizer, schedule) if taken else shares


def test_a_line_to_zero_follows_a_warm_up_in_steps():
    shares = rates(LinearWarmupLR, 10, warmup_steps=4)
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_a_line_to_zero_needs_no_warm_up():
    assert rates(LinearWarmupLR, 4) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_a_warm_up_as_long_as_the_run_is_refused():
    refused(ValueError, "[0, 4), not 4", rates, LinearWarmupLR, 4, warmup_steps=4)


@pytest.mark.parametrize("power", [None, 0.0, 0.5, 2.0])
def test_after_a_line_to_the_optimizers_rate_it_is_a_cosine_or_a_power_of_what_is_left(power):
    kind = LinearWarmupCosineLR if power is None else LinearWarmupPolynomialLR
    options = {"warmup_fraction": 0.2} | ({} if power is None else {"power": power})
    shares = rates(kind, 50, **options)
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    remaining = [(50 - step) / 40 for step in range(10, 50)]
    cosine = [0.5 * (1 - math.cos(math.pi * share)) for share in remaining]
    powers = [share ** (power or 0.0) for share in remaining]
    assert shares[10:] == pytest.approx(cosine if power is None else powers)
    if power is not None:
        after, *_ = rates(kind, 3, 5, warmup_fraction=0.0, power=power)
        assert after[4] == (power == 0)


@pytest.mark.parametrize("steps", [1, 7, 20, 300])
def test_a_staircase_ends_on_its_last_stair_however_short_the_run(steps):
    shares = rates(StaircaseLR, steps, stairs=5, factor=0.5)
    assert shares == [0.5 ** math.floor(5 * step / steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (LinearWarmupPolynomialLR, "warmup_fraction", (1.0, -0.1)),
        (LinearWarmupPolynomialLR, "power", (-1.0, math.nan)),
        (StaircaseLR, "stairs", (0,)),
        (StaircaseLR, "factor", (0.0, 1.1)),
    ],
)
def test_numbers_out_of_range_are_refused(kind, name, values):
    right = LINE if kind is LinearWarmupPolynomialLR else {"stairs": 2, "factor": 0.9}
    for value in values:
        refused(ValueError, name, optimizer_and_schedule, kind, 10, **right | {name: value})


@pytest.mark.parametrize("longer", [100, 200])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LinearWarmupCosineLR, {"warmup_fraction": 0.1}),
        (LinearWarmupPolynomialLR, LINE),
        (StaircaseLR, {"stairs": 5, "factor": 0.5}),
        (CosineAnnealingLR, {}),
    ],
)
def test_a_schedule_that_continues_over_more_steps_has_its_rate_at_once(kind, options, longer):
    _, before, schedule = rates(kind, 100, 60, **options)
    later, continued = optimizer_and_schedule(kind, longer, **options)
    later.load_state_dict(before.state_dict())
    continued.load_state_dict(schedule.state_dict())
    for factor in rates(kind, longer, **options)[60:]:
        assert later.param_groups[0]["lr"] == pytest.approx(factor * RATE, rel=1e-9)
        assert continued.get_last_lr() == [later.param_groups[0]["lr"]]
        later.step()
        continued.step()


@pytest.mark.parametrize(
    ("shape", "falls"),
    [
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("sqrt", [1, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
    ],
)
def test_a_rate_rises_stays_and_falls(shape, falls):
    options = {"warmup_steps": 2, "decay_fraction": 0.4, "shape": shape}
    shares = rates(WarmupStableDecayLR, 10, **options)
    assert shares == pytest.approx([0.5, 1, 1, 1, 1, 1, *falls])


def test_phases_that_are_longer_than_the_run_are_refused():
    options = {"warmup_steps": 5, "decay_fraction": 0.6}
    refused(ValueError, "longer than the run, 10 steps", rates, WarmupStableDecayLR, 10, **options)


@pytest.mark.parametrize("kind", [LinearWarmupCosineLR, LinearWarmupPolynomialLR])
def test_a_warm_up_in_steps_is_one_of_the_same_share(kind):
    assert rates(kind, 20, warmup_steps=4) == rates(kind, 20, warmup_fraction=0.2)


def test_a_plateau_is_that_of_torch():
    losses = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0, 1.5, 1.6, 1.7]
    shares = []
    for kind in (PlateauLR, torch.optim.lr_scheduler.ReduceLROnPlateau):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
        schedule = kind(optimizer, patience=1, factor=0.5)
        of_kind = []
        for loss in losses:
            schedule.step(loss)
            of_kind.append(optimizer.param_groups[0]["lr"])
        shares.append(of_kind)
    assert shares[0] == shares[1]
    assert shares[0][-1] < RATE
