"""Modes inside of modes: chains of modes, and groups of parameters with a mode each."""

import copy
import math
from functools import partial

import pytest
import torch

from runner.clip import Norms, build
from runner.clip.nested import ChainClip, ScheduleClip
from runner.clip.norm import NormClip
from runner.gradients import Layout
from runner.gradients.layout import OptionError
from tests.clip.reference import on, refused
from tests.clip.test_tensor_modes import (
    AdaGC,
    clamped,
    give,
    layout_of,
    length,
    limited,
    parameters,
    recorded,
    steps_of,
    together,
)

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
CHAIN = {"mode": "chain", "links": [9.0, SINGLE["none"], 2.0]}
MANY = {
    "adagc": ADAGC,
    "chain": {"mode": "chain", "links": [VALUE, ADAGC, 2.0]},
    "coefficients": {"mode": "chain", "links": [ADAGC, SINGLE["per_parameter"], 1.0]},
    "groups": {
        "mode": "groups",
        "groups": {"blocks.1.*": 0.5, "blocks.*": ADAGC, "late.*": VALUE},
    },
    "parts": {"mode": "groups", "groups": {"blocks.1.*": VALUE, "*": CHAIN}},
}


def made_of(node):
    return build(node["mode"], **{k: v for k, v in node.items() if k != "mode"})


def exact(decision):
    return [float(x).hex() for x in decision.metrics], bool(decision.finite)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("around", ["chain", "groups"])
@pytest.mark.parametrize("name", SINGLE)
def test_a_mode_alone_in_another_one_decides_as_by_itself(name, around, kept):
    node = SINGLE[name]
    option = {"links": [node]} if around == "chain" else {"groups": {"*": node}}
    by_itself = made_of(node)
    inside = build(around, **option)
    ours = parameters()
    theirs = parameters()
    layout = layout_of(ours)
    their_layout = layout_of(theirs)
    by_itself.bind(their_layout)
    inside.bind(layout)
    clipped = set()
    for gradients in recorded(40, seed=4):
        give(theirs, gradients)
        give(ours, gradients)
        with on(kept):
            expected = by_itself.clip(their_layout)
            got = inside.clip(layout)
        clipped.add(float(expected.clipped))
        if not bool(expected.finite):
            assert (bool(got.finite), got.inner) == (False, () if not kept else got.inner)
            continue
        assert exact(got) == exact(expected)
        for key, parameter in theirs.items():
            if parameter.grad is not None:
                assert torch.equal(ours[key].grad.nan_to_num(9), parameter.grad.nan_to_num(9))
        kind, label, numbers = got.inner[0] if got.inner else (None, None, got)
        assert exact(numbers)[0] == exact(expected)[0]
        assert (kind, label) in {("link", "0"), ("group", "*"), (None, None)}
    assert clipped == ({0.0} if name == "none" else {0.0, 1.0})


NORM = {limit: partial(limited, limit=limit) for limit in (9.0, 3.0, 2.0, 1.0)}
CLAMP = partial(clamped, limit=1.5)
OURS = partial(AdaGC, 1.3, 6.0, 0.9, 5)
CHAINS = {
    "norm, none, norm": ([3.0, {"mode": "none"}, 2.0], lambda: [NORM[3.0], dict, NORM[2.0]]),
    "value, norm": ([VALUE, 2.0], lambda: [CLAMP, NORM[2.0]]),
    "adagc, norm": ([ADAGC, 2.0], lambda: [OURS(), NORM[2.0]]),
    "norm, adagc": ([9.0, ADAGC], lambda: [NORM[9.0], OURS()]),
    "norm, value, adagc, norm": (
        [9.0, VALUE, ADAGC, 1.0],
        lambda: [NORM[9.0], CLAMP, OURS(), NORM[1.0]],
    ),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_one_mode_after_the_other(name, kept):
    links, rules = CHAINS[name]
    mode = build("chain", links=links)
    for decision, stages in steps_of(mode, recorded(60, seed=5), rules(), kept=kept):
        assert [i.name for i in decision.inner] == [str(i) for i in range(len(links))]
        found = [float(i.decision.norm_clipped) for i in decision.inner]
        assert found == pytest.approx([together(stage) for stage in stages[1:]], rel=1e-10)
        assert float(decision.clipped) == max(float(i.decision.clipped) for i in decision.inner)


@pytest.mark.parametrize("kept", [False, True])
def test_an_infinite_gradient_that_a_link_would_clamp_is_skipped_by_all_links(kept):
    made = parameters()
    layout = layout_of(made)
    links = [{"mode": "value", "threshold": 1.0}, {**ADAGC, "warmup_steps": 0}]
    mode = build("chain", links=links)
    mode.bind(layout)
    good = recorded(1)[0]
    histories = []
    for each in (good, {**good, "head.weight": [math.inf] * 8}, good):
        give(made, each)
        with on(kept):
            decision = mode.clip(layout)
        assert bool(decision.finite) == (each is good)
        histories.append(mode.state_dict()["links"]["1"]["memory"])
    assert torch.equal(histories[0]["gamma"], histories[1]["gamma"])
    assert [float(h["step"]) for h in histories] == [1.0, 1.0, 2.0]


def test_links_that_scale_the_whole_are_one_coefficient_that_a_step_may_take():
    made = parameters()
    layout = layout_of(made)
    mode = build("chain", links=[4.0, {"mode": "none"}, 1.0])
    give(made, {name: [3.0] + [0.0] * (p.numel() - 1) for name, p in made.items()})
    decision = mode.decide(layout, mode.measure(layout))
    assert mode.reads == "norm"
    assert mode.by_factors
    assert decision.scales is None
    assert decision.coef == pytest.approx(1 / math.sqrt(45), rel=1e-12)
    each = build("chain", links=[{**ADAGC, "warmup_steps": 0}, 9.0, SINGLE["per_parameter"], 0.5])
    decision = each.decide(layout, each.measure(layout))
    assert each.by_factors
    assert each.apply(layout, decision).norm_clipped == pytest.approx(0.5)
    assert together({n: p.grad.tolist() for n, p in made.items()}) == pytest.approx(0.5)


class Twice:
    by_norm_alone = False

    def measure(self, layout, each=False):
        return Norms.measured(2 * super().measure(layout, each).total)


class TwiceInSchedule(Twice, ScheduleClip): ...


class TwiceInChain(Twice, ChainClip): ...


@pytest.mark.parametrize(
    ("kind", "options"),
    [("TwiceInSchedule", {"of": "norm", "threshold": 4.0}), ("TwiceInChain", {"links": [4.0]})],
)
def test_a_link_of_ones_own_decides_by_what_it_measures(kind, options):
    made = parameters()
    give(made, {name: [3.0] + [0.0] * (p.numel() - 1) for name, p in made.items()})
    norm = together({n: p.grad.tolist() for n, p in made.items()})
    own = {"_target_": f"{__name__}.{kind}", **options}
    decision = build("chain", links=[100.0, own]).clip(layout_of(made))
    assert decision.inner[1].decision.norm == pytest.approx(2 * norm)


def test_a_mode_that_measures_itself_has_to_say_that_the_norm_alone_is_not_enough():
    with pytest.raises(TypeError, match="measure of its own: add by_norm_alone = False"):
        type("Silent", (NormClip,), {"measure": Twice.measure})


@pytest.mark.parametrize("kept", [False, True])
def test_groups_are_clipped_by_themselves(kept):
    """The first match counts, and what no pattern matches (``late.weight``) is not clipped."""
    ours = AdaGC(1.3, 2.0, 0.9, 5)

    def rule(each):
        blocks = ours({n: each[n] for n in ("blocks.0.a", "blocks.0.b")})
        return each | blocks | limited({"head.weight": each["head.weight"]}, 1.5)

    groups = {"*.1.*": "none", "blocks.*": {**ADAGC, "absolute": 2.0}, "head.*": 1.5}
    mode = build("groups", groups=groups)
    for decision, (each, _) in steps_of(mode, recorded(80, seed=6), [rule], kept=kept):
        assert [(i.kind, i.name) for i in decision.inner] == [
            ("group", name) for name in ("*.1.*", "blocks.*", "head.*", "rest")
        ]
        inner = {i.name: i.decision for i in decision.inner}
        head = length(each["head.weight"])
        assert float(inner["head.*"].norm) == pytest.approx(head, rel=1e-10)
        changed = [float(inner[name].clipped) for name in ("blocks.*", "head.*")]
        assert float(decision.fraction) == sum(changed) / 2
        assert float(inner["*.1.*"].coef) == float(inner["rest"].coef) == 1.0


@pytest.mark.parametrize("name", MANY)
def test_histories_go_on_in_any_order_of_names(name):
    """To the bit in the same order; in another one, sums are rounded differently."""
    params = parameters()
    layout = layout_of(params)
    reordered_layout = Layout([*reversed(layout.shards)])
    whole, resumed, reordered = (made_of(copy.deepcopy(MANY[name])) for _ in range(3))
    whole.bind(layout)
    resumed.bind(layout)
    reordered.bind(reordered_layout)

    def clip(mode, layout, gradients):
        give(params, gradients)
        return mode.clip(layout)

    for number, gradients in enumerate(recorded(100, seed=7)):
        if number == 50:
            resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
            reordered.load_state_dict(copy.deepcopy(whole.state_dict()))
        expected = clip(whole, layout, gradients)
        if number < 50:
            continue
        assert exact(clip(resumed, layout, gradients)) == exact(expected)
        near = pytest.approx([*map(float, expected.metrics)], rel=1e-12, nan_ok=True)
        assert [*map(float, clip(reordered, reordered_layout, gradients).metrics)] == near
    if name == "adagc":
        assert whole.state_dict()["memory"]["step"] == 98  # Two of them are not finite


def test_thresholds_of_links_are_loaded_unless_the_run_keeps_its_own():
    before = build("chain", links=[2.0, ADAGC])
    after = build("chain", links=[5.0, ADAGC])
    state = before.state_dict()
    del state["links"]["0"]["threshold"]
    after.load_state_dict(state)
    assert [mode.threshold for mode in after.modes.values()] == [5.0, 1.3]
    after.load_state_dict(before.state_dict())
    assert [mode.threshold for mode in after.modes.values()] == [2.0, 1.3]


def test_a_pattern_that_matches_nothing_is_an_error_but_for_a_last_one_for_everything_else():
    made = parameters()
    for groups, words in (
        ({"heaad.*": 1.0}, "clip.groups=heaad.*|blocks.0.a"),
        ({"*": 1.0, "head.*": 2.0}, "head.*|patterns before it"),
        (
            {"*": {"mode": "adaptive", "threshold": 1.0, "exclude": ["foo.*"]}},
            "clip.groups.*.exclude=foo.*",
        ),
    ):
        mode = build("groups", groups=groups)
        refused(OptionError, words, mode.bind, layout_of(made))
    give(made, recorded(1)[0])
    mode = build("groups", groups={"?*": 1.0, "*": "none"})
    assert [i.name for i in mode.clip(layout_of(made)).inner] == ["?*"]
