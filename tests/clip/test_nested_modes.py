"""Modes inside of modes: chains of modes, and groups of parameters with a mode each."""

import copy
import math
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

from runner.booster import Booster
from runner.clip import Layout, build
from runner.clip import mode as mode_module
from runner.clip.layout import OptionError
from runner.clip.tensors import TensorNorms
from tests.clip.test_tensor_modes import (
    adagc,
    assert_like_one_process,
    give,
    layout_of,
    norm_of,
    parameters,
    recorded,
    together,
)
from tests.on_device import Waits, kept_on_device

ADAGC = {"mode": "adagc", "threshold": 1.3, "warmup_steps": 5, "absolute": 6.0, "beta": 0.9}
VALUE = {"mode": "value", "threshold": 1.5}
SINGLE = {
    "none": {"mode": "none"},
    "norm": {"mode": "norm", "threshold": 3.0},
    "value": VALUE,
    "adaptive": {"mode": "adaptive", "threshold": 500.0},
    "per_parameter": {"mode": "per_parameter", "threshold": 2.0},
    "adagc": ADAGC,
    "groups": {"mode": "groups", "groups": {"blocks.*": 2.0, "*": VALUE}},
}


def made_of(node, **options):
    return build(node["mode"], **{k: v for k, v in node.items() if k != "mode"}, **options)


def exact(decision):
    return [float(x).hex() for x in decision.metrics], bool(decision.finite)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("around", ["chain", "groups"])
@pytest.mark.parametrize("name", SINGLE)
def test_a_chain_of_one_and_a_group_of_all_are_the_mode_to_the_bit(name, around, kept):
    node = SINGLE[name]
    option = {"links": [node]} if around == "chain" else {"groups": {"*": node}}
    alone, inside = made_of(node), build(around, **option)
    ours, theirs = parameters(), parameters()
    first, second = layout_of(theirs), layout_of(ours)
    alone.bind(first)
    inside.bind(second)
    clipped = set()
    for each in recorded(60, seed=4):
        give(theirs, each)
        give(ours, each)
        with kept_on_device() if kept else nullcontext():
            wanted, got = alone.clip(first), inside.clip(second)
        assert exact(got) == exact(wanted)
        clipped.add(float(wanted.clipped))
        for key, parameter in theirs.items():
            if parameter.grad is not None:
                assert torch.equal(ours[key].grad.nan_to_num(9), parameter.grad.nan_to_num(9))
        kind, label, numbers = got.inner[0] if got.inner else (None, None, got)
        assert exact(numbers)[0] == exact(wanted)[0]
        assert (kind, label) in {("link", "0"), ("group", "*"), (None, None)}
    assert clipped == ({0.0} if name == "none" else {0.0, 1.0})


@pytest.mark.parametrize("name", ["norm", "value", "adagc"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_boosted_step_of_a_chain_of_one_is_that_of_the_mode(name, fused):
    def weights(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        booster = Booster()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        model, optimizer, *_ = booster.boost(model, sgd)
        mode.bind(optimizer.layout)
        for step in range(8):
            inputs = torch.arange(12.0).view(3, 4).add(step).sin()
            booster.backward(20 * model(inputs).square().mean(), optimizer)
            optimizer.clip_and_step(mode)
            optimizer.zero_grad()
        return [p.detach() for p in model.unwrap().parameters()]

    node = {"mode": "norm", "threshold": 0.5} if name == "norm" else SINGLE[name]
    alone, chained = weights(made_of(node)), weights(build("chain", links=[node]))
    assert all(map(torch.equal, alone, chained))


def limited(each, limit):
    norm = together([norm_of(values, 2.0) for values in each.values()], 2.0)
    return multiplied(each, dict.fromkeys(each, min(1.0, limit / norm) if norm else 1.0))


def multiplied(each, factors):
    return {
        name: None if values is None else [factors[name] * x for x in values]
        for name, values in each.items()
    }


def clamped(each, limit):
    return {
        name: values and [x if x != x else max(-limit, min(limit, x)) for x in values]
        for name, values in each.items()
    }


def is_finite(each):
    return all(math.isfinite(norm_of(values, 2.0)) for values in each.values())


def adagc_of(steps):
    factors = adagc(steps, 1.3, 6.0, 0.9, 5)
    return [e if f is None else multiplied(e, f) for e, f in zip(steps, factors, strict=True)]


CHAINS = {
    "norm, norm": ([3.0, {"mode": "none"}, 2.0], [("norm", 3.0), ("norm", 2.0)]),
    "value, norm": ([SINGLE["value"], 2.0], [("value", 1.5), ("norm", 2.0)]),
    "adagc, norm": ([ADAGC, 2.0], [("adagc", None), ("norm", 2.0)]),
    "norm, adagc": ([9.0, ADAGC], [("norm", 9.0), ("adagc", None)]),
    "norm, value, adagc, norm": (
        [9.0, SINGLE["value"], ADAGC, 1.0],
        [("norm", 9.0), ("value", 1.5), ("adagc", None), ("norm", 1.0)],
    ),
}
REFERENCE = {
    "norm": lambda steps, limit: [limited(each, limit) for each in steps],
    "value": lambda steps, limit: [clamped(each, limit) for each in steps],
    "adagc": lambda steps, _: adagc_of(steps),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_one_mode_after_the_other(name, kept):
    links, stages = CHAINS[name]
    steps = recorded(120, seed=5)
    stage_norms, wanted = [], steps
    for kind, limit in stages:
        wanted = REFERENCE[kind](wanted, limit)
        stage_norms.append([together([norm_of(v, 2.0) for v in e.values()], 2.0) for e in wanted])
    made, mode = parameters(), build("chain", links=links)
    layout = layout_of(made)
    mode.bind(layout)
    for number, (each, expected) in enumerate(zip(steps, wanted, strict=True)):
        give(made, each)
        with kept_on_device() if kept else nullcontext():
            decision = mode.clip(layout)
        if not is_finite(each):
            assert not bool(decision.finite)
            continue
        whole = together([norm_of(values, 2.0) for values in each.values()], 2.0)
        norms = [norms[number] for norms in stage_norms]
        assert float(decision.norm) == pytest.approx(whole, rel=1e-10)
        assert float(decision.norm_clipped) == pytest.approx(norms[-1], rel=1e-10)
        coef = norms[-1] / whole if whole else 1.0
        assert float(decision.coef) == pytest.approx(coef, rel=1e-10)
        after = [float(i.decision.norm_clipped) for i in decision.inner]
        assert [i.name for i in decision.inner] == [str(i) for i in range(len(links))]
        shown = after if len(after) == len(norms) else [after[0], after[2]]
        assert shown == pytest.approx(norms, rel=1e-10)
        assert float(decision.clipped) == max(float(i.decision.clipped) for i in decision.inner)
        for key, values in expected.items():
            if values is not None:
                assert made[key].grad.tolist() == pytest.approx(values, rel=1e-10)


def test_an_infinite_gradient_that_a_link_would_clamp_is_skipped_by_all_links():
    made = parameters()
    layout = layout_of(made)
    links = [{"mode": "value", "threshold": 1.0}, {**ADAGC, "warmup_steps": 0}]
    for kept in (False, True):
        mode = build("chain", links=links)
        mode.bind(layout)
        good = recorded(1)[0]
        bad = {**good, "head.weight": [math.inf] * 8}
        histories = []
        for each in (good, bad, good):
            give(made, each)
            with kept_on_device() if kept else nullcontext():
                decision = mode.clip(layout)
            assert bool(decision.finite) == (each is good)
            histories.append(mode.state_dict()["links"]["1"]["history"])
        assert torch.equal(histories[0]["gamma"], histories[1]["gamma"])
        assert [float(h["step"]) for h in histories] == [1.0, 1.0, 2.0]


def test_links_that_only_scale_read_and_multiply_gradients_once():
    made = parameters()
    layout = layout_of(made)
    links = [9.0, {**ADAGC, "warmup_steps": 0}, SINGLE["per_parameter"], 0.5]
    mode = build("chain", links=links)
    mode.bind(layout)
    give(made, recorded(1)[0])
    measure, scale_each = TensorNorms.measure, mode_module.scale_each
    with (
        patch.object(TensorNorms, "measure", side_effect=measure) as read,
        patch.object(mode_module, "scale_each", side_effect=scale_each) as multiplied,
        patch.object(mode_module, "scale", side_effect=AssertionError),
    ):
        decision = mode.clip(layout)
    assert (read.call_count, multiplied.call_count) == (1, 1)
    assert decision.norm_clipped == pytest.approx(0.5)


def test_links_that_scale_the_whole_are_one_coefficient_that_a_step_may_take():
    made = parameters()
    layout = layout_of(made)
    mode = build("chain", links=[4.0, {"mode": "none"}, 1.0])
    give(made, {name: [3.0] + [0.0] * (p.numel() - 1) for name, p in made.items()})
    decision = mode.decide(layout, mode.measure(layout))
    assert (decision.parts, decision.scales) == (None, None)
    assert decision.coef == pytest.approx(1 / math.sqrt(45), rel=1e-12)


GROUPS = {"*.1.*": "none", "blocks.*": {**ADAGC, "absolute": 2.0}, "head.*": 1.5}


@pytest.mark.parametrize("kept", [False, True])
def test_groups_are_clipped_by_themselves(kept):
    """The first match counts, and what no pattern matches (``late.weight``) is not clipped."""
    steps = recorded(120, seed=6)
    own = [{n: e[n] for n in ("blocks.0.a", "blocks.0.b")} for e in steps]
    # A step that is not finite in another group enters no history either.
    seen = [
        e if is_finite(s) else {"blocks.0.a": [math.nan]} for e, s in zip(own, steps, strict=True)
    ]
    factors = list(adagc(seen, 1.3, 2.0, 0.9, 5))
    made, mode = parameters(), build("groups", groups=GROUPS)
    layout = layout_of(made)
    mode.bind(layout)
    for each, blocks, factor in zip(steps, own, factors, strict=True):
        give(made, each)
        with kept_on_device() if kept else nullcontext():
            decision = mode.clip(layout)
        if factor is None:
            assert not bool(decision.finite)
            continue
        expected = each | multiplied(blocks, factor)
        expected |= limited({"head.weight": each["head.weight"]}, 1.5)
        norms = [together([norm_of(v, 2.0) for v in e.values()], 2.0) for e in (each, expected)]
        assert [float(x) for x in decision.metrics[:2]] == pytest.approx(norms, rel=1e-10)
        for key, values in expected.items():
            if values is not None:
                assert made[key].grad.tolist() == pytest.approx(values, rel=1e-10)
        assert [(i.kind, i.name) for i in decision.inner] == [
            ("group", name) for name in ("*.1.*", "blocks.*", "head.*", "rest")
        ]
        inner = {i.name: i.decision for i in decision.inner}
        assert float(inner["head.*"].norm) == pytest.approx(
            norm_of(each["head.weight"], 2.0), rel=1e-10
        )
        changed = [float(inner[name].clipped) for name in ("blocks.*", "head.*")]
        assert float(decision.fraction) == sum(changed) / 2
        assert float(inner["*.1.*"].coef) == float(inner["rest"].coef) == 1.0


CHAIN = {"mode": "chain", "links": [9.0, SINGLE["none"], 2.0]}
MANY = {
    "chain": {"links": [SINGLE["value"], ADAGC, 2.0]},
    "coefficients": {"links": [ADAGC, SINGLE["per_parameter"], 1.0]},
    "groups": {"groups": {"blocks.1.*": 0.5, "blocks.*": ADAGC, "late.*": SINGLE["value"]}},
    "parts": {"groups": {"blocks.1.*": SINGLE["value"], "*": CHAIN}},
}


def many(name, norm_type=2.0):
    kind = "groups" if "groups" in MANY[name] else "chain"
    return build(kind, **copy.deepcopy(MANY[name]), norm_type=norm_type)


@pytest.mark.parametrize(("p", "kept"), [(2.0, False), (2.0, True), (math.inf, False)])
@pytest.mark.parametrize("name", MANY)
def test_ranks_that_share_tensors_decide_like_one_process(name, p, kept):
    """The second rank has no shard of the group ``blocks.1.*``."""
    assert_like_one_process(recorded(40, seed=1), lambda: many(name, p), kept)


@pytest.mark.parametrize("name", MANY)
def test_the_host_does_not_wait(name):
    made = parameters()
    layout = layout_of(made)
    mode = many(name)
    with kept_on_device():
        mode.bind(layout)
        for each in recorded(3):
            give(made, each)
            with Waits() as waits:
                mode.clip(layout)
            assert waits.found == []


@pytest.mark.parametrize("name", MANY)
def test_histories_go_on_to_the_bit(name):
    steps = recorded(60, seed=7)
    whole, resumed = many(name), many(name)
    ours, theirs = parameters(), parameters()
    first, second = layout_of(ours), layout_of(theirs)
    whole.bind(first)
    resumed.bind(second)
    for number, each in enumerate(steps):
        if number == 30:
            resumed = many(name)
            resumed.bind(second)
            resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
        give(ours, each)
        wanted = whole.clip(first)
        if number >= 30:
            give(theirs, each)
            assert exact(resumed.clip(second)) == exact(wanted)


def test_thresholds_of_links_are_loaded_unless_the_run_keeps_its_own():
    before, after = build("chain", links=[2.0, ADAGC]), build("chain", links=[5.0, ADAGC])
    state = before.state_dict()
    del state["links"]["0"]["threshold"]
    after.load_state_dict(state)
    assert [mode.threshold for mode in after.modes] == [5.0, 1.3]
    after.load_state_dict(before.state_dict())
    assert [mode.threshold for mode in after.modes] == [2.0, 1.3]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"heaad.*": 1.0}, r"clip.groups=heaad.\* matches no parameter of: blocks.0.a"),
        ({"*": 1.0, "head.*": 2.0}, r"head.\* matches only parameters that patterns before it do"),
        (
            {"*": {"mode": "adaptive", "threshold": 1.0, "exclude": ["foo.*"]}},
            r"clip.groups.\*.exclude=foo.\* matches no parameter",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(groups, message):
    with pytest.raises(OptionError, match=message):
        build("groups", groups=groups).bind(layout_of(parameters()))


def test_a_last_pattern_for_everything_else_may_find_nothing():
    mode, layout = build("groups", groups={"?*": 1.0, "*": "none"}), layout_of(parameters())
    mode.bind(layout)
    give(made := parameters(), recorded(1)[0])
    assert [i.name for i in mode.clip(layout_of(made)).inner] == ["?*"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("chain", {}, "a chain needs at least one link"),
        ("chain", {"threshold": 1.0, "links": [1.0]}, "a chain takes no threshold"),
        ("chain", {"links": [1.0, {"mode": "norm"}]}, "links.1.threshold: mode norm needs"),
        ("chain", {"links": [{"mode": "norm", "eps": 1}]}, "links.0.eps: is an option of mode"),
        ("groups", {}, "mode groups needs at least one pattern"),
        ("groups", {"groups": {"*": {"mode": "agc"}}}, "groups.*.mode: must be one of"),
    ],
)
def test_what_is_wrong_inside_is_refused(kind, options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build(kind, **options)
    assert str(raised.value).startswith(message)


def test_a_restricted_layout_holds_its_part_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    layout = Layout.of_model(model)
    part = layout.restricted(["2.weight", "0.bias"])
    assert part.names == ["0.bias", "2.weight"]
    assert [shard.name for shard in part.shards] == ["0.bias", "2.weight"]
    assert part.heads == ("2.weight",)
    assert layout.restricted(["0.weight"]).heads == ()
