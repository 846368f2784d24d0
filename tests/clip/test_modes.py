"""Each mode against a slow reference in float64, read by the host and kept on an accelerator."""

import copy
import logging
import math

import pytest
import torch
from torch import nn

from runner import GradientClipping
from runner.clip import Decision, Layout, apply_gradient_clipping, build, total_norm
from runner.clip.norms import norms
from tests.clip.reference import (
    REFERENCE,
    SHAPES,
    awkward,
    norm_of,
    on,
    parameters,
    refused,
    with_gradients,
)
from tests.mode_names import NAMES

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
        given = with_gradients(made)
        threshold = share * REFERENCE[mode](given, 1.0, p)[2]
        wanted, fraction, stat = REFERENCE[mode](given, threshold, p)
        before, after = norm_of([q.grad for q in given], p), norm_of(wanted, p)
        layout = Layout.of_parameters(made)
        clipper = build(mode, threshold=threshold, norm_type=p)
        clipper.bind(layout)
        with on(kept):
            outcome = clipper.clip(layout)
        assert isinstance(outcome.norm, torch.Tensor if kept else float)
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


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_the_norm_of_every_length_and_size(p):
    """Long gradients are summed in rows of 2,048; squares leave the range of float32."""

    def check(gradient, rel=1e-6):
        parameter = nn.Parameter(torch.empty(len(gradient)))
        parameter.grad = gradient
        exact = torch.linalg.vector_norm(gradient.double(), p).item()
        norm = total_norm(Layout.of_parameters([parameter]), p)
        assert norm == pytest.approx(exact, rel=rel, abs=0), len(gradient)

    for n in (1, 2_048, 65_536, 65_537, 67_584, 131_072, 131_073, 2_100_001):
        gradient = torch.arange(n).remainder(7.0).add(1.0)
        gradient[-1] = 1000.0
        check(gradient)
    for n in (10, 100_000, 140_000):
        spread = torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.5
        for exponent in range(-44, 38, 1 if n == 10 else 3):
            check(spread * 10.0**exponent)
        if p == 2.0:  # Each addition to a long float32 sum of equal terms rounds the same way.
            check(torch.full((n,), 1.7), 2e-6)


def test_the_norm_is_accurate_at_1e8_elements():
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.empty(100_000_003))
    parameter.grad = torch.rand(100_000_003, generator=generator)
    exact = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).item()
    assert total_norm(Layout.of_parameters([parameter])) == pytest.approx(exact, rel=1e-6)


@KEPT
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_the_norms_of_all_parameters_are_on_the_host(p, kept):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].weight.grad, model[1].bias.grad = torch.randn(2, 3), torch.randn(2)
    with on(kept):
        found = norms(Layout.of_model(model), p)
    assert all(type(norm) is float for norm in found.values())
    wanted = {name: norm_of([q.grad], p) for name, q in model.named_parameters()}
    assert found == pytest.approx(wanted, rel=1e-6)


# -- what other libraries do


def both(shapes, mode, threshold, theirs, scale=1.0, **options):
    ours, others = parameters(shapes, scale=scale), parameters(shapes, scale=scale)
    theirs(others)
    assert apply_gradient_clipping(ours, mode, threshold, **options).clipped == 1.0
    for mine, other in zip(ours, others, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=3e-6, atol=1e-7)


def test_torch_and_timm_agree():
    from timm.utils.agc import adaptive_clip_grad

    some = [shape for shape in SHAPES if 0 not in shape]
    for p in (1.0, 2.0, math.inf):
        torchs = nn.utils.clip_grad_norm_
        both(some, "norm", 0.7, lambda made, p=p: torchs(made, 0.7, norm_type=p), norm_type=p)  # noqa: B023
    both(SHAPES, "value", 0.4, lambda made: nn.utils.clip_grad_value_(made, 0.4))
    shapes = [(9,), (5, 3), (4, 3, 3, 2)]
    both(shapes, "adaptive", 0.05, lambda made: adaptive_clip_grad(made, 0.05, eps=1e-3), 0.3)


# -- one call


def test_a_parameter_given_twice_or_in_a_generator_counts_once():
    made = parameters([(3, 4)])
    once = total_norm(Layout.of_parameters(made))
    assert total_norm(Layout.of_parameters(made * 2)) == once
    apply_gradient_clipping((q for q in made * 2), "norm", once / 2)
    assert total_norm(Layout.of_parameters(made)) == pytest.approx(once / 2, rel=1e-6)
    refused(ValueError, "no parameters", lambda: apply_gradient_clipping([], "norm", 1.0))


def test_gradients_that_share_memory_are_clipped_once():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    first.grad = second.grad = torch.full((3,), 2.0)
    norm = apply_gradient_clipping([first, second], "norm", 1.0).norm
    assert norm == pytest.approx(math.sqrt(24))
    assert torch.equal(first.grad, second.grad)
    assert norm_of([first.grad, second.grad]) == pytest.approx(1.0)


def test_sparse_and_complex_are_refused_by_name():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    refused(TypeError, "weight|sparse", lambda: apply_gradient_clipping(table, "norm", 1.0))
    half = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    refused(TypeError, "[0]|complex", lambda: Layout.of_parameters([half]))


# -- adaptive


def test_the_head_is_left_out_by_default_and_globs_say_otherwise(caplog):
    for exclude, changes in (("auto", ["0.weight", "0.bias", "2.bias"]), (("0.*",), ["2.*"])):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        model(torch.ones(8, 4)).square().sum().backward()
        before = copy.deepcopy({name: q.grad for name, q in model.named_parameters()})
        with caplog.at_level(logging.INFO, "runner.clip"):
            for _ in range(2):
                outcome = apply_gradient_clipping(model, "adaptive", 1e-4, exclude=exclude)
        assert outcome.max_stat <= 1e-4 * (1 + 1e-6)
        left = {n for n, q in model.named_parameters() if torch.equal(q.grad, before[n])}
        wanted = set(changes) if exclude == "auto" else {"2.weight", "2.bias"}
        assert set(before) - left == wanted
    assert len([r for r in caplog.records if "2.weight" in r.getMessage()]) == 1  # said once


def test_a_model_without_units_is_measured_alone():
    made = nn.Sequential(nn.Linear(3, 2, bias=False))
    made[0].weight.grad = torch.randn(2, 3)
    before = made[0].weight.grad.clone()
    outcome = apply_gradient_clipping(made, "adaptive", 1e-6)
    assert (outcome.max_stat, outcome.clipped) == (0.0, 0.0)
    assert outcome.norm == pytest.approx(norm_of([before]))
    assert torch.equal(made[0].weight.grad, before)


@pytest.mark.parametrize(("groups", "kernel"), [(1, 3), (2, 3), (3, 1)])
@pytest.mark.parametrize(
    "kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d], ids=lambda k: k.__name__
)
def test_a_unit_of_a_transposed_convolution_is_an_output_channel(kind, groups, kernel):
    torch.manual_seed(0)
    layer = kind(6, 12, kernel, groups=groups)
    weight = layer.weight
    weight.grad, layer.bias.grad = torch.randn_like(weight), torch.zeros_like(layer.bias)
    # Output channel o of group g is fed by the inputs of its group alone.
    turned = nn.Parameter(torch.cat([w.transpose(0, 1) for w in weight.detach().chunk(groups)]))
    turned.grad = torch.cat([g.transpose(0, 1) for g in weight.grad.chunk(groups)])
    [wanted], fraction, _ = REFERENCE["adaptive"]([turned], 0.5, 2.0)
    outcome = apply_gradient_clipping(layer, "adaptive", 0.5)
    found = torch.cat([g.transpose(0, 1) for g in weight.grad.chunk(groups)])
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)
    assert outcome.fraction == pytest.approx(fraction * 12 / 13)


# -- options, decisions and states


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("norm", {"threshold": 0.0}, "threshold|above 0"),
        ("norm", {"threshold": -1.0}, "threshold|above 0"),
        ("norm", {"threshold": math.nan}, "threshold|above 0"),
        ("norm", {"norm_type": 0.5}, "norm_type|at least 1"),
        ("norm", {"norm_type": math.nan}, "norm_type|at least 1"),
        ("norm", {"scales": "none"}, "scales|'auto' or 'all'"),
        ("norm", {"eps": 1.0}, "norm has no option eps"),
        ("adaptive", {"eps": 0.0}, "eps|above 0"),
        ("adaptive", {"eps": math.nan}, "eps|above 0"),
        *(("adaptive", {"units": {"a": 0, "b": bad}}, "units of b must be the dimension")
          for bad in ("0", 1.0, True, None, ["a"], [0, True], {"a": 1})),
        ("per_parameter", {"by": "layer"}, "by must be tensor or block"),
        ("adagc", {"beta": 1.0}, "beta"),
        ("adagc", {"beta": -0.1}, "beta"),
        ("adagc", {"absolute": 0.0}, "absolute"),
        ("adagc", {"warmup_steps": -1}, "warmup_steps"),
        ("adagc", {"history": "both"}, "history"),
        ("percentile", {"threshold": 101.0}, "at most 100"),
        ("percentile", {"history": "kept"}, "history"),
        ("percentile", {"threshold": 10.0, "window": 5}, "window|at least 10"),
        ("zscore", {"rule": "median"}, "rule"),
        ("zscore", {"history": "kept"}, "history"),
        ("zscore", {"decay": 1.0}, "decay"),
        ("zscore", {"decay": 0.0}, "decay"),
        ("zscore", {"eps": 0.0}, "eps"),
        ("schedule", {"of": "nrom"}, "did you mean norm?"),
        ("schedule", {"of": {"mode": "adaptive", "eps": -1.0}}, "of.eps"),
        ("schedule", {"of": {"mode": "norm", "threshold": 2.0}}, "of.threshold"),
        ("schedule", {"of": "spike"}, "use clip=spike"),
        ("schedule", {"of": "schedule"}, "has no threshold"),
        ("schedule", {"decay": "linear"}, "steps"),
        ("schedule", {"scheduler": {"_target_": "torch.optim.lr_scheduler.ExponentialLR"}},
         "takes the place|warmup_steps"),
        ("schedule", {"warmup_steps": 0, "scheduler": {
            "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}, "metrics"),
        ("update", {"eps": 0.0}, "eps"),
        ("update", {"rule": "mean"}, "rule"),
        ("update", {"window": 1}, "window"),
        ("chain", {"threshold": None}, "at least one link"),
        ("chain", {"links": [1.0]}, "no threshold"),
        ("chain", {"threshold": None, "links": [1.0, {"mode": "norm"}]}, "links.1.threshold"),
        ("chain", {"threshold": None, "links": [{"mode": "norm", "eps": 1}]}, "links.0.eps"),
        ("groups", {"threshold": None}, "at least one pattern"),
        ("groups", {"threshold": None, "groups": {"*": {"mode": "agc"}}}, "groups.*.mode"),
        *((name, {}, "unknown clipping mode|" + NAMES[0]) for name in ("agc", "layout", "os.path")),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(mode, options, words):
    refused(ValueError, words, lambda: build(mode, **{"threshold": 1.0, **options}))


def test_options_at_the_edge_of_their_range_are_taken():
    mode = build("adaptive", threshold=1e-300, norm_type=1.0, eps=1e-300)
    assert (mode.limit, mode.norm_type, mode.eps) == (1e-300, 1.0, 1e-300)
    assert build("norm", threshold=math.inf, norm_type=math.inf).limit == math.inf
    assert build("adagc", threshold=1.0, beta=0.0, warmup_steps=0).beta == 0.0
    for name in REFERENCE:
        refused(ValueError, "needs a threshold", lambda name=name: build(name).limit)


def test_the_threshold_survives_a_restart():
    mode, other = build("norm", threshold=0.5), build("norm", threshold=1.0)
    other.load_state_dict({})
    assert other.limit == 1.0
    other.load_state_dict(mode.state_dict())
    assert mode.state_dict() == {"threshold": 0.5}
    assert other.limit == 0.5


def test_an_algorithm_of_the_trainer_describes_its_mode():
    mode = GradientClipping("adaptive", 0.5, units={"w": [1]}, scales="all").mode()
    assert (mode.threshold, mode.units, mode.scales) == (0.5, {"w": [1]}, "all")
    assert build("adaptive", threshold=0.1).units is None


@pytest.mark.parametrize("threshold", [3.0, None])
def test_what_decisions_report(threshold):
    nan = pytest.approx(math.nan, nan_ok=True)
    untouched, skipped = Decision.untouched(2.0, threshold, 1.5), Decision.skipped(9.0, threshold)
    assert untouched.metrics == (2.0, 2.0, 1.0, 0.0, 0.0, 1.5, threshold or nan)
    assert skipped.metrics == (9.0, nan, nan, 0.0, 0.0, nan, threshold or nan)
    assert (untouched.finite, skipped.finite) == (True, False)
    clipped = Decision(*(torch.tensor(x) for x in (2.0, 1.0, 0.5, 1.0, 0.25, 3.0)), 1.0)
    for finite in (torch.tensor(True), torch.tensor(False)):
        wanted = clipped.metrics if finite else (2.0, nan, nan, 0.0, 0.0, nan, 1.0)
        assert tuple(map(float, clipped.where(finite).metrics)) == wanted
        assert clipped.where(finite).finite is finite
