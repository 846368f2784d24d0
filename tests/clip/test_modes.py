"""Each mode against a slow reference in float64, read by the host and kept on an accelerator."""

import copy
import logging
import math

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.clip import build
from runner.clip.groups import by_parameter_groups
from runner.config.modes import NAMES
from runner.gradients import Layout, ParamShard, total_norm
from runner.gradients.units import units_of
from tests.clip.reference import REFERENCE, awkward, norm_of, on, parameters, refused, unwaited

# Nearest to the largest value that a mode compares with λ: just below and just above it.
SHARES = {torch.bfloat16: (0.3, 2.0), torch.float32: (0.02, 0.3, 0.9999, 1.0001, 1e4)}
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}
KEPT = pytest.mark.parametrize("kept", [False, True])
EACH = pytest.mark.parametrize("mode", REFERENCE)


@KEPT
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@EACH
def test_every_mode_is_its_reference(mode, p, dtype, kept):
    rel = max(CLOSE[dtype], 1e-12) if dtype is torch.float64 else 2e-6
    for share in SHARES.get(dtype, SHARES[torch.float32]):
        torch.manual_seed(0)
        made = parameters(dtype=dtype) + (awkward() if dtype is torch.float32 else [])
        given = [q for q in made if q.grad is not None]
        threshold = share * REFERENCE[mode](given, 1.0, p)[2]
        wanted, fraction, stat = REFERENCE[mode](given, threshold, p)
        before, after = norm_of([q.grad for q in given], p), norm_of(wanted, p)
        layout = Layout.of_parameters(made)
        clipper = build(mode, threshold=threshold, norm_type=p)
        clipper.bind(layout)
        with on(kept):
            outcome = clipper.clip(layout)
        assert outcome.norm.dtype == torch.float64
        assert outcome.threshold == threshold
        assert float(outcome.clipped) == float(share < 1)
        assert float(outcome.fraction) == pytest.approx(fraction, rel=1e-6)
        assert float(outcome.max_stat) == pytest.approx(stat, rel=rel)
        assert float(outcome.norm) == pytest.approx(before, rel=rel)
        # The reference does not round clipped gradients to bfloat16.
        rough = rel if dtype is not torch.bfloat16 else 1e-2
        assert float(outcome.norm_clipped) == pytest.approx(after, rel=rough)
        assert float(outcome.coef) == pytest.approx(after / before, rel=rough)
        assert made[-1].grad is None or dtype is not torch.float32
        for parameter, gradient in zip(given, wanted, strict=True):
            assert parameter.grad.dtype == parameter.dtype
            torch.testing.assert_close(
                parameter.grad.double(), gradient, rtol=CLOSE[dtype], atol=1e-12
            )


@KEPT
@EACH
def test_what_reaches_the_threshold_exactly_is_not_clipped(mode, kept):
    """Alone, and beside something above it."""
    for largest, fraction in ((0.5, {}), (1.0, {"value": 1 / 16, "adaptive": 1 / 4})):
        weight = nn.Parameter(torch.eye(4))
        parts = mode in ("value", "adaptive")
        diagonal = [0.5, 0.5, -0.5, largest] if parts else [largest, 0.0, 0.0, 0.0]
        weight.grad = torch.diag(torch.tensor(diagonal))
        before, threshold = weight.grad.clone(), 0.5
        with on(kept):
            outcome = apply_gradient_clipping(weight, mode, threshold)
        assert float(outcome.fraction) == (fraction.get(mode, 1.0) if largest == 1.0 else 0.0)
        assert float(outcome.clipped) == float(largest == 1.0)
        if largest == 0.5:
            assert float(outcome.coef) == 1.0
            assert torch.equal(weight.grad, before)


@KEPT
@pytest.mark.parametrize("mode", ["none", *REFERENCE])
def test_nothing_to_clip(mode, kept):
    """No gradient, and gradients of zero; ``none`` measures and changes nothing."""
    for fill in (None, 0.0, 1.0 if mode == "none" else 0.0):
        model = nn.Linear(2, 2)
        for parameter in model.parameters():
            parameter.grad = None if fill is None else torch.full_like(parameter, fill)
        layout = Layout.of_model(model)
        clipper = build(mode, threshold=None if mode == "none" else 0.5)
        clipper.bind(layout)
        with on(kept):
            metrics = tuple(map(float, clipper.clip(layout).metrics))
        norm = (fill or 0.0) * math.sqrt(6)
        assert metrics[:6] == pytest.approx((norm, norm, 1.0, 0.0, 0.0, norm))
        assert fill is None or all(bool((p.grad == fill).all()) for p in model.parameters())


@KEPT
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_a_step_that_is_not_finite_is_left_alone(bad, p, kept):
    for mode in REFERENCE:
        for where in (0, 99_999):
            made = parameters([(5,), (100_000,), (5,)])
            made[1].grad[where] = bad
            before = [q.grad.clone() for q in made]
            with on(kept):
                outcome = apply_gradient_clipping(made, mode, 0.5, norm_type=p)
            assert not bool(outcome.finite)
            assert not math.isfinite(float(outcome.norm))
            assert float(outcome.clipped) == float(outcome.fraction) == 0.0
            nans = (outcome.norm_clipped, outcome.coef, outcome.max_stat)
            assert all(math.isnan(x) for x in map(float, nans)) or (kept and mode != "norm")
            assert outcome.threshold == 0.5
            if not kept:
                for q, gradient in zip(made, before, strict=True):
                    torch.testing.assert_close(q.grad, gradient, rtol=0, atol=0, equal_nan=True)


# -- the norm


def assert_exact_norm(gradient, p, rel=1e-6):
    parameter = nn.Parameter(torch.empty(len(gradient)))
    parameter.grad = gradient
    exact = torch.linalg.vector_norm(gradient.double(), p).item()
    norm = total_norm(Layout.of_parameters([parameter]), p)
    assert norm == pytest.approx(exact, rel=rel, abs=0), (len(gradient), gradient[0])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_the_norm_is_exact_at_every_length(p):
    """Long gradients are summed in rows of 2,048."""
    for n in (1, 2_048, 65_536, 65_537, 67_584, 131_072, 131_073, 2_100_001):
        gradient = torch.arange(n).remainder(7.0).add(1.0)
        gradient[-1] = 1000.0
        assert_exact_norm(gradient, p)


@pytest.mark.parametrize("n", [10, 100_000, 140_000])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_the_norm_is_exact_where_powers_leave_the_range_of_float32(p, n):
    spread = torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.5
    for exponent in range(-44, 38, 1 if n == 10 else 3):
        assert_exact_norm(spread * 10.0**exponent, p)


@pytest.mark.parametrize("n", [10, 100_000, 140_000])
def test_the_norm_of_equal_elements_is_exact(n):
    """Each addition to a long float32 sum of equal terms rounds the same way."""
    assert_exact_norm(torch.full((n,), 1.7), 2.0, rel=2e-6)


# -- one call


def test_a_parameter_given_twice_counts_once():
    params = parameters([(3, 4)])
    norm = total_norm(Layout.of_parameters(params))
    assert total_norm(Layout.of_parameters(params * 2)) == norm
    apply_gradient_clipping((p for p in params * 2), "norm", norm / 2)
    assert total_norm(Layout.of_parameters(params)) == pytest.approx(norm / 2, rel=1e-6)


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    refused(TypeError, "weight|sparse", apply_gradient_clipping, table, "norm", 1.0)


def test_a_complex_parameter_is_refused():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    refused(TypeError, "[0]|complex", Layout.of_parameters, [parameter])


# -- adaptive


@pytest.mark.parametrize(
    ("exclude", "clipped"),
    [("auto", {"0.weight", "0.bias", "2.bias"}), (("0.*",), {"2.weight", "2.bias"})],
    ids=["the head by default", "what a pattern matches"],
)
def test_adaptive_clipping_leaves_out(exclude, clipped, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model(torch.ones(8, 4)).square().sum().backward()
    before = copy.deepcopy({name: p.grad for name, p in model.named_parameters()})
    with caplog.at_level(logging.INFO, "runner.clip"):
        for _ in range(2):
            outcome = apply_gradient_clipping(model, "adaptive", 1e-4, exclude=exclude)
    assert outcome.max_stat <= 1e-4 * (1 + 1e-6)
    after = dict(model.named_parameters())
    assert {n for n in before if not torch.equal(after[n].grad, before[n])} == clipped
    # The message is logged once in a process, in which another test may have been first.
    assert len([record for record in caplog.records if "2.weight" in record.getMessage()]) <= 1


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_unit_of_a_transposed_convolution_is_an_output_channel(groups):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(6, 12, 3, groups=groups)
    weight = layer.weight
    weight.grad = torch.randn_like(weight)
    layer.bias.grad = torch.zeros_like(layer.bias)
    # Output channel o of group g is fed by the inputs of its group alone.
    turned = nn.Parameter(torch.cat([w.transpose(0, 1) for w in weight.detach().chunk(groups)]))
    turned.grad = torch.cat([g.transpose(0, 1) for g in weight.grad.chunk(groups)])
    [expected], fraction, _ = REFERENCE["adaptive"]([turned], 0.5, 2.0)
    outcome = apply_gradient_clipping(layer, "adaptive", 0.5)
    clipped = torch.cat([g.transpose(0, 1) for g in weight.grad.chunk(groups)])
    torch.testing.assert_close(clipped.double(), expected, rtol=2e-6, atol=0)
    assert outcome.fraction == pytest.approx(fraction * 12 / 13)


# -- options, decisions and states


WRONG = {  # The message has the last key; sections of a request are checked in tests/config.
    "norm": [{"threshold": bad} for bad in (0.0, -1.0, math.nan, None)]
    + [{"norm_type": 0.5}, {"norm_type": math.nan}, {"scales": "none"}, {"eps": 1.0}],
    "adaptive": [{"eps": 0.0}, {"exclude": "head.*"}]
    + [{"units": {"a": 0, "b": bad}} for bad in ("0", 1.0, True, None, ["a"], [0, True])],
    "adagc": [{"beta": 1.0}, {"history": "both"}],
    "percentile": [{"threshold": 101.0}, {"window": 5}],
    "schedule": [
        {"of": bad} for bad in ("nrom", "spike", "schedule", {"mode": "adaptive", "eps": -1.0})
    ]
    + [{"of": {"mode": "norm", "threshold": 2.0}}],
    "chain": [{"links": [1.0]}]
    + [
        {"threshold": None, "links": bad}
        for bad in (None, [], [{"mode": "norm"}], [{"mode": "agc"}])
    ],
    "groups": [{"threshold": None}, {"threshold": None, "groups": {"*": {"mode": "agc"}}}],
    **{name: [{}] for name in ("agc", "layout")},
}


@pytest.mark.parametrize("mode", WRONG)
def test_wrong_options_are_refused(mode):
    for options in WRONG[mode]:
        word = {"chain": "link", "groups": "groups"}.get(mode, [mode, *options][-1])
        word = "threshold" if options == {"links": [1.0]} else word
        refused(ValueError, word, build, mode, **{"threshold": 1.0, **options})


def test_a_negative_threshold_of_a_class_is_refused():
    refused(ValueError, "above 0", type(build("norm", threshold=1.0)), threshold=-1.0)


def test_an_unknown_mode_is_refused_with_the_names_of_all_modes():
    refused(ValueError, "unknown clipping mode|" + NAMES[0], build, "agc")
    refused(ValueError, "did you mean percentile", build, "percentle")
    refused(TypeError, "must be a name, such as 'norm', not 0.25", build, 0.25)


def test_options_at_the_edge_of_their_range_are_taken():
    mode = build("adaptive", threshold=1e-300, norm_type=1.0, eps=1e-300, exclude=())
    assert (mode.limit, mode.norm_type, mode.eps) == (1e-300, 1.0, 1e-300)
    assert build("norm", threshold=math.inf, norm_type=math.inf).limit == math.inf
    assert build("adagc", threshold=1.0, beta=0.0, warmup_steps=0).beta == 0.0


def test_the_threshold_survives_a_restart():
    mode = build("norm", threshold=0.5)
    other = build("norm", threshold=1.0)
    other.load_state_dict({})
    assert other.limit == 1.0
    other.load_state_dict(mode.state_dict())
    assert mode.state_dict() == {"threshold": 0.5}
    assert other.limit == 0.5


# -- a coefficient that leaves gradients out (those of Muon)


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
    layout.orthogonalized = frozenset(MATRICES)
    return layout


def clipped_beside_muon(mode, layout):
    return by_parameter_groups(mode, layout).clip(layout)


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
            decision = clipped_beside_muon(mode, layout)
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
        decision = clipped_beside_muon(build("norm", threshold=0.01), layout)
    assert not bool(decision.finite)
    assert math.isnan(float(decision.norm))
    assert float(decision.clipped) == 0.0


@KEPT
def test_a_mode_with_a_history_decides_by_the_scaled_gradients(kept):
    """As if there were no others."""
    mode, alone = (build("percentile", threshold=50.0, min_steps=1) for _ in range(2))
    for scale in (1.0, 5.0, 0.2, 3.0):
        layout = laid_out(scale)
        layout.shards[0].param.grad.mul_(1e3)  # the size of a matrix plays no part
        others = Layout(s for s in laid_out(scale).shards if s.name not in MATRICES)
        whole, vector = (norm_of(gradients_of(layout, n).values()) for n in (SHAPES, {"vector"}))
        with on(kept):
            decision, wanted = clipped_beside_muon(mode, layout), alone.clip(others)
        assert float(decision.norm) == pytest.approx(whole, rel=1e-12)
        ratio = norm_of(gradients_of(layout, {"vector"}).values()) / vector
        assert ratio == pytest.approx(float(wanted.coef), rel=1e-12)
        assert float(decision.threshold) == pytest.approx(float(wanted.threshold), rel=1e-12)


def test_a_chain_with_a_schedule_leaves_matrices_out():
    layout, other = laid_out(), laid_out()
    links = [1.0, {"mode": "schedule", "threshold": 0.5, "of": "norm"}]
    clipped_beside_muon(build("chain", links=links), layout)
    assert torch.equal(layout.shards[0].param.grad, other.shards[0].param.grad)


def test_a_mode_without_a_threshold_reports_what_one_would_limit():
    layout = laid_out()
    decision = clipped_beside_muon(build("none"), layout)
    part = norm_of(gradients_of(layout, SHAPES.keys() - MATRICES).values())
    assert decision.max_stat == decision.norm_scaled == pytest.approx(part, rel=1e-12)
    assert (decision.coef, decision.clipped, decision.scales) == (1.0, 0.0, None)
    plain = Layout(layout.shards)
    assert clipped_beside_muon(build("norm", threshold=0.5), plain).norm_scaled is None
    assert norm_of([s.param.grad for s in plain.shards]) == pytest.approx(0.5, rel=1e-12)
