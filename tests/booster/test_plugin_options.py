"""What a plugin may say for the whole Booster, under the names of Colossal-AI's plugins."""

import pytest
import torch
from torch import nn

from runner import Booster, HybridParallelPlugin, LowLevelZeroPlugin
from tests.ranks import run_ranks


def one_step(plugin, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    booster = Booster(plugin=plugin(**options))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, *_ = booster.boost(model, optimizer)
    outputs = model(torch.ones(2, 4))
    booster.backward(outputs.square().sum(), optimizer)
    optimizer.step()
    weights = booster.state_dict(model)
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
    moved = (weights["weight"] - before).norm().item() if weights else None
    return booster.dtype, scale, moved


def steps():
    return [
        one_step(LowLevelZeroPlugin, stage=1),
        one_step(LowLevelZeroPlugin, stage=1, max_norm=0.1),
        one_step(LowLevelZeroPlugin, stage=2, max_norm=0.1),
        one_step(HybridParallelPlugin, tp_size=1, pp_size=1, max_norm=0.1, precision="bf16"),
        one_step(HybridParallelPlugin, precision="fp16", initial_scale=2**4),
    ]


def test_precision_scale_and_max_norm_come_from_the_plugin():
    free, first, second, half, scaled = run_ranks(steps, 2)[0]
    assert free[2] > 1.0
    # The bias takes its share of the norm, the same in each.
    assert 0.05 < first[2] < 0.1
    assert abs(first[2] - second[2]) < 1e-6
    assert half[0] is torch.bfloat16
    assert 0.05 < half[2] < 0.1
    assert scaled[:2] == (torch.float16, 2.0**4)


def refusals():
    """What each plugin says of options that do not go together."""
    said = []
    for plugin, options in (
        (LowLevelZeroPlugin, {"stage": 1, "param_dtype": "bf16"}),
        (LowLevelZeroPlugin, {"stage": 1, "cpu_offload": True}),
        (HybridParallelPlugin, {"zero_stage": 7}),
        (
            HybridParallelPlugin,
            {"pp_size": 2, "schedule": "interleaved_1f1b", "num_microbatches": 5},
        ),
    ):
        with pytest.raises(ValueError, match=" ") as caught:
            plugin(**options)
        said.append(str(caught.value))
    return said


def test_options_that_do_not_go_together_are_refused():
    dtype, offload, stage, rounds = run_ranks(refusals, 2)[0]
    assert dtype == offload == "param_dtype and cpu_offload go with zero_stage 2 and 3, not 1"
    assert stage == "zero_stage is 0, 1, 2 or 3, not 7"
    assert rounds.startswith("num_microbatches=5: pp_size=2 with schedule=interleaved_1f1b is 4")
    assert rounds.endswith("5 microbatches make no equal rounds: give 4 or 6")
