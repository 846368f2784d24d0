"""A coefficient that leaves gradients out (those of Muon), on the host and on an accelerator."""

import math

import pytest
import torch
from torch import nn

from runner.clip import GradStats, Layout, ParamShard, build, total_norm
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
            assert float(decision.norm_scaled) == pytest.approx(part, rel=1e-12)
        else:
            assert decision.norm_scaled is None


@KEPT
@pytest.mark.parametrize("bad", ["matrix", "vector"])
def test_a_step_that_is_not_finite_changes_nothing(bad, kept):
    layout = laid_out()
    gradients_of(layout)[bad].view(-1)[1] = math.nan
    with on(kept):
        decision = build("norm", threshold=0.01).clip(layout)
    assert not bool(decision.finite)
    assert math.isnan(float(decision.norm))
    assert float(decision.clipped) == 0.0


@KEPT
def test_a_mode_with_a_history_decides_by_the_scaled_gradients(kept):
    """As if there were no others, whether or not it measures which part they are of ‖G‖."""
    mode, alone = (build("percentile", threshold=50.0, min_steps=1) for _ in range(2))
    for number, scale in enumerate((1.0, 5.0, 0.2, 3.0)):
        layout = laid_out(scale)
        layout.shards[0].param.grad.mul_(1e3)  # the size of a matrix plays no part
        others = Layout(shard for shard in laid_out(scale).shards if shard.scaled)
        whole, vector = (norm_of(gradients_of(layout, n).values()) for n in (SHAPES, {"vector"}))
        with on(kept):
            stats = GradStats.measured(total_norm(layout), None) if number > 1 else None
            decision, wanted = mode.clip(layout, stats), alone.clip(others)
        assert float(decision.norm) == pytest.approx(whole, rel=1e-12)
        ratio = norm_of(gradients_of(layout, {"vector"}).values()) / vector
        assert ratio == pytest.approx(float(wanted.coef), rel=1e-12)
        assert float(decision.threshold) == pytest.approx(float(wanted.threshold), rel=1e-12)


def test_a_chain_with_a_schedule_leaves_matrices_out():
    layout, other = laid_out(), laid_out()
    build("chain", links=[1.0, {"mode": "schedule", "threshold": 0.5, "of": "norm"}]).clip(layout)
    assert torch.equal(layout.shards[0].param.grad, other.shards[0].param.grad)


def test_a_mode_without_a_threshold_reports_what_one_would_limit():
    layout = laid_out()
    decision = build("none").clip(layout)
    part = norm_of(gradients_of(layout, SHAPES.keys() - MATRICES).values())
    assert decision.max_stat == decision.norm_scaled == pytest.approx(part, rel=1e-12)
    assert (decision.coef, decision.clipped, decision.scales) == (1.0, 0.0, None)
    assert layout.partly_scaled
    plain = Layout([ParamShard(s.name, s.param, s.units) for s in layout.shards])
    plain.leave_unscaled(set())
    assert not plain.partly_scaled
    assert build("norm", threshold=0.5).clip(plain).norm_scaled is None
    assert norm_of([s.param.grad for s in plain.shards]) == pytest.approx(0.5, rel=1e-12)
