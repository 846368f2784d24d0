"""Mode ``schedule``: λ of each step, and the mode that clips by it."""

import math

import pytest
import torch
from torch import nn

from runner.clip import Layout, build
from runner.clip.tally import Tally
from tests.clip.sequences import NAN, SEQUENCES, STEPS, clipped, recorded
from tests.mode_names import LISTED

LR = "torch.optim.lr_scheduler."
OPTIONS = [
    {"warmup_steps": 100},
    {"warmup_steps": 100, "warmup_factor": 4.0, "warmup": "linear", "decay": "linear", "steps": 90},
    {"warmup_steps": 0, "decay": "cosine", "steps": 400, "end_factor": 0.25},
    {"warmup_steps": 0},
]
SHAPES = [
    {"_target_": LR + "ExponentialLR", "gamma": 0.99},
    {"_target_": LR + "OneCycleLR", "max_lr": 3.0, "total_steps": 501},
    {"_target_": LR + "CosineAnnealingWarmRestarts", "T_0": 40, "eta_min": 0.1},
]


def ids(options):
    return " ".join(str(value).rpartition(".")[2] for value in options.values())


def reference(base, step, warmup_steps, **rest):
    """λ of a step, counted from 0."""
    end, length = rest.get("end_factor", 0.1), rest.get("steps")
    if step < warmup_steps:
        factor = rest.get("warmup_factor", 10.0)
        if rest.get("warmup") == "linear":
            factor -= (factor - 1) * step / warmup_steps
        return base * factor
    if length is None:
        return base
    at = min(1.0, (step - warmup_steps) / length)
    if rest["decay"] == "linear":
        return base * (1 - at * (1 - end))
    return base * (end + (1 - end) * math.cos(math.pi * at / 2) ** 2)


def rates(shape, base):
    """What torch makes of a learning rate over the steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=base)
    arguments = {name: value for name, value in shape.items() if name != "_target_"}
    kind = getattr(torch.optim.lr_scheduler, shape["_target_"].rpartition(".")[2])
    scheduler = kind(optimizer, **arguments)
    for _ in range(STEPS):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["recorded", "spikes", "zeros"])
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_every_step_has_the_threshold_of_its_number(name, options):
    """Also of steps that are not finite, which count."""
    norms = recorded() if name == "recorded" else SEQUENCES[name]
    found = clipped(build("schedule", threshold=0.8, **options), norms)
    for number, (norm, (after, *rest)) in enumerate(zip(norms, found, strict=True)):
        limit = reference(0.8, number, **options)
        assert rest[-1] == pytest.approx(limit, rel=1e-12)
        if math.isfinite(norm):
            assert after == pytest.approx(min(norm, limit), rel=1e-12)
        else:
            assert not math.isfinite(after)


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_the_shape_of_a_scheduler_of_torch(shape):
    mode = build("schedule", threshold=0.8, warmup_steps=0, scheduler=shape)
    found = clipped(mode, SEQUENCES["spikes"])
    assert [step[-1] for step in found] == pytest.approx([*rates(shape, 0.8)], rel=1e-12)


def mode_of(**options):
    return build("schedule", threshold=0.8, **options)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("inner", [{"of": "norm"}, {"of": {"mode": "percentile", "min_steps": 3}}])
@pytest.mark.parametrize("shape", [*OPTIONS[1:3], *({"scheduler": one} for one in SHAPES)])
def test_a_resume_changes_no_bit(shape, inner, on_device):
    options = {"warmup_steps": 0} | shape | inner
    norms, at = SEQUENCES["spikes"][:60], 35
    whole = clipped(mode_of(**options), norms, on_device)
    mode, again = mode_of(**options), mode_of(**options)
    clipped(mode, norms[:at], on_device)
    again.load_state_dict(mode.state_dict())
    for one, other in zip(whole[at:], clipped(again, norms[at:], on_device), strict=True):
        assert other[1:] == pytest.approx(one[1:], rel=0, abs=0, nan_ok=True)


def test_a_threshold_that_is_changed_counts_from_the_next_step():
    shape = {"_target_": LR + "ExponentialLR", "gamma": 0.5}
    for options, factors in (
        ({"scheduler": shape}, [1, 0.5, 0.25, 0.125]),
        ({"decay": "linear", "steps": 4, "end_factor": 1e-9}, [1, 0.75, 0.5, 0.25]),
    ):
        mode = mode_of(warmup_steps=0, **options)
        first = clipped(mode, [100.0, 100.0])
        mode.threshold = 8.0
        found = [step[0] for step in first + clipped(mode, [100.0, 100.0])]
        wanted = [base * factor for base, factor in zip((0.8, 0.8, 8, 8), factors, strict=True)]
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("of", "threshold"),
    [("value", 0.02), ("adaptive", 0.05), ({"mode": "adaptive", "eps": 0.5}, 0.05)],
)
def test_modes_with_parts_clip_and_count_by_the_threshold_of_the_step(of, threshold):
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4)) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    layouts = [Layout.of_model(model) for model in made]
    name, options = (of, {}) if isinstance(of, str) else (of["mode"], {"eps": of["eps"]})
    schedule = build(
        "schedule", threshold=threshold, of=of, warmup_steps=2, warmup_factor=3.0, warmup="linear"
    )
    schedule.bind(layouts[0])
    schedule.tally = Tally()
    for factor in (3, 2, 1):
        for first, second in zip(made[0].parameters(), made[1].parameters(), strict=True):
            first.grad = torch.randn_like(first)
            second.grad = first.grad.clone()
        plain = build(name, threshold=factor * threshold, **options)
        plain.bind(layouts[1])
        one, other = schedule.clip(layouts[0]), plain.clip(layouts[1])
        assert one.metrics == pytest.approx(other.metrics, rel=1e-12)
        assert other.clipped == 1
        for first, second in zip(made[0].parameters(), made[1].parameters(), strict=True):
            assert torch.equal(first.grad, second.grad)
    assert schedule.tally.gather(layouts[0])[1] == 3 * total(made, name)


def total(made, name):
    """Elements, or units but for those of the head's weight."""
    if name == "value":
        return sum(parameter.numel() for parameter in made[0].parameters())
    return 30 + 2


def test_a_threshold_that_reaches_zero_ends_the_run():
    shape = {"_target_": LR + "LinearLR", "start_factor": 1.0, "end_factor": 0.0, "total_iters": 2}
    mode = mode_of(warmup_steps=0, scheduler=shape)
    clipped(mode, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"gives a threshold of 0 in step 3: it has to stay above"):
        clipped(mode, [1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": "nrom"}, f"of.mode must be one of {LISTED}; did you mean norm?"),
        (
            {"of": {"mode": "adaptive", "eps": -1.0}},
            "of.eps must be a finite number greater than 0",
        ),
        (
            {"of": {"mode": "norm", "threshold": 2.0}},
            "of.threshold is that of the mode around it: set clip.threshold",
        ),
        (
            {"of": "spike"},
            "of.mode limits what the optimizer does, so it is no part of another mode: "
            "use clip=spike",
        ),
        ({"decay": "linear"}, "steps clip.decay=linear needs the number of its steps"),
        ({"of": "schedule"}, "of has no threshold of its own that a schedule could set"),
        (
            {"scheduler": SHAPES[0]},
            "scheduler takes the place of clip.warmup_steps (use 0) and clip.decay",
        ),
        (
            {"warmup_steps": 0, "scheduler": {"_target_": LR + "ReduceLROnPlateau"}},
            "cannot be made: TypeError: missing a required argument: 'metrics'",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        mode_of(**options)
    assert str(raised.value) == message


def test_a_constant_schedule_is_the_mode_itself():
    norms = [*SEQUENCES["usual"][:50], NAN, *SEQUENCES["usual"][50:60]]
    plain = clipped(build("zscore", threshold=2.5), norms)
    found = clipped(build("schedule", threshold=2.5, of="zscore", warmup_steps=0), norms)
    for one, other in zip(plain, found, strict=True):
        assert other == pytest.approx(one, rel=0, abs=0, nan_ok=True)
