"""What a run remarks on its threshold: each situation, and what is said, and when nothing is."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import GradientClipping, Log, Trainer
from runner.config.modes import info_of
from runner.data import TensorPairs, collate_pairs
from runner.telemetry.dominant import Leaders
from runner.telemetry.guidance import Effect, Setting, before_a_run, effect_of, remarks
from tests.train.test_trainer import parts

NORM, VALUE, UNITS = map(info_of, ("norm", "value", "adaptive"))
ADAM = Effect("AdamW", "normalized")
MUON = Effect("Muon", "orthogonalized")
BESIDE_MUON = Effect("AdamW", "normalized", left_out="Muon")
MUON_TOO = Effect("Muon with AdamW", "normalized")
LARGE_EPS = Effect("AdamW", "plain")
RPROP = Effect("Rprop", "sign only")
PEAK = {"p50": 0.5, "p90": 1.25, "p95": 2.0, "p99": 3.0, "max": 3.2, "mean": 0.6}
SPIKES = "raise clip.threshold to about 1.25, the 90th percentile"
LOWER = f"{SPIKES} of ‖G‖, and lower optimizer.lr"
NO_MATRICES = "‖G‖ without Muon's matrices"


LED = {"name": "head.weight", "share": 0.94, "leads": 41, "steps": 44}
OFTEN = LED | {"leads": 80, "steps": 99}
SELDOM = LED | {"leads": 20}


def case(
    topic=None,
    *texts,
    top=(),
    ratio=0.2,
    nonfinite=0,
    fraction=None,
    steps=300,
    loss=0.5,
    **settings,
):
    """A situation, and the topic and parts of what is remarked, if anything is."""
    summary = {"steps": steps, "grad/nonfinite": nonfinite, "clip/ratio_total": ratio}
    summary |= {"clip/fraction": ratio if fraction is None else fraction}
    summary |= {"grad/top": {"norm_type": 2.0, **dict(top)}}
    summary |= {"clip/peak": settings.pop("peak", PEAK), "final": {"train/loss": loss}}
    settings |= {"nonfinite": "ignore"} if settings.pop("taken", False) else {}
    return summary, Setting(**{"mode": NORM, "threshold": 0.1} | settings), topic, texts


MUCH = {"ratio": 1.0, "fraction": 0.8}
ZERO = {"ratio": 0.0, "peak": dict.fromkeys(("p50", "p90", "max"), 0.0)}


@pytest.mark.parametrize(
    ("summary", "how", "topic", "texts"),
    [
        case("outliers", "20 % of the steps", "‖G‖ was 32 times", "limits outliers"),
        case("outliers", "5 % of the steps", "limits spikes", ratio=0.05),
        case(mode=UNITS, ratio=1.0, fraction=0.03),
        case(mode=VALUE, ratio=0.9, fraction=0.03),
        case("outliers", steps=50),
        # The threshold clipped nothing.
        case("never", "gradient element was 3.2", "calibrate", mode=VALUE, ratio=0.0),
        case("never", "of a unit was 3.2", "of the units", mode=UNITS, ratio=0.0),
        case("never", f"{NO_MATRICES} was 3.2", effect=BESIDE_MUON, ratio=0.0),
        case("never", "Muon steps all parameters", "clip.scales=auto", effect=MUON, **ZERO),
        # It clipped most.
        case("limits", "80 % of the units", "calibrate", mode=UNITS, **MUCH),
        case("limits", "80 % of the elements", "calibrate", mode=VALUE, **MUCH),
        case("limits", LOWER, effect=LARGE_EPS, ratio=1.0),
        case("cancels", "96 %", SPIKES, effect=ADAM, ratio=0.96),
        case("cancels", "Muon normalizes", effect=MUON, ratio=1.0),
        case("cancels", NO_MATRICES, effect=BESIDE_MUON, ratio=0.7),
        case("cancels", "normalizes", mode=UNITS, effect=MUON_TOO, **MUCH),
        case("nothing", "Rprop", effect=RPROP, ratio=0.0),
        # Too few steps, or steps that are not finite.
        case("few", "49 steps are too few", ratio=1.0, steps=49),
        case("nonfinite", "300 of 300", nonfinite=300, peak={}),
        case("nonfinite", "were taken all the same", nonfinite=3, threshold=None, taken=True),
        case("nonfinite", "3 of 300", nonfinite=3, ratio=0.9, loss=float("nan")),
        case(nonfinite=3, searches=3, mode=UNITS),
        # A parameter makes most of the norm.
        case(
            "cause",
            "head.weight makes 94 % of ‖G‖² in 41 of 44 steps",
            top={"spikes": LED},
            mode=UNITS,
        ),
        case("cause", "in 80 of 99 clipped", top={"clipped": OFTEN}, mode=UNITS),
        case(mode=UNITS, top={"spikes": SELDOM, "clipped": LED | {"share": 0.4}}),
    ],
)
def test_each_situation_gets_its_remark(summary, how, topic, texts):
    advice = remarks(summary, how)
    assert [remark.topic for remark in advice] == ([] if topic is None else [topic])
    for remark in advice:
        assert [text for text in texts if text not in remark.text] == [], remark.text
        if how.mode.parts:  # quantiles of the largest unit say nothing about the units
            assert "1.25" not in remark.text
            assert "optimizer.lr" not in remark.text


def optimizers_of(*kinds):
    return [kind([nn.Parameter(torch.zeros(4, 4))]) for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "leaves_out", "expected"),
    [
        ("Muon AdamW", False, MUON_TOO),
        ("AdamW AdamW", False, ADAM),
        ("Muon SGD", False, Effect("SGD", "plain")),
        ("Muon AdamW", True, BESIDE_MUON),
        ("Muon SGD", True, Effect("SGD", "plain", left_out="Muon")),
        ("AdamW", True, ADAM),
        ("Muon", True, MUON),
    ],
)
def test_optimizers_that_step_together(kinds, leaves_out, expected):
    optimizers = optimizers_of(*(getattr(torch.optim, kind) for kind in kinds.split()))
    assert effect_of(optimizers, 0.25, 10_000, leaves_out=leaves_out) == expected


def steps_of(optimizer, factor):
    """The parameter's path under gradients of a fixed seed, all multiplied by ``factor``."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    stepped = optimizer([parameter])
    for _ in range(10):
        parameter.grad = torch.randn(4, 4, dtype=torch.float64) * factor
        stepped.step()
    return parameter.detach()


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("SGD", {"lr": 0.1}, "plain"),
        *((name, {}, "normalized") for name in ("Adam", "AdamW", "NAdam", "RMSprop", "Adagrad")),
        ("RMSprop", {"eps": 1.0}, "plain"),
        ("Adagrad", {"initial_accumulator_value": 0.1}, "plain"),
        ("Adafactor", {}, "normalized"),
        ("Adafactor", {"eps": (1.0, 1e-3)}, "plain"),
        ("Rprop", {}, "sign only"),
        ("Muon", {}, "orthogonalized"),
        ("Muon", {"eps": 1.0}, "plain"),
    ],
)
def test_what_is_said_of_an_optimizer_is_what_it_does(name, options, kind):
    """Half the gradient makes half the step, or the same step, as :class:`Effect` says."""
    optimizer = partial(getattr(torch.optim, name), **options)
    effect = effect_of(optimizers_of(optimizer), 1.0, 16, leaves_out=False)
    assert effect.kind == kind
    same = torch.allclose(steps_of(optimizer, 1.0), steps_of(optimizer, 0.5), rtol=1e-5)
    assert same != (kind == "plain")


def test_the_metrics_of_a_real_run_are_read():
    model, loader = parts()
    log = Log(top=3)
    summary = Trainer(model, loader, "10ep", [GradientClipping("norm", 1e-3)], log=log).fit()
    said = {remark.topic: remark.text for remark in remarks(summary, Setting(NORM, 1e-3))}
    assert "100 % of the steps" in said["limits"]
    assert "of ‖G‖² in 50 of 50 clipped steps" in said["cause"]
    assert remarks(Trainer(model, []).state.meter.summary(), Setting(NORM, 0.1)) == []


CALM = [1.0] * 90 + [2.0] * 10


@pytest.mark.parametrize(
    ("norms", "effect", "text"),
    [
        (CALM, Effect(), "safeguard here: none of 100 steps is a spike (the largest ‖G‖ is 2"),
        (CALM, Effect(), "acts like a lower learning rate"),
        (CALM, ADAM, "AdamW normalizes its updates: clipping does not make them smaller"),
        (CALM, Effect("Lion", "sign"), "Lion steps by signs"),
        (CALM, RPROP, "does not matter here: Rprop"),
        ([*CALM, 50.0], ADAM, "matters here: 1 of 101 steps is above 5 times the median, and the"),
        (CALM + [50.0] * 12, ADAM, "changes its size: 12 of 112 steps are above 5 times"),
        (CALM[:49], ADAM, "49 steps are too few to tell"),
        ([0.0] * 60, ADAM, "gradients of zero do not tell"),
        ([float("nan")] * 60, ADAM, "0 steps are too few to tell"),
    ],
)
def test_norms_without_clipping_tell_whether_it_matters(norms, effect, text):
    assert text in before_a_run(norms, effect)


@pytest.mark.parametrize(("high", "is_spike"), [(10, True), (11, False)])
def test_norms_above_the_median_are_spikes_only_while_they_are_few(high, is_spike):
    leaders = Leaders()
    norms = [10.0] * high + [1.0] * (100 - high)
    for _ in norms:
        leaders.add({"head.weight": 0.9}, clipped=True)
    facts = leaders.facts(norms)
    assert facts["clipped"]["steps"] == 100
    assert ("spikes" in facts) == is_spike


def verdict(threshold, optimizer=torch.optim.SGD, steps=200, spikes=(), clips=True):
    """Train on noise, with a gradient that some steps make a hundred times as large."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8 * steps, 4, generator=generator)
    for step in spikes:
        inputs[8 * (step - 1) : 8 * step] *= 100.0
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorPairs(inputs, torch.ones(8 * steps, 1)), 8, collate_fn=collate_pairs)
    made = optimizer(model.parameters(), lr=1e-4)
    algorithms = [GradientClipping("norm", threshold)] if clips else []
    options = {"optimizers": made, "criterion": nn.MSELoss(), "log": Log(bar=False)}
    summary = Trainer(model, loader, "1ep", algorithms, **options).fit()
    effect = effect_of([made], threshold, 5, leaves_out=False)
    return remarks(summary, Setting(NORM, threshold, effect=effect)), [*model.parameters()]


@pytest.mark.parametrize(
    ("options", "topic", "text"),
    [
        ({"threshold": 1e4}, "never", "clip=none takes the same steps"),
        ({"threshold": 1e-3}, "limits", "acts like a lower learning rate"),
        ({"threshold": 1e-3, "optimizer": torch.optim.AdamW}, "cancels", "does not make the steps"),
        ({"threshold": 10.0, "spikes": (60, 150)}, "outliers", "clipped 1 % of the steps"),
        ({"threshold": 10.0, "spikes": (60, 150)}, "outliers", "It limits spikes"),
        ({"threshold": 1e-3, "steps": 49}, "few", "too few to tell"),
    ],
)
def test_the_verdict_is_that_which_a_run_was_made_for(options, topic, text):
    [remark], _ = verdict(**options)
    assert remark.topic == topic
    assert text in remark.text


def test_a_run_that_clips_nothing_is_the_run_without_clipping_to_the_bit():
    ours = verdict(1e4)[1]
    expected = verdict(1e4, clips=False)[1]
    assert all(map(torch.equal, ours, expected))
