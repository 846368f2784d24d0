"""What a run remarks on its threshold: each situation and the sentences said in it."""

from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch import nn

from runner import GradientClipping, Trainer
from runner.config.modes import info_of
from runner.optim.effects import Effect, effect_of
from runner.telemetry.guidance import Setting, remarks, sentences
from tests.train.test_trainer import parts

ADAM = Effect("AdamW", "normalized")
TINY = Effect("AdamW", "normalized", floor=True)
LION = Effect("Lion", "sign")
MUON = Effect("Muon", "orthogonalized")
BESIDE_MUON = Effect("AdamW", "normalized", left_out="Muon")
MUON_TOO = Effect("Muon with AdamW", "normalized")
TINY_MUON = Effect("Muon", "orthogonalized", floor=True)
RPROP = Effect("Rprop", "sign only")
CALIBRATE = (
    "python -m runner calibrate with the same overrides shows which threshold clips how large a "
    "share of the "
)
UNSTABLE = (
    "To clip spikes alone, raise clip.threshold to about 1.25, the 90th percentile of ‖G‖, and "
    "lower optimizer.lr if training then becomes unstable."
)
SPIKES = "To clip spikes alone, raise clip.threshold to about 1.25, the 90th percentile of ‖G‖."


def summary(ratio=0.2, nonfinite=0, fraction=None, steps=300, loss=0.5):
    peak = {"p50": 0.5, "p90": 1.25, "p95": 2.0, "p99": 3.0, "max": 3.2, "mean": 0.6}
    return {
        "steps": steps,
        "grad/nonfinite": nonfinite,
        "clip/ratio_total": ratio,
        "clip/fraction": ratio if fraction is None else fraction,
        "clip/peak": peak,
        "final": {"train/loss": loss},
    }


def texts(found, setting):
    return [remark.text for remark in remarks(found, setting)]


SITUATIONS = {
    "clips now and then": (summary(0.2), Setting(info_of("norm"), 1.0), []),
    "clips now and then, Adam": (summary(0.2), Setting(info_of("norm"), 1.0, effect=ADAM), []),
    "clips half": (summary(0.5), Setting(info_of("norm"), 1.0), []),
    "no clipping": (summary(0.0), Setting(info_of("none"), None), []),
    "no clipping, one step": (summary(0.0, steps=1), Setting(info_of("none"), None), []),
    "never": (
        summary(0.0),
        Setting(info_of("norm"), 10.0),
        [
            "The threshold 10 clipped nothing: the largest ‖G‖ was 3.2. To clip the largest tenth "
            "of the steps, set clip.threshold to about 1.25, the 90th percentile of ‖G‖."
        ],
    ),
    "never, elements": (
        summary(0.0),
        Setting(info_of("value"), 10.0),
        [
            "The threshold 10 clipped nothing: the largest gradient element was 3.2. "
            f"{CALIBRATE}elements."
        ],
    ),
    "never, units": (
        summary(0.0),
        Setting(info_of("adaptive"), 10.0),
        [
            "The threshold 10 clipped nothing: the largest ‖G_u‖/‖W_u‖ of a unit was 3.2. "
            f"{CALIBRATE}units."
        ],
    ),
    "most steps, SGD": (
        summary(0.62),
        Setting(info_of("norm"), 0.1),
        [
            "The threshold 0.1 clipped 62 % of the steps. A threshold that clips so many steps "
            f"acts like a lower learning rate, not as a limit on spikes. {UNSTABLE}"
        ],
    ),
    "every step has a few units clipped": (
        summary(1.0, fraction=0.03),
        Setting(info_of("adaptive"), 0.1),
        [],
    ),
    "every step has a few elements clipped": (
        summary(0.9, fraction=0.03),
        Setting(info_of("value"), 0.1),
        [],
    ),
    "most units, SGD": (
        summary(1.0, fraction=0.8),
        Setting(info_of("adaptive"), 0.001),
        [
            "The threshold 0.001 clipped 80 % of the units on average. It changes ordinary "
            f"gradients, not only outliers. {CALIBRATE}units."
        ],
    ),
    "most elements, SGD": (
        summary(1.0, fraction=0.8),
        Setting(info_of("value"), 0.001),
        [
            "The threshold 0.001 clipped 80 % of the elements on average. It changes ordinary "
            f"gradients, not only outliers. {CALIBRATE}elements."
        ],
    ),
    "most steps, Adam": (
        summary(0.7),
        Setting(info_of("norm"), 0.1, effect=ADAM),
        [
            "The threshold 0.1 clipped 70 % of the steps. AdamW divides by the size of earlier "
            f"gradients, so this does not make its steps smaller. {SPIKES}"
        ],
    ),
    "every step, Adam": (
        summary(0.96),
        Setting(info_of("norm"), 0.1, effect=ADAM),
        [
            "The threshold 0.1 clipped 96 % of the steps. AdamW divides by the size of earlier "
            "gradients, so this does not make its steps smaller: thresholds this low train nearly "
            f"alike. {SPIKES}"
        ],
    ),
    "every step, so low that eps matters": (
        summary(1.0),
        Setting(info_of("norm"), 1e-6, effect=TINY),
        [
            "The threshold 1e-06 clipped 100 % of the steps. eps of AdamW is not negligible for "
            "gradients this small, so clipping makes the steps smaller. A threshold that clips so "
            f"many steps acts like a lower learning rate, not as a limit on spikes. {UNSTABLE}"
        ],
    ),
    "most units, Adam": (
        summary(1.0, fraction=0.99),
        Setting(info_of("adaptive"), 0.001, effect=ADAM),
        [
            "The threshold 0.001 clipped 99 % of the units on average. AdamW divides by the size "
            "of earlier gradients, so this does not make its steps smaller. "
            f"{CALIBRATE}units."
        ],
    ),
    "every step, Lion": (
        summary(0.97),
        Setting(info_of("norm"), 0.1, effect=LION),
        [
            "The threshold 0.1 clipped 97 % of the steps. Lion steps by the sign of a mean of "
            "gradients: clipping does not make its steps smaller, it lowers the weight of clipped "
            f"gradients in that mean. {SPIKES}"
        ],
    ),
    "every step, Muon": (
        summary(1.0),
        Setting(info_of("norm"), 0.1, effect=MUON),
        [
            "The threshold 0.1 clipped 100 % of the steps. Muon orthogonalizes its updates, so "
            f"this does not make its steps smaller: thresholds this low train nearly alike. "
            f"{SPIKES}"
        ],
    ),
    "some steps, Rprop": (
        summary(0.1),
        Setting(info_of("norm"), 0.1, effect=RPROP),
        ["Clipping has no effect with Rprop: it uses the sign of each gradient element alone."],
    ),
    "one step": (
        summary(1.0, steps=1),
        Setting(info_of("norm"), 0.1),
        ["1 step is too few to tell whether the threshold suits this training."],
    ),
    "49 steps": (
        summary(0.0, steps=49),
        Setting(info_of("adaptive"), 0.1, effect=ADAM),
        ["49 steps are too few to tell whether the threshold suits this training."],
    ),
    "50 steps": (summary(0.2, steps=50), Setting(info_of("norm"), 1.0), []),
    "one step that was not finite": (
        summary(0.2, nonfinite=1),
        Setting(info_of("norm"), 1.0),
        [
            "1 of 300 steps had a gradient that was NaN or inf and was skipped; no threshold mends "
            "that: look at the learning rate, the loss and the precision."
        ],
    ),
    "steps that were not finite and were taken": (
        summary(0.2, nonfinite=3),
        Setting(info_of("none"), None, "ignore"),
        [
            "3 of 300 steps had a gradient that was NaN or inf and were taken all the same; no "
            "threshold mends that: look at the learning rate, the loss and the precision."
        ],
    ),
    "most steps, AdamW beside Muon": (
        summary(0.7),
        Setting(info_of("norm"), 0.1, effect=BESIDE_MUON),
        [
            "The threshold 0.1 clipped 70 % of the steps. The gradients of Muon are not scaled. "
            "AdamW divides by the size of earlier gradients, so this does not make its steps "
            "smaller. To clip spikes alone, raise clip.threshold to about 1.25, the 90th "
            "percentile of ‖G‖ without Muon's matrices."
        ],
    ),
    "never, AdamW beside Muon": (
        summary(0.0),
        Setting(info_of("norm"), 10.0, effect=BESIDE_MUON),
        [
            "The threshold 10 clipped nothing: the largest ‖G‖ without Muon's matrices was 3.2. To "
            "clip the largest tenth of the steps, set clip.threshold to about 1.25, the 90th "
            "percentile of ‖G‖ without Muon's matrices."
        ],
    ),
    "never, Muon alone": (
        summary(0.0) | {"clip/peak": dict.fromkeys(("p50", "p90", "max"), 0.0)},
        Setting(info_of("norm"), 1.0, effect=MUON),
        [
            "The threshold 1 clipped nothing: Muon steps all parameters, and clip.scales=auto does "
            "not scale its gradients."
        ],
    ),
    "most units, AdamW beside Muon": (
        summary(1.0, fraction=0.99),
        Setting(info_of("adaptive"), 0.001, effect=MUON_TOO),
        [
            "The threshold 0.001 clipped 99 % of the units on average. Muon with AdamW normalize "
            "the size of gradients, so this does not make their steps smaller. "
            f"{CALIBRATE}units."
        ],
    ),
    "every step, Muon's matrices too": (
        summary(1.0),
        Setting(info_of("norm"), 0.1, effect=MUON_TOO),
        [
            "The threshold 0.1 clipped 100 % of the steps. Muon with AdamW normalize the size of "
            "gradients, so this does not make their steps smaller: thresholds this low train "
            f"nearly alike. {SPIKES}"
        ],
    ),
    "every step, so low that Muon's constant matters": (
        summary(1.0),
        Setting(info_of("norm"), 1e-9, effect=TINY_MUON),
        [
            "The threshold 1e-09 clipped 100 % of the steps. eps of Muon is not negligible for "
            "gradients this small, so clipping makes the steps smaller. clip.scales=auto does not "
            "scale the gradients of Muon. A threshold that clips so many steps acts like a lower "
            f"learning rate, not as a limit on spikes. {UNSTABLE}"
        ],
    ),
    "steps that searched the loss scale": (
        summary(0.2, nonfinite=3),
        Setting(info_of("norm"), 1.0, searches=3),
        [],
    ),
    "all but some steps were skipped": (
        summary(0.02, nonfinite=280),
        Setting(info_of("norm"), 0.1),
        [
            "280 of 300 steps had a gradient that was NaN or inf and were skipped; no threshold "
            "mends that: look at the learning rate, the loss and the precision.",
            "20 steps are too few to tell whether the threshold suits this training.",
        ],
    ),
    "the loss is lost": (
        summary(0.9, nonfinite=3, loss=float("nan")),
        Setting(info_of("norm"), 0.1),
        [
            "3 of 300 steps had a gradient that was NaN or inf and were skipped; no threshold "
            "mends that: look at the learning rate, the loss and the precision."
        ],
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_and_what_is_said_in_it(name):
    found, setting, said = SITUATIONS[name]
    assert texts(found, setting) == said


def test_a_largest_unit_or_element_is_never_a_recommendation():
    """Quantiles of the largest unit of each step say nothing about the units."""
    for mode in ("value", "adaptive"):
        for ratio, fraction in ((0.0, 0.0), (1.0, 0.9)):
            for effect in (ADAM, LION, MUON, Setting(info_of("norm"), 1.0).effect):
                [said] = texts(
                    summary(ratio, fraction=fraction), Setting(info_of(mode), 0.1, effect=effect)
                )
                assert "1.25" not in said
                assert "optimizer.lr" not in said


def test_a_run_without_a_finite_gradient():
    empty = summary(0.0, nonfinite=300) | {"clip/peak": {}}
    assert len(texts(empty, Setting(info_of("norm"), 1.0))) == 1


@pytest.mark.parametrize(
    ("swept", "count"),
    [((), 1), (("seed", "clip"), 1), (("optimizer.lr",), 0), (("seed", "clip.threshold"), 0)],
)
def test_a_run_leaves_to_its_sweep_what_that_varies(swept, count):
    found = [asdict(one) for one in remarks(summary(0.9), Setting(info_of("norm"), 0.1))]
    assert len(sentences(found, swept)) == count
    bad = [asdict(one) for one in remarks(summary(0.2, nonfinite=1), Setting(info_of("norm"), 0.1))]
    assert len(sentences(bad, swept)) == 1


def named(name, **defaults):
    """An optimizer of another library: all that is known of it is its name and its options."""

    class Made(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, **defaults})

    Made.__name__ = name
    return Made


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "plain"),
        (torch.optim.Adam, {}, "normalized"),
        (torch.optim.AdamW, {}, "normalized"),
        (torch.optim.NAdam, {}, "normalized"),
        (torch.optim.RMSprop, {}, "normalized"),
        (torch.optim.RMSprop, {"eps": 1.0}, "normalized, floor"),
        (torch.optim.Adagrad, {}, "normalized"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, "normalized, floor"),
        (torch.optim.Adafactor, {}, "normalized"),
        (torch.optim.Adafactor, {"eps": (1e-3, 1e-3)}, "normalized, floor"),
        (torch.optim.Rprop, {}, "sign only"),
        (torch.optim.Muon, {}, "orthogonalized"),
        (torch.optim.Muon, {"eps": 1.0}, "orthogonalized, floor"),
        (named("Adafactor", eps=(1e-30, 1e-3)), {}, "normalized"),
        (named("Lamb"), {}, "normalized"),
        (named("PagedAdamW8bit", eps=1e-8), {}, "normalized"),
        (named("Lion", betas=(0.9, 0.99)), {}, "sign"),
        (named("Lion8bit"), {}, "sign"),
        (named("Signum", momentum=0.9), {}, "sign"),
        (named("Signum", momentum=0.0), {}, "sign only"),
        (named("SignSGD", momentum=0), {}, "sign only"),
        (named("SignSGD"), {}, "sign"),
        (named("MuonWithAuxAdam"), {}, "orthogonalized"),
        (named("Unknown"), {}, "plain"),
    ],
)
def test_optimizers(kind, options, expected):
    made = kind([nn.Parameter(torch.zeros(4, 4))], **options)
    effect = effect_of([made], 0.25, 10_000)
    assert effect.name == kind.__name__
    assert effect.kind + (", floor" if effect.floor else "") == expected
    assert effect.scales == (expected == "plain" or effect.floor)
    assert not effect_of([made], None, 10_000).floor


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((torch.optim.Muon, torch.optim.AdamW), ("Muon with AdamW", "normalized")),
        ((torch.optim.AdamW, torch.optim.AdamW), ("AdamW", "normalized")),
        ((torch.optim.Muon, torch.optim.SGD), ("SGD", "plain")),
    ],
)
def test_optimizers_that_step_together(kinds, expected):
    made = [kind([nn.Parameter(torch.zeros(4, 4))]) for kind in kinds]
    effect = effect_of(made, 0.25, 10_000)
    assert (effect.name, effect.kind) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((torch.optim.Muon, torch.optim.AdamW), Effect("AdamW", "normalized", left_out="Muon")),
        ((torch.optim.Muon, torch.optim.SGD), Effect("SGD", "plain", left_out="Muon")),
        ((torch.optim.AdamW,), Effect("AdamW", "normalized")),
        ((torch.optim.Muon,), Effect("Muon", "orthogonalized")),
    ],
)
def test_what_a_coefficient_does_where_it_leaves_matrices_out(kinds, expected):
    made = [kind([nn.Parameter(torch.zeros(4, 4))]) for kind in kinds]
    assert effect_of(made, 0.25, 10_000, leaves_out=True) == expected


def test_the_least_divisor_of_adafactor():
    made = [torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 4))])]
    least = torch.finfo(torch.float32).eps
    assert not effect_of(made, 4 * 20 * least, 16).floor
    assert effect_of(made, 4 * 5 * least, 16).floor


def steps_of(optimizer, factor):
    """The parameter's path under gradients of a fixed seed, all multiplied by ``factor``."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    made = optimizer([parameter])
    for _ in range(10):
        parameter.grad = torch.randn(4, 4, dtype=torch.float64) * factor
        made.step()
    return parameter.detach()


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adafactor,
        partial(torch.optim.Adafactor, eps=(1.0, 1e-3)),
        torch.optim.Rprop,
        torch.optim.Muon,
    ],
)
def test_what_is_said_of_an_optimizer_is_what_it_does(optimizer):
    """Half the gradient makes half the step, or the same step, as :class:`Effect` says."""
    effect = effect_of([optimizer([nn.Parameter(torch.zeros(4, 4))])], 1.0, 16)
    same = torch.allclose(steps_of(optimizer, 1.0), steps_of(optimizer, 0.5), rtol=1e-5)
    assert same != effect.scales


def test_the_metrics_of_a_real_run_are_read():
    model, loader = parts()
    found = Trainer(model, loader, "10ep", [GradientClipping("norm", 1e-3)]).fit()
    [said] = texts(found, Setting(info_of("norm"), 1e-3))
    assert "100 % of the steps" in said
    assert texts(Trainer(model, []).state.meter.summary(), Setting(info_of("norm"), 1.0)) == []


def test_a_sign_optimizer_is_never_told_to_change_its_threshold():
    for ratio in (0.0, 0.6):
        found = remarks(summary(ratio), Setting(info_of("norm"), 1000.0, effect=RPROP))
        assert [one.topic for one in found] == ["nothing"]
