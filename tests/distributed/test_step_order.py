"""Clipping at the wrong time, and gradients that are zero, tiny, huge or not finite."""

import math

import pytest
import torch

from runner.booster import StepOrderError
from runner.clip import total_norm
from tests.distributed.by_hand import NORM, Loop, cross_entropy, one_step, unlike_one_process
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

PLUGINS = {
    2: ("ddp", "fsdp", "zero1", "zero2", "tensor", "1f1b", "moe"),
    4: ("hybrid", "hybrid_zero1", "hybrid_fsdp_pp", "moe_dp"),
}


def model_for(plugin):
    return "moe" if "moe" in plugin else "gpt"


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
    return loop.stepped()


@pytest.mark.parametrize("world", PLUGINS)
def test_the_wrong_order_is_refused_and_does_no_harm(world):
    ranks = run_ranks(out_of_order, world, PLUGINS[world])
    for number, plugin in enumerate(PLUGINS[world]):
        one = one_step(model_for(plugin), None, NORM)
        assert unlike_one_process([rank[number] for rank in ranks], one) == [], plugin


FILLED = (0.0, 1e-25, 1e20, 1e25, math.inf, math.nan)
"""Values that fill a gradient in float32, in which their squares over- or underflow."""

KINDS = ("norm", "value", "adaptive")


def extremes(plugins):
    """For each plugin, value and mode: metrics, the norm of what is left and its least element."""
    told = []
    for plugin in plugins:
        model = model_for(plugin or "")
        loop = Loop(plugin, make(model, torch.float32), nonfinite="ignore")
        for value in FILLED:
            for mode in KINDS:
                loop.optimizer.zero_grad()
                loop.backward(*batch_for(model))
                loop.optimizer.unscale()
                for gradient in loop.layout.gradients()[1]:
                    gradient.fill_(value)
                # Half of what is there; adaptive clipping limits each unit by its weights.
                limit = value / 2 if 0.0 < value < math.inf else 0.1
                clip = (mode, limit if mode != "adaptive" else 1e-3, 2.0)
                metrics = [float(m) for m in loop.clip(clip, exclude=("head.weight",)).metrics]
                left = min(float(g.abs().min()) for g in loop.own_gradients() if g.numel())
                told.append((metrics, total_norm(loop.layout), left))
    return told


def test_zeros_and_squares_that_over_or_underflow():
    plugins = ("ddp", "fsdp", "zero1", "tensor", "1f1b", "moe")
    ranks = [*run_ranks(extremes, 2, plugins), extremes([None])]
    asked = [(p, value, mode) for p in plugins for value in FILLED for mode in KINDS]
    for rank in ranks:
        for (plugin, value, mode), (metrics, after, left) in zip(asked, rank, strict=False):
            at = f"{plugin}, {value}, {mode}: {metrics}"
            norm, norm_clipped, coef, clipped, fraction = metrics[:5]
            elements = sum(p.numel() for p in make(model_for(plugin)).parameters())
            if value == 0.0:
                assert (norm, norm_clipped, coef, clipped, fraction) == (0, 0, 1, 0, 0), at
            elif not math.isfinite(value):
                assert not math.isfinite(norm), at
            else:
                assert norm == pytest.approx(value * math.sqrt(elements), rel=1e-6), at
                assert norm_clipped == pytest.approx(after, rel=1e-6), at
                assert clipped == (mode != "adaptive" or value > 1), at
                assert math.isfinite(metrics[5]), at
                assert left > 0, at
