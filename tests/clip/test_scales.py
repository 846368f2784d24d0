"""A coefficient that leaves gradients out (those of Muon), on the host and on an accelerator."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from runner.clip import ClipMode, GradStats, Layout, ParamShard, build, limit_norm
from runner.clip.norms import measure
from runner.clip.split import measure_split
from runner.clip.units import units_of
from tests.on_device import Waits, kept_on_device

SHAPES = {"matrix": (4, 3), "other.matrix": (3, 5), "vector": (7,), "kernel": (2, 3, 2, 2)}
MATRICES = {"matrix", "other.matrix"}


def laid_out(scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shards = []
    for name, shape in SHAPES.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = (scale * torch.randn(shape, generator=generator)).to(dtype)
        shards.append(ParamShard(name, parameter, units_of(parameter)))
    layout = Layout(shards)
    layout.leave_unscaled(MATRICES)
    return layout


def gradients_of(layout):
    return {shard.name: shard.param.grad for shard in layout.shards}


def norm_of(gradients, p):
    every = [abs(x) for g in gradients for x in g.double().flatten().tolist()]
    return max(every) if math.isinf(p) else sum(x**p for x in every) ** (1 / p)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("share", [0.25, 1.5])
@pytest.mark.parametrize("scales", ["auto", "all"])
def test_the_norm_of_scaled_gradients_is_limited(scales, share, p, on_device):
    layout = laid_out()
    before = {name: g.clone() for name, g in gradients_of(layout).items()}
    multiplied = {n for n in before if scales == "all" or n not in MATRICES}
    part = norm_of([before[name] for name in multiplied], p)
    mode = build("norm", threshold=share * part, norm_type=p, scales=scales)
    mode.bind(layout)
    if on_device:
        with kept_on_device(), Waits() as waits:
            decision = mode.clip(layout)
        assert not waits.found
        assert isinstance(decision.norm, torch.Tensor)
    else:
        decision = mode.clip(layout)
    factor = min(1.0, share)
    for name, gradient in gradients_of(layout).items():
        wanted = before[name] * (factor if name in multiplied else 1.0)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)
    norm, after = norm_of(before.values(), p), norm_of(gradients_of(layout).values(), p)
    clipped = float(share < 1)
    wanted = (norm, after, after / norm, clipped, clipped, part, share * part)
    assert tuple(map(float, decision.metrics)) == pytest.approx(wanted, rel=1e-12)
    if share > 1:
        assert float(decision.coef) == 1.0
        assert float(decision.norm_clipped) == float(decision.norm)
    if scales == "auto":
        assert float(decision.factor) == pytest.approx(factor, rel=1e-12)
        assert float(decision.norm_scaled) == pytest.approx(part, rel=1e-12)
    else:
        assert decision.factor is decision.norm_scaled is None


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("bad", ["matrix", "vector"])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad, p, on_device):
    layout = laid_out()
    gradients_of(layout)[bad].view(-1)[1] = math.nan
    mode = build("norm", threshold=0.01, norm_type=p)
    if on_device:
        with kept_on_device():
            stats = mode.measure(layout)
            decision = mode.decide(layout, stats)
            found = stats.powers.not_finite()
    else:
        stats = mode.measure(layout)
        decision, found = mode.decide(layout, stats), stats.powers.not_finite()
    assert not bool(decision.finite)
    assert found == [bad]
    assert {shard.name for shard in stats.powers.shards} == set(SHAPES)
    assert math.isnan(float(decision.norm))
    assert float(decision.clipped) == 0.0


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("absent", [MATRICES, {"vector", "kernel"}, set(SHAPES)])
def test_one_part_or_both_may_have_no_gradient(absent, on_device):
    layout = laid_out()
    for shard in layout.shards:
        if shard.name in absent:
            shard.param.grad = None
    here = {name: g.clone() for name, g in gradients_of(layout).items() if g is not None}
    mode = build("norm", threshold=0.5)
    if on_device:
        with kept_on_device():
            decision = mode.clip(layout)
    else:
        decision = mode.clip(layout)
    scaled = [g for name, g in here.items() if name not in MATRICES]
    part = norm_of(scaled, 2.0) if scaled else 0.0
    whole = norm_of(here.values(), 2.0) if here else 0.0
    assert float(decision.norm) == pytest.approx(whole, rel=1e-12)
    assert float(decision.max_stat) == pytest.approx(part, rel=1e-12)
    for name, gradient in here.items():
        factor = 1.0 if name in MATRICES else min(1.0, 0.5 / part)
        torch.testing.assert_close(
            gradients_of(layout)[name], gradient * factor, rtol=1e-12, atol=0
        )


def test_the_norm_of_the_whole_gradient_is_accurate_and_its_shares_are_named():
    layout = laid_out(1e-6, torch.float32)
    measured, split = measure_split(layout, each=True)
    parts = {
        True: [g for name, g in gradients_of(layout).items() if name not in MATRICES],
        False: [g for name, g in gradients_of(layout).items() if name in MATRICES],
    }
    assert measured.norm == pytest.approx(measure(layout).norm, rel=1e-12)
    assert split.scaled == pytest.approx(norm_of(parts[True], 2.0), rel=1e-6)
    assert split.rest == pytest.approx(norm_of(parts[False], 2.0), rel=1e-6)
    shares = dict(zip((s.name for s in measured.powers.shards), measured.powers.each, strict=True))
    for name, gradient in gradients_of(layout).items():
        assert shares[name] == pytest.approx(norm_of([gradient], 2.0) ** 2, rel=1e-6)


@dataclass
class RunningMean(ClipMode):
    """A mode with a history of norms, which knows nothing of gradients that are left out."""

    initial_history = {"mean": 0.0}  # noqa: RUF012

    def decide_finite(self, layout, stats):
        self.history["mean"] = (self.history["mean"] + stats.norm) / 2
        return limit_norm(stats.norm, self.limit * self.history["mean"])


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_mode_with_a_history_decides_by_the_scaled_gradients(on_device):
    mode, mean = RunningMean(threshold=0.9), 0.0
    for scale in (1.0, 5.0, 0.2):
        layout = laid_out(scale)
        layout.shards[0].param.grad.mul_(1e3)  # the size of a matrix plays no part
        part = norm_of([g for n, g in gradients_of(layout).items() if n not in MATRICES], 2.0)
        whole = norm_of(gradients_of(layout).values(), 2.0)
        mean = (mean + part) / 2
        if on_device:
            with kept_on_device():
                decision = mode.clip(layout)
        else:
            decision = mode.clip(layout)
        assert float(mode.history["mean"]) == pytest.approx(mean, rel=1e-12)
        assert float(decision.norm) == pytest.approx(whole, rel=1e-12)
        assert float(decision.factor) == pytest.approx(min(1.0, 0.9 * mean / part), rel=1e-12)


def test_a_mode_may_measure_in_its_own_way():
    class Own(RunningMean):
        def measure(self, layout, each=False):
            norm, _ = measure(layout)
            return GradStats(norm, math.isfinite(norm))

    layout = laid_out()
    part = norm_of([g for n, g in gradients_of(layout).items() if n not in MATRICES], 2.0)
    decision = Own(threshold=0.1).clip(layout)
    assert decision.norm_scaled == pytest.approx(part, rel=1e-12)
    assert decision.factor == pytest.approx(0.1 * 0.5, rel=1e-12)


def test_nothing_is_clipped_but_a_mode_without_a_threshold_reports_what_one_would_limit():
    layout = laid_out()
    decision = build("none").clip(layout)
    part = norm_of([g for n, g in gradients_of(layout).items() if n not in MATRICES], 2.0)
    assert decision.max_stat == decision.norm_scaled == pytest.approx(part, rel=1e-12)
    assert (decision.coef, decision.clipped, decision.factor) == (1.0, 0.0, 1.0)


def test_a_layout_without_such_parameters_is_measured_once():
    layout = laid_out()
    assert layout.partly_scaled
    plain = Layout([ParamShard(s.name, s.param, s.units) for s in layout.shards])
    plain.leave_unscaled(set())
    assert not plain.partly_scaled
    decision = build("norm", threshold=0.5).clip(plain)
    assert decision.factor is None
    assert norm_of([s.param.grad for s in plain.shards], 2.0) == pytest.approx(0.5, rel=1e-12)


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match="scales is 'auto' or 'all', not 'none'"):
        build("norm", threshold=1.0, scales="none")
