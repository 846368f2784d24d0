"""Units that ranks share, replicas, tied weights, absent gradients, odd and empty shards.

Each step is compared with one process. Steps with ranks of one kind share a start.
"""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runner.clip import build
from runner.gradients import Layout, total_norm
from runner.gradients.shard import LayoutError
from runner.parallel.tensor_styles import PlanError
from tests.distributed import cases
from tests.distributed.by_hand import (
    MODELS,
    NORM,
    PLAN,
    Clip,
    Loop,
    assert_one_process,
    batch_for,
    make,
)
from tests.ranks import run_ranks

VALUE: Clip = ("value", 0.001, 2.0)
ADAPTIVE: Clip = ("adaptive", 0.01, 2.0)
ALL_UNITS: Clip = ("adaptive", 1e-6, 2.0)
BY_PLAN: Clip = ("adaptive", 0.02, 2.0)
SOME = (NORM, ADAPTIVE)
ODD = (NORM, ("norm", 0.02, math.inf), ("value", 0.05, 2.0), ("adaptive", 0.05, 2.0))
LINES = ("1f1b", "gpipe", "interleaved", "zero_bubble")


def requests_of(model, plugins, clips=(NORM,), exclude="auto"):
    return [
        {"model": model, "plugin": plugin, "clip": clip, "exclude": exclude}
        for plugin in plugins
        for clip in clips
    ]


def only(model, chosen):
    """Globs of all parameters but those that ``chosen`` chooses."""
    return tuple(n for n, p in MODELS[model]().named_parameters() if not chosen(n, p))


CUT = {
    "fsdp": [
        *requests_of("gpt", ("fsdp",), (ADAPTIVE,), only("gpt", lambda n, p: p.ndim == 1)),
        # A transposed convolution.
        *requests_of("conv", ("fsdp",), (ADAPTIVE,), only("conv", lambda n, p: n == "2.weight")),
    ],
    "tensor": [
        *requests_of("gpt", ("tensor",), (ADAPTIVE,), only("gpt", lambda n, p: "down.weight" in n)),
        *requests_of("gpt", ("tensor",), (ADAPTIVE,), only("gpt", lambda n, p: "up.bias" in n)),
    ],
}
"""By plugin, steps that clip parameters alone whose units a shard boundary cuts."""

HEADS = {"gpt": "head.weight", "tied": "embed.weight"}
STARTS = {
    "data parallelism": [
        *requests_of("tied", ("fsdp", "zero1"), SOME, ("norm.weight",)),
        *requests_of("tied", ("fsdp",), (ALL_UNITS,)),
        *requests_of("unrouted", ("moe", "zero3"), SOME),
        *requests_of("odd", ("fsdp",), ODD, ("head.bias",)),
        *CUT["fsdp"],
    ],
    "split layers": [
        *requests_of("gpt", ("some_split",), (NORM, ADAPTIVE)),
        *requests_of("gpt", ("sequence",), (VALUE,)),
        *requests_of("tied", ("tensor", "sequence"), SOME, ("norm.weight",)),
        *requests_of("tied", ("tensor",), (ALL_UNITS,)),
        *requests_of("odd", ("tensor",), ODD, ("head.bias",)),
        *requests_of("heads", ("planned", "gathered"), (BY_PLAN,), ()),
        *CUT["tensor"],
    ],
    "stages": [
        *requests_of("tied", LINES[2:], SOME, ("norm.weight",)),
        *(step for model in HEADS for step in requests_of(model, LINES[::3], (ALL_UNITS,))),
        # Each stage has some of these names; each of them matches on every rank.
        *requests_of("gpt", ("1f1b",), (ADAPTIVE,), ("blocks.3.*", "head.weight")),
        *requests_of("gpt", ("interleaved",), (ADAPTIVE,), ("embed.*", "blocks.0.attention.*")),
    ],
    "four ranks": [
        *requests_of("tied", ("hybrid_fsdp_tp",), SOME, ("norm.weight",)),
        *requests_of("odd", ("fsdp", "tensor"), ODD[1::2], ("head.bias",)),
        *requests_of("heads", ("planned", "gathered", "planned_zero3"), (BY_PLAN,), ()),
        # A vocabulary smaller than the ranks.
        *(
            step
            for model in ("few_words", "few_words_tied")
            for step in requests_of(model, ("tensor",), SOME)
        ),
    ],
}


@pytest.mark.parametrize("start", STARTS)
def test_steps_are_those_of_one_process(start):
    world = 4 if start == "four ranks" else 2
    ranks = assert_one_process(world, STARTS[start])
    # What the comparison needs in order to say something.
    for step, results in zip(STARTS[start], zip(*ranks, strict=True), strict=True):
        model = step["model"]
        plugin = step["plugin"]
        names = [name for name, _ in MODELS[model]().named_parameters()]
        assert all(result["names"] == sorted(names) for result in results)
        if model in ("odd", "heads"):
            assert all(result["metrics"][3] == 1.0 for result in results)
        if model == "odd":
            assert world == 2 or any(result["empty"] for result in results)
        if model == "unrouted":
            unused = [g for n, g in results[0]["gradients"].items() if ".experts.4." in n]
            assert unused
            assert not any(gradient.any() for gradient in unused)
        if step in CUT.get(plugin, ()):
            assert {*names} - {*step["exclude"]} <= results[0]["cut"]
            assert results[0]["metrics"][4] > 0
        if step["clip"] == ALL_UNITS:
            assert {result["heads"] for result in results} == {(HEADS[model],)}


def partial_sums(loop):
    """Names of gradients that are not added up over ranks."""
    gradients = [(n, p.grad) for n, p in loop.raw.named_parameters() if isinstance(p.grad, DTensor)]
    return {
        name
        for name, grad in gradients
        if any(placement.is_partial() for placement in grad.placements)
    }


def partial_sums_are_refused():
    loop = Loop("sequence", make("gpt"))
    loop.backward(*batch_for("gpt"))
    # What works on a part of the sequence: norms, and the biases of row-wise layers.
    assert {"norm.weight", "blocks.0.mlp.down.bias"} <= partial_sums(loop)
    with pytest.raises(TypeError, match="not added up yet"):
        total_norm(loop.layout)
    loop.optimizer.clip_grad_by_norm(0.1)
    assert not partial_sums(loop)


def wrong_plans_are_refused():
    loop = Loop(cases.Tensors(tp_plan=PLAN), make("heads"))
    for token in (17, -1):
        with pytest.raises(IndexError, match="index out of range"):
            loop.model(torch.tensor([[2, token, 3]]))
    loop.backward(*batch_for("heads"))
    with pytest.raises(PlanError, match=r"norm.weight: .* replicated_with_grad_allreduce"):
        loop.stepped()


def globs_without_a_match_on_any_rank_are_refused():
    loop = Loop("1f1b", make("gpt"))
    with pytest.raises(ValueError, match=r"clip\.exclude=blocks\.9\.\*"):
        build("adaptive", threshold=0.1, exclude=("blocks.9.*",)).bind(loop.layout)


def wrong_numbers_of_replicas_are_refused():
    loop = Loop("tensor", make("gpt"))
    whole = {name: parameter.numel() for name, parameter in make("gpt").named_parameters()}
    ranks = dist.get_world_size()
    for name in ("norm.weight", "blocks.1.mlp.down.bias", "head.weight"):
        for wrong in (1, 2 * ranks):
            copies = dict.fromkeys(whole, ranks) | {name: wrong}
            with pytest.raises(LayoutError, match=name):
                Layout.of_sharded(loop.raw, dist.group.WORLD, whole, copies.__getitem__)
    Layout.of_sharded(loop.raw, dist.group.WORLD, whole, lambda name: ranks)


REFUSALS = [
    partial_sums_are_refused,
    wrong_plans_are_refused,
    globs_without_a_match_on_any_rank_are_refused,
    wrong_numbers_of_replicas_are_refused,
]


def all_refusals():
    """The errors of refusals that are wrong or missing, by their names."""
    errors = {}
    for refusal in REFUSALS:
        try:
            refusal()
        except BaseException as error:
            errors[refusal.__name__] = repr(error)
    return errors


@cache
def refusals_on_two_ranks():
    return run_ranks(all_refusals, 2)


@pytest.mark.xdist_group("refusals of norms")  # the ranks run once
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.__name__)
def test_what_would_make_a_norm_over_ranks_wrong_is_refused(refusal):
    for errors in refusals_on_two_ranks():
        assert errors.get(refusal.__name__) is None


def norms_met_twice():
    """Norms of models with a module under two names, and of layouts with each shard twice."""
    norms = []
    for plugin in ("fsdp", "tensor", "zero1"):
        model = make("gpt")
        model.again = model.blocks[0]
        loop = Loop(plugin, model)
        loop.backward(*batch_for("gpt"))
        loop.optimizer.unscale()
        twice = Layout(loop.layout.shards * 2, loop.layout.group)
        norms += [total_norm(loop.layout).item(), total_norm(twice).item()]
    return norms


def test_a_module_under_two_names_counts_once():
    first, second = run_ranks(norms_met_twice, 2)
    assert first == second
    loop = Loop(None, make("gpt"))
    loop.backward(*batch_for("gpt"))
    loop.optimizer.unscale()
    assert first == pytest.approx([total_norm(loop.layout).item()] * 6, rel=1e-12)


def reduced():
    """Vectors of this rank, and their sum and maximum over ranks."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    vector = torch.randn(1001, generator=generator, dtype=torch.float64)
    vector[rank] = math.nan if rank == 1 else math.inf
    layout = Layout([], dist.group.WORLD)
    return vector, layout.sum(vector), layout.max(vector)


def test_vectors_are_reduced_to_the_same_bits_on_every_rank():
    ranks = run_ranks(reduced, 3)
    vectors = torch.stack([vector for vector, _, _ in ranks])
    for _, total, largest in ranks:
        assert torch.equal(total.view(torch.int64), ranks[0][1].view(torch.int64))
        assert torch.equal(largest.view(torch.int64), ranks[0][2].view(torch.int64))
    _, total, largest = ranks[0]
    torch.testing.assert_close(total, vectors.sum(0), rtol=1e-14, atol=1e-14, equal_nan=True)
    # NaN of any rank is kept, which a backend's own maximum may lose.
    torch.testing.assert_close(largest, vectors.amax(0), rtol=0, atol=0, equal_nan=True)
    assert largest[1].isnan()
    assert largest[0] == math.inf
