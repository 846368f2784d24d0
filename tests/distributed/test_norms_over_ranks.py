"""Thresholds, units that ranks share, replicas, tied weights and shards that are odd or empty."""

import math

import pytest
import torch
import torch.distributed as dist

from runner.clip import Layout, build, total_norm
from runner.clip.shard import LayoutError
from tests.distributed.by_hand import NORM, Loop, assert_one_process, one_step
from tests.distributed.odd_models import MODELS, batch_for, make
from tests.ranks import run_ranks

MODEL_OF = {"moe": "moe"}
"""Which model a plugin is tried on; ``gpt`` where nothing is said."""


# -- thresholds


def at_thresholds(plugins):
    return [at_thresholds_of(plugin) for plugin in plugins]


def at_thresholds_of(plugin):
    """Return for each threshold whether a bit changed, the metrics, and the norm afterwards."""
    model = MODEL_OF.get(plugin, "gpt")
    loop, batch = Loop(plugin, make(model)), batch_for(model)

    def ready():
        loop.optimizer.zero_grad()
        loop.backward(*batch)
        loop.optimizer.unscale()

    ready()
    norm = total_norm(loop.layout)
    found = {}
    for name, threshold in {
        "above": 2 * norm,
        "at": norm,
        "below": norm * (1 - 1e-9),
        "tiny": 1e-30,
        "infinite": math.inf,
    }.items():
        ready()
        before = loop.own_gradients()
        outcome = loop.clip(("norm", threshold, 2.0))
        after = loop.own_gradients()
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found[name] = same, outcome.metrics[:5], total_norm(loop.layout), threshold
    refused = []
    ready()
    for threshold in (0.0, -1.0):
        with pytest.raises(ValueError, match="above 0"):
            loop.optimizer.clip_grad_by_norm(max_norm=threshold)
        refused.append(threshold)
    # What was refused did not use up the step.
    assert loop.optimizer.clip_grad_by_norm(max_norm=norm / 2).item() == pytest.approx(norm)
    return found, refused


def test_thresholds_above_at_and_below_the_norm():
    plugins = ["fsdp", "tensor", "1f1b", "moe", "zero1"]
    for rank in run_ranks(at_thresholds, 2, plugins):
        for plugin, (found, refused) in zip(plugins, rank, strict=True):
            for name in ("above", "at", "infinite"):
                same, (norm, clipped_norm, coef, clipped, fraction), after, _ = found[name]
                assert same, (plugin, name)
                assert (coef, clipped, fraction) == (1.0, 0.0, 0.0)
                assert norm == clipped_norm == after
            for name in ("below", "tiny"):
                same, (norm, clipped_norm, coef, clipped, _), after, threshold = found[name]
                assert not same, (plugin, name)
                assert clipped == 1.0
                assert coef == pytest.approx(threshold / norm, rel=1e-12)
                assert clipped_norm == pytest.approx(threshold, rel=1e-12)
                assert after == pytest.approx(threshold, rel=1e-12)
            assert refused == [0.0, -1.0]


# -- adaptive clipping


def all_but(model, wanted):
    """Names of the parameters that ``wanted`` does not choose, as a list of globs."""
    return tuple(n for n, p in MODELS[model]().named_parameters() if not wanted(n, p))


UNITS = {
    "row_parallel_weights": ("gpt", "tensor", lambda n, p: n.endswith("down.weight")),
    "vectors_under_fsdp": ("gpt", "fsdp", lambda n, p: p.ndim == 1),
    "vectors_of_a_split_layer": ("gpt", "tensor", lambda n, p: n.endswith("up.bias")),
    "transposed_convolution_under_fsdp": ("conv", "fsdp", lambda n, p: n == "2.weight"),
}


def test_units_cut_by_a_shard_boundary():
    asked = [
        {"model": m, "plugin": p, "clip": ("adaptive", 0.01, 2.0), "exclude": all_but(m, wanted)}
        for m, p, wanted in UNITS.values()
    ]
    ranks = assert_one_process(2, asked)
    for number, (model, _, wanted) in enumerate(UNITS.values()):
        result = ranks[0][number]
        chosen = {n for n, p in MODELS[model]().named_parameters() if wanted(n, p)}
        assert chosen <= set(result["cut"]), "the test needs units that several ranks share"
        clipped = result["figures"][4]
        assert clipped > 0, "nothing was clipped: the comparison says nothing"


def test_globs_match_parameters_of_other_stages():
    # Each stage has some of these names; each of them matches on every rank.
    asked = [
        {"model": model, "plugin": plugin, "clip": ("adaptive", 0.01, 2.0), "exclude": globs}
        for model, plugin, globs in [
            ("gpt", "1f1b", ("blocks.3.*", "head.weight")),
            ("gpt", "1f1b", ("embed.*", "blocks.0.attention.*")),
            ("tied", "1f1b", ("embed.weight", "*.bias*", "norm.*")[:1]),
            ("gpt", "interleaved", ("blocks.2.*",)),
        ]
    ]
    for rank in assert_one_process(2, asked):
        everything = sorted(name for name, _ in MODELS["gpt"]().named_parameters())
        assert rank[0]["names"] == everything


def test_the_head_is_left_out_wherever_it_lives():
    asked = [
        {"model": model, "plugin": plugin, "clip": ("adaptive", 1e-6, 2.0)}
        for plugin in ("1f1b", "zero_bubble", "fsdp", "tensor")
        for model in ("gpt", "tied")
    ]
    ranks = assert_one_process(2, asked)
    for rank in ranks:
        for each, result in zip(asked, rank, strict=True):
            head = "head.weight" if each["model"] == "gpt" else "embed.weight"
            assert result["heads"] == (head,)
    # The head's gradient is that of a step that clips nothing.
    free = one_step("gpt", None, ("none", None, 2.0))
    torch.testing.assert_close(
        ranks[0][0]["gradients"]["head.weight"], free["gradients"]["head.weight"], rtol=1e-9, atol=0
    )


def unmatched(plugins):
    said = []
    for plugin in plugins:
        loop = Loop(plugin, make("gpt"))
        with pytest.raises(ValueError, match=r"clip\.exclude=blocks\.9\.\* matches no") as error:
            build("adaptive", threshold=0.1, exclude=("blocks.9.*",)).bind(loop.layout)
        said.append(str(error.value))
    return said


def test_a_glob_that_matches_on_no_stage_is_an_error_on_all():
    ranks = run_ranks(unmatched, 2, ["1f1b", "fsdp"])
    assert ranks[0] == ranks[1]


# -- replicas


def misdeclared():
    """What is said about a layout that is wrong about one parameter."""
    said = {}
    model = make("gpt")
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    loop = Loop("tensor", model)
    world, ranks = dist.group.WORLD, dist.get_world_size()
    for name in ("norm.weight", "blocks.1.mlp.down.bias"):
        for wrong in (1, 2 * ranks):
            with pytest.raises(LayoutError) as error:
                Layout.of_sharded(
                    loop.raw,
                    world,
                    whole,
                    lambda own, name=name, wrong=wrong: wrong if own == name else ranks,
                )
            said[name, wrong] = str(error.value)
    with pytest.raises(LayoutError) as error:
        Layout.of_sharded(loop.raw, world, whole, lambda own: 1 if own == "head.weight" else ranks)
    said["head.weight", 1] = str(error.value)
    Layout.of_sharded(loop.raw, world, whole)
    return said


def test_replicas_count_once():
    asked = [
        {"model": model, "plugin": plugin, "clip": clip}
        for model in ("gpt", "odd")
        for plugin in ("tensor", "some_split", "sequence")
        for clip in (NORM, ("value", 0.003, 2.0))
        if not (model == "odd" and plugin != "tensor")
    ]
    assert_one_process(2, asked)


def test_a_wrong_number_of_replicas_is_named():
    for said in run_ranks(misdeclared, 2):
        for (name, ranks), message in said.items():
            assert name in message, (name, ranks)


# -- tied weights

TIED_ON = {
    2: ["tensor", "sequence", "fsdp", "zero1", "gpipe", "1f1b", "interleaved", "zero_bubble"],
    4: ["1f1b", "hybrid", "hybrid_zero1", "hybrid_fsdp_pp", "hybrid_fsdp_tp"],
}


@pytest.mark.parametrize("world", TIED_ON)
@pytest.mark.product(every=2)
def test_tied_weights_count_once(world):
    clips = [NORM, ("adaptive", 0.01, 2.0)] if world == 2 else [NORM]
    asked = [
        {"model": "tied", "plugin": p, "clip": c, "exclude": ("norm.weight",)}
        for p in TIED_ON[world]
        for c in clips
    ]
    assert_one_process(world, asked)


# -- odd and empty shards


def empty_here(plugin):
    loop = Loop(plugin, make("odd"))
    return [shard.name for shard in loop.layout.shards if shard.weight.numel() == 0]


@pytest.mark.parametrize("plugin", ["fsdp", "tensor"])
@pytest.mark.parametrize("world", [2, 4])
def test_uneven_and_empty_shards(plugin, world):
    # The share of elements that were clamped is exact, so padding is no element.
    clips = [NORM, ("norm", 0.02, math.inf), ("value", 0.05, 2.0), ("adaptive", 0.05, 2.0)]
    asked = [
        {"model": "odd", "plugin": plugin, "clip": c, "exclude": ("head.bias",)} for c in clips
    ]
    for rank in assert_one_process(world, asked):
        assert all(result["figures"][3] == 1.0 for result in rank), "every mode clips something"
    if world == 4:
        assert any(run_ranks(empty_here, world, plugin)), "no rank has an empty shard"


def test_a_vocabulary_smaller_than_the_ranks():
    asked = [
        {"model": model, "plugin": "tensor", "clip": clip}
        for model in ("few_words", "few_words_tied")
        for clip in (NORM, ("adaptive", 0.01, 2.0))
    ]
    assert_one_process(4, asked)
