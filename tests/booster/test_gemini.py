"""GeminiPlugin answers with the plugin that does its work."""

import logging

import pytest
import torch
from torch import nn

from runner import Booster, GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from tests.ranks import run_ranks


def trained(plugin, precision=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    booster = Booster(precision, plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(3):
        inputs = torch.full((2, 6), 1.0 + plugin.data_rank)
        booster.backward(model(inputs).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster.state_dict(model), optimizer.get_grad_norm()


def every_choice():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("runner.booster.plugin.gemini")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    refused = []
    for error, options in (
        (TypeError, {"placment_policy": "static"}),
        (ValueError, {"placement_policy": "cuda"}),
        (ValueError, {"norm_type": 1.0}),
        (ValueError, {"extra_dp_size": 2}),
    ):
        with pytest.raises(error) as caught:
            GeminiPlugin(**options)
        refused.append(str(caught.value))
    third = GeminiPlugin(placement_policy="auto", strict_ddp_mode=True, initial_scale=2**5)
    second = GeminiPlugin(shard_param_frac=0.0, offload_optim_frac=1.0, max_norm=0.01)
    tensor = GeminiPlugin(tp_size=2, enable_sequence_parallelism=True, precision="bf16")
    half = GeminiPlugin(precision="fp16", initial_scale=2**5)
    return {
        "is": isinstance(third, HybridParallelPlugin),
        "stages": [each.zero_stage for each in (third, second, tensor)],
        "offloads": [each.sharding.cpu_offload for each in (third, second, tensor)],
        "sizes": [(each.sizes.dp, each.sizes.tp) for each in (third, second, tensor)],
        "sequence": tensor.sequence_parallel,
        "scale": Booster(plugin=half).loss_scale.scale,
        "free": trained(third),
        "zero": trained(LowLevelZeroPlugin(stage=1)),
        "limited": trained(second)[1],
        "half": trained(third, "fp16")[1],
        "said": said,
        "refused": refused,
    }


def test_gemini_is_sharded_data_parallelism():
    first, second = run_ranks(every_choice, 2)
    assert first["is"]
    assert first["stages"] == [3, 2, 3]
    assert first["offloads"] == [False, True, False]
    assert first["sizes"] == [(2, 1), (2, 1), (1, 2)]
    assert first["sequence"] is True
    assert first["scale"] == 2**5
    weights, norm = first["free"]
    assert weights.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, tensor in first["zero"][0].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)
    assert norm is None, "nothing was clipped, so nothing was measured"
    assert first["limited"] == pytest.approx(second["limited"])
    assert first["limited"] > 0.01, "the norm before clipping"
    assert first["said"][:3] == [
        f"GeminiPlugin: HybridParallelPlugin({options}) does its work"
        for options in (
            "zero_stage=3",
            "zero_stage=2, cpu_offload=True",
            "zero_stage=3, tp_size=2, sequence_parallel=True",
        )
    ]
    assert second["said"] == [], "one rank says it"
    unknown, policy, norm_type, replicas = first["refused"]
    assert unknown == "GeminiPlugin has no argument placment_policy"
    assert policy == "placement_policy is static or auto, not 'cuda'"
    assert "optimizer.clip_grad_by_norm(max_norm, norm_type)" in norm_type
    assert "TorchFSDPPlugin(dp_replicate=2)" in replicas
