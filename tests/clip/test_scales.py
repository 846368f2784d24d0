"""A coefficient that leaves gradients out (those of Muon), on the host and on an accelerator."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from runner.clip import ClipMode, GradStats, Layout, ParamShard, build, limit_norm, total_norm
from runner.clip.units import units_of
from tests.clip.reference import norm_of, on, unwaited

SHAPES = {"matrix": (4, 3), "other.matrix": (3, 5), "vector": (7,), "kernel": (2, 3, 2, 2)}
MATRICES = {"matrix", "other.matrix"}
KEPT = pytest.mark.parametrize("kept", [False, True])


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


def gradients_of(layout, names=SHAPES):
    return {s.name: s.param.grad for s in layout.shards if s.name in names}


@KEPT
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("share", [0.25, 1.5])
@pytest.mark.parametrize("scales", ["auto", "all"])
def test_the_norm_of_scaled_gradients_is_limited(scales, share, p, kept):
    """Also where one part or both have no gradient."""
    for absent in ((), MATRICES, {"vector", "kernel"}, set(SHAPES)):
        layout = laid_out()
        for shard in layout.shards:
            if shard.name in absent:
                shard.param.grad = None
        before = {n: g.clone() for n, g in gradients_of(layout, SHAPES.keys() - absent).items()}
        multiplied = {n for n in before if scales == "all" or n not in MATRICES}
        part = norm_of([before[name] for name in multiplied], p)
        threshold = share * part or 1.0
        mode = build("norm", threshold=threshold, norm_type=p, scales=scales)
        mode.bind(layout)
        with on(kept), unwaited(kept):
            decision = mode.clip(layout)
        factor = min(1.0, share) if part else 1.0
        for name, gradient in before.items():
            wanted = gradient * (factor if name in multiplied else 1.0)
            torch.testing.assert_close(gradients_of(layout)[name], wanted, rtol=1e-12, atol=0)
        norm, after = norm_of(before.values(), p), norm_of(gradients_of(layout).values(), p)
        clipped = float(share < 1 and part > 0)
        wanted = (norm, after, after / norm if norm else 1.0, clipped, clipped, part, threshold)
        assert tuple(map(float, decision.metrics)) == pytest.approx(wanted, rel=1e-12)
        if not clipped:
            assert float(decision.coef) == 1.0
            assert float(decision.norm_clipped) == float(decision.norm)
        if scales == "auto":
            assert float(decision.factor) == pytest.approx(factor, rel=1e-12)
            assert float(decision.norm_scaled) == pytest.approx(part, rel=1e-12)
        else:
            assert decision.factor is decision.norm_scaled is None


@KEPT
@pytest.mark.parametrize("bad", ["matrix", "vector"])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad, p, kept):
    layout = laid_out()
    gradients_of(layout)[bad].view(-1)[1] = math.nan
    mode = build("norm", threshold=0.01, norm_type=p)
    with on(kept):
        stats = mode.measure(layout)
        decision = mode.decide(layout, stats)
        assert stats.powers.not_finite() == [bad]
        shares = dict(zip((s.name for s in stats.powers.shards), stats.powers.each, strict=True))
        for name, gradient in gradients_of(layout, SHAPES.keys() - {bad}).items():
            size = norm_of([gradient], p)
            assert float(shares[name]) == pytest.approx(size if p == math.inf else size**p)
    assert not bool(decision.finite)
    assert {shard.name for shard in stats.powers.shards} == set(SHAPES)
    assert math.isnan(float(decision.norm))
    assert float(decision.clipped) == 0.0


@dataclass
class RunningMean(ClipMode):
    """A mode with a history of norms, which knows nothing of gradients that are left out."""

    initial_history = {"mean": 0.0}  # noqa: RUF012
    measures_itself = False

    def measure(self, layout, each=False):
        if not self.measures_itself:
            return super().measure(layout, each)
        return GradStats.measured(total_norm(layout), None)

    def decide_finite(self, layout, stats):
        self.history["mean"] = (self.history["mean"] + stats.norm) / 2
        return limit_norm(stats.norm, self.limit * self.history["mean"])


@pytest.mark.parametrize("itself", [False, True])
@KEPT
def test_a_mode_with_a_history_decides_by_the_scaled_gradients(itself, kept):
    mode, mean = RunningMean(threshold=0.9), 0.0
    mode.measures_itself = itself and not kept
    for scale in (1.0, 5.0, 0.2):
        layout = laid_out(scale)
        layout.shards[0].param.grad.mul_(1e3)  # the size of a matrix plays no part
        part = norm_of(gradients_of(layout, SHAPES.keys() - MATRICES).values())
        whole = norm_of(gradients_of(layout).values())
        mean = (mean + part) / 2
        with on(kept):
            decision = mode.clip(layout)
        assert float(mode.history["mean"]) == pytest.approx(mean, rel=1e-12)
        assert float(decision.norm) == pytest.approx(whole, rel=1e-12)
        assert float(decision.factor) == pytest.approx(min(1.0, 0.9 * mean / part), rel=1e-12)


def test_a_mode_without_a_threshold_reports_what_one_would_limit():
    layout = laid_out()
    decision = build("none").clip(layout)
    part = norm_of(gradients_of(layout, SHAPES.keys() - MATRICES).values())
    assert decision.max_stat == decision.norm_scaled == pytest.approx(part, rel=1e-12)
    assert (decision.coef, decision.clipped, decision.factor) == (1.0, 0.0, 1.0)
    assert layout.partly_scaled
    plain = Layout([ParamShard(s.name, s.param, s.units) for s in layout.shards])
    plain.leave_unscaled(set())
    assert not plain.partly_scaled
    assert build("norm", threshold=0.5).clip(plain).factor is None
    assert norm_of([s.param.grad for s in plain.shards]) == pytest.approx(0.5, rel=1e-12)
