"""The learning rate of each step, against the formula of each schedule."""

import math

import pytest
import torch

from runner.optim.schedulers import (
    CosineAnnealingLR,
    LinearWarmupCosineLR,
    LinearWarmupLR,
    LinearWarmupPolynomialLR,
    StaircaseLR,
)

RATE = 0.5


def rates(kind, steps, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    schedule = kind(optimizer, steps, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        schedule.step()
    return found


def test_a_warm_up_in_steps_and_a_line_to_zero():
    found = rates(LinearWarmupLR, 10, warmup_steps=4)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates(LinearWarmupLR, 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    with pytest.raises(ValueError, match=r"\[0, 4\), not 4"):
        rates(LinearWarmupLR, 4, warmup_steps=4)


@pytest.mark.parametrize("kind", [LinearWarmupCosineLR, LinearWarmupPolynomialLR])
def test_the_warm_up_is_a_line_to_the_optimizers_rate(kind):
    options = {} if kind is LinearWarmupCosineLR else {"power": 1.0}
    found = rates(kind, 100, warmup_fraction=0.1, **options)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10] == pytest.approx(1.0)
    assert max(found) == pytest.approx(1.0)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_after_the_warm_up_it_is_a_power_of_what_is_left(power):
    found = rates(LinearWarmupPolynomialLR, 50, warmup_fraction=0.2, power=power)
    expected = [((50 - step) / 40) ** power for step in range(10, 50)]
    assert found[10:] == pytest.approx(expected)


def test_a_power_of_zero_is_a_constant_to_the_end():
    assert rates(LinearWarmupPolynomialLR, 7, warmup_fraction=0.0, power=0.0) == [1.0] * 7


def test_a_line_that_goes_on_past_its_end_stays_at_zero():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    schedule = LinearWarmupPolynomialLR(optimizer, 3, warmup_fraction=0.0, power=1.0)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0


def test_a_staircase_of_fifty_falls_every_two_of_a_hundred_epochs():
    found = rates(StaircaseLR, 300, stairs=50, factor=0.94)
    epochs = [step // 3 for step in range(300)]
    assert found == pytest.approx([0.94 ** (epoch // 2) for epoch in epochs])


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_a_staircase_ends_on_its_last_stair_however_short_the_run(steps):
    found = rates(StaircaseLR, steps, stairs=5, factor=0.5)
    assert found == [0.5 ** math.floor(5 * step / steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (LinearWarmupPolynomialLR, {"warmup_fraction": 1.0, "power": 1.0}, "warmup_fraction"),
        (LinearWarmupPolynomialLR, {"warmup_fraction": -0.1, "power": 1.0}, "warmup_fraction"),
        (LinearWarmupPolynomialLR, {"warmup_fraction": 0.0, "power": -1.0}, "power"),
        (LinearWarmupPolynomialLR, {"warmup_fraction": 0.0, "power": math.nan}, "power"),
        (StaircaseLR, {"stairs": 0, "factor": 0.9}, "stairs"),
        (StaircaseLR, {"stairs": 2, "factor": 0.0}, "factor"),
        (StaircaseLR, {"stairs": 2, "factor": 1.1}, "factor"),
    ],
)
def test_numbers_out_of_range_are_refused(kind, options, name):
    with pytest.raises(ValueError, match=name):
        rates(kind, 10, **options)


@pytest.mark.parametrize("kind", [LinearWarmupCosineLR, LinearWarmupPolynomialLR, StaircaseLR])
def test_a_schedule_that_continues_over_more_steps_has_its_rate_at_once(kind):
    options = {"stairs": 5, "factor": 0.5} if kind is StaircaseLR else {"warmup_fraction": 0.1}
    if kind is LinearWarmupPolynomialLR:
        options["power"] = 1.0

    def made(steps, taken=0):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
        schedule = kind(optimizer, steps, **options)
        for _ in range(taken):
            optimizer.step()
            schedule.step()
        return optimizer, schedule

    for longer in (100, 200):
        (before, schedule), (wanted, _), (later, continued) = (
            made(100, 60),
            made(longer, 60),
            made(longer),
        )
        later.load_state_dict(before.state_dict())
        continued.load_state_dict(schedule.state_dict())
        rate = wanted.param_groups[0]["lr"]
        assert later.param_groups[0]["lr"] == rate
        assert continued.get_last_lr() == [rate]
        assert longer == 100 or rate != before.param_groups[0]["lr"]


@pytest.mark.parametrize("longer", [100, 140])
def test_a_cosine_that_continues_goes_down_over_the_steps_of_its_run(longer):
    def made(steps):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
        return optimizer, CosineAnnealingLR(optimizer, steps)

    optimizer, schedule = made(100)
    for _ in range(60):
        optimizer.step()
        schedule.step()
    other, continued = made(longer)
    other.load_state_dict(optimizer.state_dict())
    continued.load_state_dict(schedule.state_dict())
    if longer == 100:
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for step in range(60, longer):
        wanted = RATE * 0.5 * (1 + math.cos(math.pi * step / longer))
        assert other.param_groups[0]["lr"] == pytest.approx(wanted)
        other.step()
        continued.step()
