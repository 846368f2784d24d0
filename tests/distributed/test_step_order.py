"""Clipping at the wrong time, and gradients that are not finite, zero or huge, under any plugin."""

import math

import pytest
import torch
import torch.distributed as dist

from runner.booster import NonFiniteGradient, StepOrderError
from runner.clip import total_norm
from tests.distributed.by_hand import NORM, Loop, cross_entropy, one_step, unlike_one_process
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

PLUGINS = {
    2: ["ddp", "fsdp", "zero1", "zero2", "tensor", "1f1b", "moe"],
    4: ["hybrid", "hybrid_zero1", "hybrid_fsdp_pp", "moe_dp"],
}
CUT = ("1f1b", "hybrid", "hybrid_zero1", "hybrid_fsdp_pp")


def model_for(plugin):
    return "moe" if plugin is not None and plugin.startswith("moe") else "gpt"


# -- order


def out_of_order(plugins):
    return [out_of_order_under(plugin) for plugin in plugins]


def out_of_order_under(plugin):
    """Check that calls in the wrong order are refused; then return the result of a right step."""
    model = model_for(plugin)
    loop, batch = Loop(plugin, make(model)), batch_for(model)
    clips = (
        lambda: loop.optimizer.clip_grad_by_norm(0.1),
        lambda: loop.optimizer.clip_grad_by_value(0.1),
        lambda: loop.clip(("adaptive", 0.1, 2.0)),
    )

    def refused(because):
        for clip in clips:
            with pytest.raises(StepOrderError, match=because):
                clip()

    refused("no backward pass")
    with loop.booster.no_sync(loop.model, loop.optimizer):
        loop.backward(*batch)
        refused("no_sync")
    refused("no_sync")
    with loop.booster.no_sync(loop.model, loop.optimizer):
        loop.backward(*batch)
    refused("no_sync")
    loop.backward(*batch)
    loop.clip(NORM)
    refused("already")
    with pytest.raises(StepOrderError, match="accumulate"):
        loop.backward(*batch)
    loop.optimizer.zero_grad()
    refused("no backward pass")

    if loop.model.pipeline is None:
        with pytest.raises(RuntimeError, match="PipelineParallelPlugin"):
            loop.booster.execute_pipeline(iter([batch]), loop.model, cross_entropy, loop.optimizer)
    else:
        with pytest.raises(RuntimeError, match="execute_pipeline"):
            loop.model(batch[0])

    with loop.booster.no_sync(loop.model, loop.optimizer):
        loop.backward(*batch, 0.25)
    loop.backward(*batch, 0.75)
    figures = [float(figure) for figure in loop.clip(NORM).metrics]
    gradients = loop.gradients()
    taken = loop.optimizer.step()
    return {"figures": figures, "gradients": gradients, "taken": taken, "weights": loop.weights()}


@pytest.mark.parametrize("world", PLUGINS)
@pytest.mark.product(every=2)
def test_the_wrong_order_is_refused_and_does_no_harm(world):
    ranks = run_ranks(out_of_order, world, PLUGINS[world])
    for number, plugin in enumerate(PLUGINS[world]):
        one = one_step(model_for(plugin), None, NORM)
        assert unlike_one_process([rank[number] for rank in ranks], one) == [], plugin


# -- not finite, zero, and out of range


def targets_of(layout):
    """Return a shard that only this rank has and one that others have too, if they exist."""
    there = [p for p in layout.shards if p.param.grad is not None and p.gradient.numel()]
    own = [p for p in there if p.num_replicas == 1]
    experts = [p for p in there if ".experts." in p.name]
    shared = [p for p in there if p.num_replicas > 1]
    return [kind[-1] for kind in (own, experts, shared) if kind]


def not_finite(plugins):
    return [not_finite_under(plugin, policy) for plugin in plugins for policy in POLICIES]


POLICIES = ("skip", "error", "ignore")


def not_finite_under(plugin, policy):
    """Write each bad value to a shard of each rank, and return the result of the step."""
    model = model_for(plugin)
    batch = batch_for(model)
    loop = Loop(plugin, make(model), scale=None, nonfinite=policy)
    told = []
    for culprit in range(dist.get_world_size()):
        for place, bad in enumerate((math.nan, -math.inf, math.nan)):
            loop.optimizer.zero_grad()
            loop.backward(*batch)
            loop.optimizer.unscale()
            before = [shard.weight.clone() for shard in loop.layout.shards]
            if dist.get_rank() == culprit:
                wrong = targets_of(loop.layout)
                wrong[place % len(wrong)].gradient.view(-1)[0] = bad
            gradients = loop.own_gradients()
            clip = [NORM, ("value", 0.1, 2.0), ("adaptive", 0.1, 2.0)][place]
            told.append(_fate(loop, clip, gradients, before, policy))
    return told


def _fate(loop, clip, gradients, before, policy):
    named, outcome, taken = None, None, None
    try:
        outcome = [float(figure).hex() for figure in loop.clip(clip).metrics]
    except NonFiniteGradient as error:
        named = str(error)
    kept = zip(gradients, loop.own_gradients(), strict=True)
    untouched = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in kept)
    if policy != "error":
        taken = loop.optimizer.step()
    kept = zip(loop.layout.shards, before, strict=True)
    same = all(torch.equal(shard.weight, weight) for shard, weight in kept)
    with torch.no_grad():
        for shard, weight in zip(loop.layout.shards, before, strict=True):
            shard.weight.copy_(weight)
    return {
        "named": named, "outcome": outcome, "taken": taken, "untouched": untouched, "same": same
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.product(every=2)
def test_one_bad_element_anywhere_is_known_everywhere(world):
    # Under ddp replicas of a final gradient are the same bits, so none of them is bad alone.
    plugins = [plugin for plugin in PLUGINS[world] if plugin not in ("ddp", "zero2")]
    ranks = run_ranks(not_finite, world, plugins)
    asked = [(plugin, policy) for plugin in plugins for policy in POLICIES]
    for number, (plugin, policy) in enumerate(asked):
        for rank in ranks:
            for fate, first in zip(rank[number], ranks[0][number], strict=True):
                assert fate["same"] or policy == "ignore", (plugin, policy)
                assert fate | {"same": None} == first | {"same": None}, (plugin, policy)
                assert fate["untouched"], (plugin, policy)
                if policy == "error":
                    assert "the gradient's norm is" in fate["named"]
                    assert ".weight" in fate["named"] or ".bias" in fate["named"]
                else:
                    assert fate["taken"] is (policy == "ignore")
                if policy != "error":
                    assert not math.isfinite(float.fromhex(fate["outcome"][0]))


def overflowing(plugins):
    """Return if a step with an infinite loss on one rank was taken, and the scale after it."""
    told = []
    for plugin in plugins:
        model = model_for(plugin)
        loop = Loop(plugin, make(model))
        bad = loop.plugin.data_rank == loop.plugin.data_size - 1
        loop.backward(*batch_for(model), math.inf if bad else 1.0)
        outcome = loop.clip(NORM)
        scale = loop.optimizer.loss_scale
        told.append((math.isfinite(outcome.norm), loop.optimizer.step(), scale.scale))
        loop.optimizer.zero_grad()
        loop.backward(*batch_for(model))
        told.append((math.isfinite(loop.clip(NORM).norm), loop.optimizer.step(), scale.scale))
    return told


@pytest.mark.parametrize("world", PLUGINS)
def test_one_data_parts_loss_overflows(world):
    for told in run_ranks(overflowing, world, PLUGINS[world]):
        assert told == [(False, False, 512.0), (True, True, 512.0)] * len(PLUGINS[world])


def extremes(plugins):
    """Return the metrics of a zero gradient, and of one whose squares overflow float32."""
    told = []
    for plugin in plugins:
        model = model_for(plugin)
        for clip in (NORM, ("value", 0.1, 2.0), ("adaptive", 0.1, 2.0)):
            loop = Loop(plugin, make(model, torch.float32))
            loop.backward(*batch_for(model), 0.0)
            told.append(
                ("zero", clip[0], [float(figure) for figure in loop.clip(clip).metrics], None)
            )
            loop.optimizer.zero_grad()
            loop.backward(*batch_for(model))
            loop.optimizer.unscale()
            for gradient in loop.layout.gradients()[1]:
                gradient.fill_(1e20)
            huge = (clip[0], 1e17 if clip[0] != "adaptive" else 1e-3, 2.0)
            figures = [
                float(figure) for figure in loop.clip(huge, exclude=("head.weight",)).metrics
            ]
            left = min(float(g.abs().min()) for g in loop.own_gradients() if g.numel())
            told.append(("huge", clip[0], [*figures, total_norm(loop.layout)], left))
    return told


@pytest.mark.parametrize("plugin", [None, "ddp", "fsdp", "zero1", "tensor", "1f1b", "moe"])
def test_zero_gradients_and_squares_that_overflow(plugin):
    elements = sum(p.numel() for p in make(model_for(plugin)).parameters())
    ranks = [extremes([None])] if plugin is None else run_ranks(extremes, 2, [plugin])
    for rank in ranks:
        for kind, mode, figures, left in rank:
            norm, clipped_norm, coef, clipped, fraction = figures[:5]
            if kind == "zero":
                assert (norm, clipped_norm, coef, clipped, fraction) == (0.0, 0.0, 1.0, 0.0, 0.0)
                continue
            assert norm == pytest.approx(1e20 * math.sqrt(elements), rel=1e-6)
            assert clipped == 1.0
            assert clipped_norm == pytest.approx(figures[-1], rel=1e-6)
            assert left > 0, f"{mode} left nothing of a unit"
            assert math.isfinite(figures[5])
