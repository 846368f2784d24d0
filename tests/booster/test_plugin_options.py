"""What a plugin may say for the whole Booster, and the trial steps of an optimizer over ranks."""

from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, patch

import torch
from torch import nn
from torch.optim import SGD

from runner import Booster, HybridParallelPlugin, LowLevelZeroPlugin
from runner.booster.optimizer_trial import steps_by_others
from runner.booster.optimizers import require_safe
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
    refused(ValueError, "num_microbatches=5|4 or 6", lambda: HybridParallelPlugin(**odd))
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


class Recording(SGD):
    """Notes where the parameters are that it steps."""

    seen = set()  # noqa: RUF012

    def step(self, closure=None):
        self.seen.update(p.device.type for group in self.param_groups for p in group["params"])
        return super().step(closure)


def test_a_trial_runs_on_the_device_of_the_parameters_and_restores_its_random_numbers():
    """Some options, such as ``capturable``, raise an error on another one."""
    Recording.seen.clear()
    steps_by_others(Recording([nn.Parameter(torch.ones(2, 2, device="meta"))], lr=0.1))
    assert Recording.seen == {"meta"}
    layout = SimpleNamespace(group=Mock(), shards=[], names=[])
    spread = Mock(layout=layout, steps=None, pipeline=None)
    with (
        patch.object(torch.cuda, "is_initialized", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 3),
        patch.object(torch.random, "fork_rng", MagicMock()) as fork,
    ):
        optimizer = Recording([nn.Parameter(torch.ones(2, 2))], lr=0.1)
        require_safe(optimizer, [spread], Mock(world_size=1))
    fork.assert_called_once_with(devices=[3])
