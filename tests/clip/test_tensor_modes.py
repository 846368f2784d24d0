"""Modes that limit tensors, against float64 arithmetic on lists, over 500 made-up steps."""

import math
import random

import pytest
import torch
from torch import nn

from runner.clip import Layout, ParamShard, Units, build
from runner.clip.per_parameter import block_of
from tests.clip.threads import Ranks
from tests.on_device import Waits, kept_on_device

SIZES = {"blocks.0.a": 6, "blocks.0.b": 4, "blocks.1.a": 5, "head.weight": 8, "late.weight": 2}
STEPS = 500


def recorded(steps=STEPS, seed=0):
    """Gradients of each step by name: None where absent, and one step in fifty holds a NaN."""
    draw = random.Random(seed)
    found = []
    for step in range(steps):
        level = 10.0 if step >= 300 else 1.0
        each = {}
        for name, size in SIZES.items():
            spike = 80.0 if draw.random() < 0.04 else 1.0
            plateau = 150 <= step < 180
            values = [level * spike * (1.0 if plateau else draw.gauss(0, 1)) for _ in range(size)]
            if draw.random() < 0.05 or (name == "late.weight" and step < 120):
                each[name] = None
            else:
                each[name] = [0.0] * size if draw.random() < 0.05 else values
        if step % 50 == 37:
            each["head.weight"] = [math.nan] * SIZES["head.weight"]
        found.append(each)
    return found


def norm_of(values, p):
    if values is None:
        return 0.0
    if any(map(math.isnan, values)):
        return math.nan
    if math.isinf(p):
        return max(map(abs, values), default=0.0)
    return math.fsum(abs(x) ** p for x in values) ** (1 / p)


def together(norms, p):
    return norm_of(list(norms), p)


def adagc(steps, limit=1.05, absolute=1.0, beta=0.98, warm=100, p=2.0, raw=False, zeros=False):
    """Factors of each step by name, None for a step that is skipped.

    ``zeros``: let a norm of zero enter the history, as algorithm 1 of the paper does.
    """
    gamma, t = {}, 0
    for each in steps:
        norms = {name: norm_of(values, p) for name, values in each.items()}
        whole = together(norms.values(), p)
        if not math.isfinite(whole):
            yield None
            continue
        factors = {}
        for name, norm in norms.items():
            if t < warm:
                factors[name] = min(1.0, absolute / whole) if whole else 1.0
            elif name in gamma and norm:
                factors[name] = min(1.0, limit * gamma[name] / norm)
            else:
                factors[name] = 1.0
            if each[name] is None or not (norm or zeros):
                continue
            entering = norm if raw else factors[name] * norm
            if name not in gamma:
                gamma[name] = entering
            elif t < warm:
                gamma[name] = min(gamma[name], entering)
            else:
                gamma[name] = beta * gamma[name] + (1 - beta) * entering
        t += 1
        yield factors


def per_parameter(steps, limit, p=2.0, block=None):
    for each in steps:
        norms = {name: norm_of(values, p) for name, values in each.items()}
        if not math.isfinite(together(norms.values(), p)):
            yield None
            continue
        parts = {}
        for name, norm in norms.items():
            parts.setdefault(block[name] if block else name, []).append(norm)
        size = {part: together(own, p) for part, own in parts.items()}
        of = {name: size[block[name] if block else name] for name in norms}
        yield {name: min(1.0, limit / of[name]) if of[name] else 1.0 for name in norms}


def parameters():
    return {name: nn.Parameter(torch.zeros(n, dtype=torch.float64)) for name, n in SIZES.items()}


def layout_of(made):
    return Layout([ParamShard(name, p, Units((0,))) for name, p in made.items()])


def give(made, each):
    for name, parameter in made.items():
        values = each[name]
        parameter.grad = None if values is None else torch.tensor(values, dtype=torch.float64)


def assert_follows(mode, steps, factors, p, rel=1e-10):
    """That each step of ``mode`` multiplies by ``factors``, and reports what follows from them."""
    made = parameters()
    layout = layout_of(made)
    mode.bind(layout)
    seen = set()
    for each, wanted in zip(steps, factors, strict=True):
        give(made, each)
        decision = mode.clip(layout)
        before = {name: norm_of(values, p) for name, values in each.items()}
        if wanted is None:
            assert not bool(decision.finite)
            assert math.isnan(float(decision.coef))
            continue
        after = together([wanted[name] * norm for name, norm in before.items()], p)
        whole = together(before.values(), p)
        assert float(decision.norm) == pytest.approx(whole, rel=rel)
        assert float(decision.norm_clipped) == pytest.approx(after, rel=rel)
        assert float(decision.coef) == pytest.approx(after / whole if whole else 1.0, rel=rel)
        changed = any(wanted[name] < 1 for name in each if each[name] is not None)
        assert float(decision.clipped) == changed
        seen.add(changed)
        for name, values in each.items():
            if values is not None:
                got = made[name].grad.tolist()
                assert got == pytest.approx([wanted[name] * x for x in values], rel=rel), name
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("p", "history", "kept"),
    [
        (1.0, "raw", False),
        (2.0, "clipped", False),
        (2.0, "clipped", True),
        (2.0, "raw", True),
        (math.inf, "clipped", False),
    ],
)
def test_adagc_is_the_reference(p, history, kept):
    steps = recorded()
    options = {"absolute": 8.0, "beta": 0.9, "warmup_steps": 60}
    mode = build("adagc", threshold=1.5, norm_type=p, history=history, **options)
    wanted = list(adagc(steps, 1.5, 8.0, 0.9, 60, p, raw=history == "raw"))
    if kept:
        with kept_on_device():
            assert_follows(mode, steps, wanted, p)
    else:
        assert_follows(mode, steps, wanted, p)


def test_the_defaults_of_adagc_are_the_papers():
    steps = recorded(300, seed=3)
    made, mode = parameters(), build("adagc", threshold=1.05)
    layout = layout_of(made)
    mode.bind(layout)
    for each, wanted in zip(steps, adagc(steps), strict=True):
        give(made, each)
        mode.clip(layout)
        if wanted is not None and each["blocks.0.a"] is not None:
            expected = [wanted["blocks.0.a"] * x for x in each["blocks.0.a"]]
            assert made["blocks.0.a"].grad.tolist() == pytest.approx(expected, rel=1e-10)


def test_a_zero_gradient_freezes_a_tensor_by_the_published_rule_but_not_here():
    steps = [{name: [1.0] * size for name, size in SIZES.items()} for _ in range(200)]
    steps[3] = steps[3] | {"head.weight": [0.0] * SIZES["head.weight"]}
    options = {"limit": 1.05, "absolute": 100.0, "warm": 10}
    published = list(adagc(steps, **options, zeros=True))
    assert {factors["head.weight"] for factors in published[10:]} == {0.0}
    made, mode = parameters(), build("adagc", threshold=1.05, absolute=100.0, warmup_steps=10)
    layout = layout_of(made)
    mode.bind(layout)
    for each in steps:
        give(made, each)
        mode.clip(layout)
    assert made["head.weight"].grad.tolist() == [1.0] * SIZES["head.weight"]


@pytest.mark.parametrize(
    ("p", "by", "kept"),
    [
        (2.0, "tensor", False),
        (2.0, "block", True),
        (3.0, "block", False),
        (math.inf, "block", False),
        (math.inf, "tensor", True),
    ],
)
def test_per_parameter_is_the_reference(p, by, kept):
    steps = recorded()
    block = {n: "blocks." + n[7] if n[0] == "b" else n.split(".")[0] for n in SIZES}
    wanted = per_parameter(steps, 12.0, p, block if by == "block" else None)
    mode = build("per_parameter", threshold=12.0, norm_type=p, by=by)
    if kept:
        with kept_on_device():
            assert_follows(mode, steps, wanted, p)
    else:
        assert_follows(mode, steps, wanted, p)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("blocks.3.attn.weight", "blocks.3"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("0.weight", "0"),
        ("encoder.layers.11.2.bias", "encoder.layers.11"),
        ("conv1.weight", "conv1"),
        ("token", ""),
        ("weights.0", "weights"),
    ],
)
def test_the_block_of_a_name(name, block):
    assert block_of(name) == block


def test_what_per_parameter_counts_and_compares():
    made = parameters()
    sizes = {"blocks.0.a": 3.0, "blocks.0.b": 4.0, "blocks.1.a": 1.0, "head.weight": 0.0}
    give(made, {name: [sizes[name]] + [0.0] * (n - 1) for name, n in list(SIZES.items())[:4]}
         | {"late.weight": None})  # fmt: skip
    layout = layout_of(made)
    tensor, block = (build("per_parameter", threshold=2.0, by=by) for by in ("tensor", "block"))
    assert block.decide(layout, block.measure(layout)).metrics[4:] == (1 / 3, 5.0, 2.0)
    decision = tensor.clip(layout)
    assert decision.metrics[3:] == (1.0, 0.5, 4.0, 2.0)
    assert decision.norm_clipped == pytest.approx(3.0)
    assert made["blocks.1.a"].grad[0] == 1.0


MODES = {
    "adagc": {"threshold": 1.3, "warmup_steps": 4, "absolute": 5.0},
    "per_parameter": {"threshold": 2.0},
    "blocks": {"threshold": 3.0, "by": "block"},
}


def parts(made, ranks):
    """What one of two ranks holds: halves, a copy on both, and what only the first one has."""
    first, found = ranks.rank() == 0, []
    for name, parameter in made.items():
        size = parameter.numel()
        if name == "blocks.0.b":  # replicated
            found.append((name, slice(None), 2))
        elif name == "blocks.1.a":  # on the first rank alone, as a pipeline stage
            found += [(name, slice(None), 1)] if first else []
        elif name == "head.weight":  # the second rank's part is empty
            found.append((name, slice(0, size) if first else slice(size, size), 1))
        else:
            half = size // 2
            found.append((name, slice(0, half) if first else slice(half, size), 1))
    return found


def on_two_ranks(steps, make, kept=False):
    """Metrics and gradients of each step, on each of two ranks that share the tensors."""

    def body(ranks):
        made = parameters()
        held = parts(made, ranks)
        own = {name: nn.Parameter(made[name].detach()[at].clone()) for name, at, _ in held}
        shards = [ParamShard(name, own[name], Units((0,)), n) for name, _, n in held]
        whole = layout_of(made).parameters
        layout, mode = Layout(shards, ranks, parameters=whole), make()
        mode.bind(layout)
        found = []
        for each in steps:
            for name, at, _ in held:
                values = each[name]
                given = None if values is None else torch.tensor(values, dtype=torch.float64)[at]
                # The second rank has no gradient where it would be zero.
                silent = given is None or (ranks.rank() == 1 and not bool(given.any()))
                own[name].grad = None if silent else given.clone()
            decision = mode.clip(layout)
            gradients = {n: None if p.grad is None else p.grad.tolist() for n, p in own.items()}
            found.append((tuple(float(x).hex() for x in decision.metrics), gradients))
        return found, mode.state_dict()

    if kept:
        with kept_on_device():
            return Ranks(2).run(body)
    return Ranks(2).run(body)


def assert_like_one_process(steps, make, kept=False):
    """That two ranks decide with the same bits, and as one process does."""
    (first, one), (second, two) = on_two_ranks(steps, make, kept)
    assert repr(one) == repr(two)
    made, mode = parameters(), make()
    layout = layout_of(made)
    mode.bind(layout)
    for each, (mine, here), (other, there) in zip(steps, first, second, strict=True):
        assert mine == other
        give(made, each)
        wanted = mode.clip(layout)
        got = tuple(map(float.fromhex, mine))
        assert got == pytest.approx(tuple(map(float, wanted.metrics)), rel=1e-12, nan_ok=True)
        for n, gradients in ((n, g) for rank in (here, there) for n, g in rank.items()):
            if gradients and n in ("blocks.0.b", "blocks.1.a") and bool(wanted.finite):
                assert gradients == pytest.approx(made[n].grad.tolist(), rel=1e-12)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("name", MODES)
def test_ranks_that_share_tensors_decide_like_one_process(name, p, kept):
    kind = "adagc" if name == "adagc" else "per_parameter"

    def make():
        return build(kind, **MODES[name], norm_type=p)

    assert_like_one_process(recorded(40, seed=1), make, kept)


def test_the_history_goes_on_to_the_bit_in_any_order_of_names():
    steps = recorded(160, seed=2)
    options = {"threshold": 1.2, "warmup_steps": 30, "beta": 0.9}
    made, whole = parameters(), build("adagc", **options)
    layout = layout_of(made)
    whole.bind(layout)
    resumed = None
    turned = Layout([*reversed(layout.shards)])
    for number, each in enumerate(steps):
        give(made, each)
        stats = whole.measure(layout)
        if resumed is not None:
            ours = resumed.decide(turned, resumed.measure(turned))
        wanted = whole.decide(layout, stats)
        if resumed is not None and wanted.scales is not None:
            assert torch.equal(ours.scales.flip(0), wanted.scales)
        if number == 80:
            resumed = build("adagc", **options)
            resumed.bind(turned)
            resumed.load_state_dict(whole.state_dict())
    ours, theirs = resumed.state_dict()["history"], whole.state_dict()["history"]
    assert torch.equal(ours["gamma"].flip(0), theirs["gamma"])
    assert ours["step"] == theirs["step"] == sum(f is not None for f in adagc(steps))


@pytest.mark.parametrize("name", MODES)
def test_the_host_does_not_wait(name):
    made = parameters()
    layout = layout_of(made)
    mode = build("adagc" if name == "adagc" else "per_parameter", **MODES[name])
    with kept_on_device():
        mode.bind(layout)
        for each in recorded(3):
            give(made, each)
            with Waits() as waits:
                mode.clip(layout)
            assert waits.found == []


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("per_parameter", {"by": "layer"}, "by must be tensor or block, not 'layer'"),
        ("adagc", {"beta": 1.0}, "beta must be at least 0 and below 1, not 1.0"),
        ("adagc", {"absolute": 0.0}, "absolute must be above 0, not 0.0"),
        ("adagc", {"warmup_steps": -1}, "warmup_steps must be at least 0, not -1"),
        ("adagc", {"history": "both"}, "history must be raw or clipped, not 'both'"),
    ],
)
def test_options_out_of_range_are_refused(mode, options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build(mode, threshold=1.0, **options)
    assert str(raised.value) == message
