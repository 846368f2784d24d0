"""What a plugin may say for the whole Booster."""

import torch
from torch import nn
from torch.optim import SGD

from runner import Booster, HybridParallelPlugin, LowLevelZeroPlugin
from tests.clip.reference import refused
from tests.ranks import run_ranks


def one_step(plugin):
    torch.manual_seed(0)
    model, booster = nn.Linear(4, 3), Booster(plugin=plugin)
    before = model.weight.detach().clone()
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0))
    booster.backward(model(torch.ones(2, 4)).square().sum(), optimizer)
    optimizer.step()
    weights = booster.state_dict(model)
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
    moved = (weights["weight"] - before).norm().item() if weights else None
    return booster.dtype, scale, moved


def body():
    for options in ({"param_dtype": "bf16"}, {"cpu_offload": True}):
        words = "cpu_offload|zero_stage 2 and 3"
        refused(ValueError, words, lambda o=options: LowLevelZeroPlugin(stage=1, **o))
    refused(ValueError, "zero_stage|not 7", lambda: HybridParallelPlugin(zero_stage=7))
    odd = {"pp_size": 2, "schedule": "interleaved_1f1b", "num_microbatches": 5}
    refused(ValueError, "num_microbatches=5|multiple of 2", lambda: HybridParallelPlugin(**odd))
    return [
        one_step(plugin)
        for plugin in (
            LowLevelZeroPlugin(stage=1),
            LowLevelZeroPlugin(stage=1, max_norm=0.1),
            LowLevelZeroPlugin(stage=2, max_norm=0.1),
            HybridParallelPlugin(tp_size=1, pp_size=1, max_norm=0.1, precision="bf16"),
            HybridParallelPlugin(precision="fp16", initial_scale=2**4),
        )
    ]


def test_precision_scale_and_max_norm_come_from_the_plugin():
    free, first, second, half, scaled = run_ranks(body, 2)[0]
    assert free[2] > 1.0
    # The bias takes its share of the norm, the same in each.
    assert 0.05 < first[2] < 0.1
    assert abs(first[2] - second[2]) < 1e-6
    assert half[0] is torch.bfloat16
    assert 0.05 < half[2] < 0.1
    assert scaled[:2] == (torch.float16, 2.0**4)
