"""Each mode against a slow reference in float64, written from the papers' formulas alone."""

import copy
import math

import pytest
import torch
from torch import nn

from runner.clip import Layout, apply_gradient_clipping, build, total_norm

SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 3), (4, 3, 2), (4, 3, 3, 2), (2, 3, 2, 2, 2)]


def elements(tensor):
    return tensor.detach().double().reshape(-1).tolist()


def reference_norm(gradients, p):
    every = [abs(x) for g in gradients for x in elements(g)]
    if math.isinf(p):
        return max(every, default=0.0)
    return sum(x**p for x in every) ** (1 / p)


def reference_units(tensor):
    """Index lists of the units of a weight of a linear or convolutional layer, or a vector."""
    flat = torch.arange(tensor.numel()).reshape(tensor.shape)
    if tensor.ndim < 2:
        return [flat.reshape(-1).tolist()]
    return [row.reshape(-1).tolist() for row in flat]


def reference_adaptive(weight, gradient, threshold, eps=1e-3, units=None):
    w, g = elements(weight), elements(gradient)
    clipped = 0
    units = reference_units(weight) if units is None else units
    for unit in units:
        w_norm = max(math.sqrt(sum(w[i] ** 2 for i in unit)), eps)
        g_norm = math.sqrt(sum(g[i] ** 2 for i in unit))
        if g_norm > threshold * w_norm:
            clipped += 1
            for i in unit:
                g[i] *= threshold * w_norm / g_norm
    return torch.tensor(g, dtype=torch.float64).reshape(weight.shape), clipped, len(units)


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        made.append(parameter)
    return made


def awkward():
    """Zero weights, zero gradients, strided, channels-last and transposed tensors."""
    zero_weight = nn.Parameter(torch.zeros(3, 4))
    zero_weight.grad = torch.randn(3, 4)
    zero_gradient = nn.Parameter(torch.randn(3, 4))
    zero_gradient.grad = torch.zeros(3, 4)
    channels_last = nn.Parameter(
        torch.randn(4, 3, 5, 2).contiguous(memory_format=torch.channels_last)
    )
    channels_last.grad = torch.randn(4, 3, 5, 2).contiguous(memory_format=torch.channels_last)
    strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
    strided.grad = torch.randn(12, 4)[::2]
    turned = nn.Parameter(torch.randn(5, 3))
    turned.grad = torch.randn(3, 5).t()
    without = nn.Parameter(torch.randn(2, 2))
    return [zero_weight, zero_gradient, channels_last, strided, turned, without]


def with_gradients(made):
    return [p for p in made if p.grad is not None]


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_total_norm_is_the_reference(p, dtype):
    made = parameters(dtype=dtype) + ([] if dtype is not torch.float32 else awkward())
    expected = reference_norm([q.grad for q in with_gradients(made)], p)
    assert total_norm(Layout.of_parameters(made), p) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("share", [0.3, 0.999, 1.0, 1.001])
def test_norm(p, share):
    made = parameters() + awkward()
    before = [q.grad.clone() for q in with_gradients(made)]
    norm = reference_norm(before, p)
    threshold = norm * share
    outcome = apply_gradient_clipping(made, "norm", threshold, norm_type=p)
    coef = min(1.0, threshold / norm)
    assert outcome.norm == pytest.approx(norm, rel=2e-7)
    assert outcome.coef == pytest.approx(coef, rel=2e-7)
    assert outcome.norm_clipped == pytest.approx(coef * norm, rel=2e-7)
    assert outcome.threshold == threshold
    if share != 1.0:
        assert outcome.clipped == outcome.fraction == float(share < 1)
    for parameter, gradient in zip(with_gradients(made), before, strict=True):
        wanted = gradient.double() * coef
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=3e-7, atol=0)


def test_exactly_at_the_threshold_nothing_is_clipped():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    outcome = apply_gradient_clipping(parameter, "norm", 5.0)
    assert (outcome.norm, outcome.coef, outcome.clipped) == (5.0, 1.0, 0.0)
    assert parameter.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_what_reaches_the_threshold_exactly_is_not_counted(mode):
    """Also beside something that is above it."""
    weight = nn.Parameter(torch.eye(4))
    weight.grad = torch.diag(torch.tensor([0.5, 0.5, -0.5, 1.0]))
    outcome = apply_gradient_clipping(weight, mode, 0.5)
    counted = {"norm": 1.0, "value": 1 / 16, "adaptive": 1 / 4}
    assert outcome.fraction == counted[mode]


@pytest.mark.parametrize("value", [0.3, 1.1, 1.7])
def test_equal_elements_are_summed_without_a_bias(value):
    """Each addition to a long float32 sum of equal terms rounds the same way: off by 1.3e-5."""
    parameter = nn.Parameter(torch.empty(100_000))
    parameter.grad = torch.full((100_000,), value)
    exact = parameter.grad.double().norm().item()
    assert total_norm(Layout.of_parameters([parameter])) == pytest.approx(exact, rel=2e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("n", [1, 2_048, 65_536, 65_537, 67_584, 100_000])
def test_every_length_is_summed_whole(n, p):
    """Long gradients are summed in rows of 2,048; these fill the last row, or do not."""
    parameter = nn.Parameter(torch.empty(n))
    parameter.grad = torch.arange(n).remainder(7.0).add(1.0)
    parameter.grad[-1] = 1000.0
    exact = torch.linalg.vector_norm(parameter.grad.double(), p).item()
    assert total_norm(Layout.of_parameters([parameter]), p) == pytest.approx(exact, rel=1e-6)


def test_value():
    made = parameters() + awkward()
    before = [q.grad.clone() for q in with_gradients(made)]
    outcome = apply_gradient_clipping(made, "value", 0.5)
    every = [x for g in before for x in elements(g)]
    expected = [[max(-0.5, min(0.5, x)) for x in elements(g)] for g in before]
    assert [elements(q.grad) for q in with_gradients(made)] == expected
    assert outcome.fraction == pytest.approx(sum(abs(x) > 0.5 for x in every) / len(every))
    after = math.sqrt(sum(x * x for g in expected for x in g))
    assert outcome.norm_clipped == pytest.approx(after, rel=2e-7)
    assert outcome.coef == pytest.approx(after / outcome.norm, rel=2e-7)
    assert outcome.clipped == 1.0


@pytest.mark.parametrize("threshold", [0.01, 0.16, 1.0])
def test_adaptive(threshold):
    made = parameters() + awkward()
    given = with_gradients(made)
    wanted = [reference_adaptive(q, q.grad, threshold) for q in given]
    outcome = apply_gradient_clipping(made, "adaptive", threshold)
    for parameter, (gradient, _, _) in zip(given, wanted, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=2e-6, atol=0)
    units = sum(count for _, _, count in wanted)
    assert outcome.fraction == pytest.approx(sum(c for _, c, _ in wanted) / units)
    after = reference_norm([gradient for gradient, _, _ in wanted], 2.0)
    assert outcome.norm_clipped == pytest.approx(after, rel=1e-6)


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_half_precision_gradients(mode):
    made = parameters(dtype=torch.bfloat16)
    before = copy.deepcopy([(q, q.grad.clone()) for q in made])
    outcome = apply_gradient_clipping(made, mode, 0.1)
    norm = reference_norm([g for _, g in before], 2.0)
    assert outcome.norm == pytest.approx(norm, rel=2e-7)
    for parameter, (weight, gradient) in zip(made, before, strict=True):
        if mode == "norm":
            wanted = gradient.double() * (0.1 / norm)
        elif mode == "value":
            wanted = gradient.double().clamp(-0.1, 0.1)
        else:
            wanted, _, _ = reference_adaptive(weight, gradient, 0.1)
        assert parameter.grad.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("groups", "kernel"), [(1, 3), (2, 3), (3, 1)])
@pytest.mark.parametrize(
    "kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d], ids=lambda k: k.__name__
)
def test_a_unit_of_a_transposed_convolution_is_an_output_channel(kind, groups, kernel):
    torch.manual_seed(0)
    inputs, outputs = 6, 12
    layer = kind(inputs, outputs, kernel, groups=groups)
    weight = layer.weight
    weight.grad = torch.randn_like(weight)
    layer.bias.grad = torch.zeros_like(layer.bias)
    index = torch.arange(weight.numel()).reshape(weight.shape)
    # Output channel o of group g is fed by the inputs of its group alone.
    per_group, rows = outputs // groups, inputs // groups
    units = [
        index[g * rows : (g + 1) * rows, o].reshape(-1).tolist()
        for g in range(groups)
        for o in range(per_group)
    ]
    wanted, clipped, _ = reference_adaptive(weight, weight.grad, 0.5, units=units)
    outcome = apply_gradient_clipping(layer, "adaptive", 0.5)
    torch.testing.assert_close(weight.grad.double(), wanted, rtol=2e-6, atol=0)
    assert outcome.fraction == pytest.approx(clipped / (outputs + 1))


def test_adaptive_agrees_with_timm_where_the_definitions_agree():
    from timm.utils.agc import adaptive_clip_grad

    ours = parameters([(9,), (5, 3), (4, 3, 3, 2)], scale=0.3)
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = mine.grad.clone()
    adaptive_clip_grad(theirs, clip_factor=0.05, eps=1e-3)
    outcome = apply_gradient_clipping(ours, "adaptive", 0.05)
    assert outcome.fraction > 0
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norm_agrees_with_torch(p):
    # torch refuses the largest element of an empty tensor.
    shapes = [shape for shape in SHAPES if 0 not in shape]
    ours, theirs = parameters(shapes), parameters(shapes)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7, norm_type=p)
    outcome = apply_gradient_clipping(ours, "norm", 0.7, norm_type=p)
    assert outcome.norm == pytest.approx(expected.item(), rel=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=3e-6, atol=1e-7)


def test_value_agrees_with_torch():
    ours, theirs = parameters(), parameters()
    torch.nn.utils.clip_grad_value_(theirs, 0.4)
    apply_gradient_clipping(ours, "value", 0.4)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_the_norm_is_accurate_at_1e8_elements():
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.empty(100_000_003))
    parameter.grad = torch.rand(100_000_003, generator=generator)
    exact = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).item()
    assert total_norm(Layout.of_parameters([parameter])) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("n", [10, 100_000])
def test_powers_may_leave_the_range_of_float32(n, p):
    """Every size of an element that float32 has: its square is 0, loses digits, or is infinite."""
    spread = torch.rand(n, generator=torch.Generator().manual_seed(0)) + 0.5
    for exponent in range(-44, 38):
        parameter = nn.Parameter(torch.empty(n))
        parameter.grad = spread * 10.0**exponent
        exact = torch.linalg.vector_norm(parameter.grad.double(), p).item()
        norm = total_norm(Layout.of_parameters([parameter]), p)
        assert norm == pytest.approx(exact, rel=1e-6, abs=0), exponent


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("where", [0, 99_999])
def test_a_norm_is_finite_only_if_every_element_is(bad, p, where):
    made = parameters([(5,), (100_000,), (5,)])
    made[1].grad[where] = bad
    assert not math.isfinite(total_norm(Layout.of_parameters(made), p))


def test_a_parameter_given_twice_counts_once():
    made = parameters([(3, 4)])
    once = total_norm(Layout.of_parameters(made))
    assert total_norm(Layout.of_parameters(made * 2)) == once
    apply_gradient_clipping(made * 2, "norm", once / 2)
    assert total_norm(Layout.of_parameters(made)) == pytest.approx(once / 2, rel=1e-6)


def test_a_generator_of_parameters_is_not_used_up():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    outcome = apply_gradient_clipping(model.parameters(), "norm", 0.01)
    assert outcome.clipped == 1.0
    assert total_norm(Layout.of_model(model)) == pytest.approx(0.01, rel=1e-6)


def tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def test_a_tied_parameter_counts_once():
    model = tied()
    assert [shard.name for shard in Layout.of_model(model).shards] == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]


def test_the_head_is_left_out_by_default_and_globs_say_otherwise():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    model(torch.randn(8, 4)).square().sum().backward()
    head = model[2].weight.grad.clone()
    body = model[0].weight.grad.clone()
    apply_gradient_clipping(model, "adaptive", 1e-4)
    assert torch.equal(model[2].weight.grad, head)
    assert not torch.equal(model[0].weight.grad, body)

    layout = Layout.of_model(model)
    mode = build("adaptive", threshold=1e-6, exclude=("0.*",))
    mode.bind(layout)
    body = model[0].weight.grad.clone()
    mode.clip(layout)
    assert torch.equal(model[0].weight.grad, body)
    assert not torch.equal(model[2].weight.grad, head)
    assert Layout.of_model(tied()).heads == ("0.weight",)


def test_a_glob_that_matches_nothing_is_an_error():
    mode = build("adaptive", threshold=0.1, exclude=("heaad.*",))
    with pytest.raises(ValueError, match=r"heaad\.\* matches no parameter of: weight, bias"):
        mode.bind(Layout.of_model(nn.Linear(2, 2)))


def test_none_measures_and_changes_nothing():
    made = parameters()
    before = [q.grad.clone() for q in made]
    layout = Layout.of_parameters(made)
    outcome = build("none").clip(layout)
    assert outcome.norm == outcome.norm_clipped
    assert (outcome.coef, outcome.clipped, outcome.fraction) == (1.0, 0.0, 0.0)
    assert all(torch.equal(q.grad, g) for q, g in zip(made, before, strict=True))


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_a_threshold_that_is_not_above_zero_is_an_error(threshold):
    with pytest.raises(ValueError, match="above 0"):
        build("norm", threshold=threshold)


def test_unknown_modes_are_errors():
    for name in ("agc", "layout", "os.path"):
        with pytest.raises(ValueError, match="unknown clipping mode"):
            build(name)


def test_sparse_and_complex_are_refused_by_name():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="weight has a sparse gradient"):
        apply_gradient_clipping(table, "norm", 1.0)
    with pytest.raises(TypeError, match="complex"):
        Layout.of_parameters([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_no_gradient_at_all(mode):
    outcome = apply_gradient_clipping(nn.Linear(2, 2), mode, 0.5)
    assert (outcome.norm, outcome.coef, outcome.clipped, outcome.fraction) == (0.0, 1.0, 0.0, 0.0)
