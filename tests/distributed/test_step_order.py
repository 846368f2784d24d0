"""Clipping at the wrong time is refused under every plugin."""

import pytest

from runner.booster import StepOrderError
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
