"""Units that ranks share, replicas, tied weights, absent gradients, and shards that are odd or empty.

Each step is compared with one process. Steps with ranks of one kind share a start.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.clip import Layout, build, total_norm
from runner.clip.shard import LayoutError
from tests.distributed.by_hand import NORM, Clip, Loop, assert_one_process, one_step
from tests.distributed.odd_models import MODELS, batch_for, make
from tests.ranks import run_ranks

INF: Clip = ("norm", 0.01, math.inf)
VALUE: Clip = ("value", 0.001, 2.0)
ADAPTIVE: Clip = ("adaptive", 0.01, 2.0)
EVERY = (NORM, INF, VALUE, ADAPTIVE)
SOME = (NORM, ADAPTIVE)
CUT_ODD = (NORM, ("norm", 0.02, math.inf), ("value", 0.05, 2.0), ("adaptive", 0.05, 2.0))
LINES = ("1f1b", "gpipe", "interleaved", "zero_bubble")


def asked(model: str, plugins: Any, clips: Any = (NORM,), exclude: Any = "auto") -> list[dict]:
    return [
        {"model": model, "plugin": plugin, "clip": clip, "exclude": exclude}
        for plugin in plugins
        for clip in clips
    ]


def all_but(model, wanted):
    """Names of the parameters that ``wanted`` does not choose, as a list of globs."""
    return tuple(n for n, p in MODELS[model]().named_parameters() if not wanted(n, p))


UNITS = {
    ("gpt", "tensor"): [lambda n, p: n.endswith("down.weight"), lambda n, p: n.endswith("up.bias")],
    ("gpt", "fsdp"): [lambda n, p: p.ndim == 1],
    ("conv", "fsdp"): [lambda n, p: n == "2.weight"],  # a transposed convolution
}
"""Of models under plugins, which parameters have units that a shard boundary cuts."""


def cut_by(plugin: str) -> list[dict]:
    return [
        each
        for (model, of), choices in UNITS.items()
        for wanted in choices
        if of == plugin
        for each in asked(model, (plugin,), (ADAPTIVE,), all_but(model, wanted))
    ]


HEADS = {"gpt": "head.weight", "tied": "embed.weight"}
NOT_THE_NORM = ("norm.weight",)
STARTS: dict[str, tuple[int, list[dict]]] = {
    "data parallelism": (
        2,
        [
            *asked("forked", ("data", "zero1", "fsdp", "zero2"), EVERY),
            *asked("adapter", ("fsdp", "zero1", "ddp", "data")),
            *asked("tied", ("fsdp", "zero1"), SOME, NOT_THE_NORM),
            *asked("tied", ("fsdp",), (("adaptive", 1e-6, 2.0),)),
            *asked("unrouted", ("moe", "zero3"), SOME),
            *asked("odd", ("fsdp",), CUT_ODD, ("head.bias",)),
            *cut_by("fsdp"),
        ],
    ),
    "split layers": (
        2,
        [
            *asked("gpt", ("some_split",), EVERY),
            *asked("gpt", ("tensor", "sequence"), (NORM, ("value", 0.003, 2.0))),
            *asked("adapter", ("tensor",)),
            *asked("tied", ("tensor", "sequence"), SOME, NOT_THE_NORM),
            *asked("tied", ("tensor",), (("adaptive", 1e-6, 2.0),)),
            *asked("odd", ("tensor",), CUT_ODD, ("head.bias",)),
            *cut_by("tensor"),
        ],
    ),
    "stages": (
        2,
        [
            *asked("first_frozen", ("1f1b",), EVERY),
            *asked("second_frozen", ("1f1b",), EVERY),
            *asked("first_frozen", LINES[1:]),
            *asked("second_frozen", LINES[1:]),
            *asked("adapter", ("1f1b",), EVERY),
            *asked("tied", LINES, SOME, NOT_THE_NORM),
            *asked("gpt", LINES[::3], (("adaptive", 1e-6, 2.0),)),
            *asked("tied", LINES[::3], (("adaptive", 1e-6, 2.0),)),
            # Each stage has some of these names; each of them matches on every rank.
            *asked("gpt", ("1f1b",), (ADAPTIVE,), ("blocks.3.*", "head.weight")),
            *asked("gpt", ("interleaved",), (ADAPTIVE,), ("embed.*", "blocks.0.attention.*")),
        ],
    ),
    "four ranks": (
        4,
        [
            *asked("tied", ("1f1b", "hybrid", "hybrid_zero1", "hybrid_fsdp_pp"), exclude=()),
            *asked("tied", ("hybrid_fsdp_tp",), SOME, NOT_THE_NORM),
            *asked("odd", ("fsdp", "tensor"), CUT_ODD, ("head.bias",)),
            # A vocabulary smaller than the ranks.
            *asked("few_words", ("tensor",), SOME),
            *asked("few_words_tied", ("tensor",), SOME),
        ],
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_steps_are_those_of_one_process(start):
    world, steps = STARTS[start]
    ranks = assert_one_process(world, steps)
    every = [sorted(name for name, _ in MODELS[model]().named_parameters()) for model in HEADS]
    for number, each in enumerate(steps):
        model, plugin, exclude = each["model"], each["plugin"], each["exclude"]
        results = [rank[number] for rank in ranks]
        # What the comparison needs in order to say something.
        if model == "odd":
            assert all(result["metrics"][3] == 1.0 for result in results)
            assert world < 4 or any(result["empty"] for result in results)
        present = [result["present"] for result in results]
        if plugin == "1f1b" and model in ("first_frozen", "second_frozen", "adapter"):
            assert [here == 0 for here in present] == [model == "first_frozen"] + [
                model != "first_frozen"
            ]
        if model == "unrouted":
            unused = [g for n, g in results[0]["gradients"].items() if ".experts.4." in n]
            assert unused
            assert not any(gradient.any() for gradient in unused)
        if each in cut_by(plugin):
            chosen = {n for n, _ in MODELS[model]().named_parameters()} - {*exclude}
            assert chosen <= results[0]["cut"]
            assert results[0]["metrics"][4] > 0
        if each["clip"][1] == 1e-6:
            assert {result["heads"] for result in results} == {(HEADS[model],)}
        if model in HEADS:
            assert all(result["names"] in every for result in results)


def test_the_heads_gradient_is_that_of_a_step_that_clips_nothing():
    clipped, free = (
        one_step("gpt", None, clip)["gradients"]["head.weight"]
        for clip in (("adaptive", 1e-6, 2.0), ("none", None, 2.0))
    )
    torch.testing.assert_close(clipped, free, rtol=1e-9, atol=0)


# -- thresholds


def at_thresholds(plugins):
    return [at_thresholds_of(plugin) for plugin in plugins]


def at_thresholds_of(plugin):
    """Return for each threshold whether a bit changed, the metrics, and the norm afterwards."""
    model = "moe" if plugin == "moe" else "gpt"
    loop, batch = Loop(plugin, make(model)), batch_for(model)

    def ready():
        loop.optimizer.zero_grad()
        loop.backward(*batch)
        loop.optimizer.unscale()

    ready()
    norm = total_norm(loop.layout)
    found = []
    for threshold in (2 * norm, norm, math.inf, norm * (1 - 1e-9), 1e-30):
        ready()
        before = loop.own_gradients()
        outcome = loop.clip(("norm", threshold, 2.0))
        same = all(map(torch.equal, before, loop.own_gradients()))
        found.append((threshold, same, outcome.metrics[:5], total_norm(loop.layout)))
    ready()
    for threshold in (0.0, -1.0):
        with pytest.raises(ValueError, match="above 0"):
            loop.optimizer.clip_grad_by_norm(max_norm=threshold)
    # What was refused did not use up the step.
    assert loop.optimizer.clip_grad_by_norm(max_norm=norm / 2).item() == pytest.approx(norm)
    return norm, found


def test_thresholds_above_at_and_below_the_norm():
    for rank in run_ranks(at_thresholds, 2, ["fsdp", "tensor", "1f1b", "moe", "zero1"]):
        for norm, found in rank:
            for threshold, same, metrics, after in found:
                assert same == (threshold >= norm)
                if same:
                    assert metrics == (norm, norm, 1.0, 0.0, 0.0)
                    assert after == norm
                    continue
                assert metrics[:4] == pytest.approx((norm, threshold, threshold / norm, 1.0), 1e-12)
                assert after == pytest.approx(threshold, rel=1e-12)


# -- what is refused


def refused():
    """Messages about globs that match nothing, and about layouts that are wrong about a shard."""
    told = []
    for plugin in ("1f1b", "fsdp"):
        with pytest.raises(ValueError, match=r"clip\.exclude=blocks\.9\.\*") as error:
            loop = Loop(plugin, make("gpt"))
            build("adaptive", threshold=0.1, exclude=("blocks.9.*",)).bind(loop.layout)
        told.append(str(error.value))
    model = make("gpt")
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    loop = Loop("tensor", model)
    world, ranks = dist.group.WORLD, dist.get_world_size()
    for name in ("norm.weight", "blocks.1.mlp.down.bias", "head.weight"):
        for wrong in (1, 2 * ranks):
            with pytest.raises(LayoutError, match=name):
                Layout.of_sharded(
                    loop.raw,
                    world,
                    whole,
                    lambda own, name=name, wrong=wrong: wrong if own == name else ranks,
                )
    Layout.of_sharded(loop.raw, world, whole)
    return told


def test_a_glob_without_a_match_and_a_wrong_number_of_replicas_are_named_on_all_ranks():
    first, second = run_ranks(refused, 2)
    assert first == second


# -- a parameter or a module that is met twice


def given_twice(plugins):
    """Norms of layouts in which parameters are met twice, under plugins that replace them."""
    norms = []
    for plugin in plugins:
        model = make("gpt")
        model.again = model.blocks[0]
        loop = Loop(plugin, model)
        loop.backward(*batch_for("gpt"))
        loop.optimizer.unscale()
        twice = Layout(loop.layout.shards * 2, loop.layout.group)
        norms.append((total_norm(loop.layout), total_norm(twice), len(loop.layout.shards)))
    return norms


def test_a_module_under_two_names_counts_once():
    [(wanted, _, shards)] = given_twice([None])
    for rank in run_ranks(given_twice, 2, ["fsdp", "tensor", "zero1"]):
        for norm, twice, here in rank:
            assert norm == twice == pytest.approx(wanted, rel=1e-12)
            assert here == shards
