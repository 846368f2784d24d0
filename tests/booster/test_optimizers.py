"""The trial steps that tell whether an optimizer may be used leave no trace, on any device."""

from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, patch

import torch
from torch import nn
from torch.optim import SGD

from runner.booster.optimizer_trial import steps_by_others
from runner.booster.optimizers import require_safe

seen: set[str] = set()


class Recording(SGD):
    """Notes where the parameters are that it steps."""

    def step(self, closure=None):
        seen.update(p.device.type for group in self.param_groups for p in group["params"])
        return super().step(closure)


def test_a_trial_runs_on_the_device_of_the_parameters():
    """Some options, such as ``capturable``, raise an error on another one."""
    seen.clear()
    steps_by_others(Recording([nn.Parameter(torch.ones(2, 2, device="meta"))], lr=0.1))
    assert seen == {"meta"}


def test_a_trial_restores_the_random_numbers_of_the_accelerator():
    optimizer = Recording([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    layout = SimpleNamespace(group=Mock(), shards=[], names=[])
    spread = Mock(layout=layout, steps=None, pipeline=None)
    with (
        patch.object(torch.cuda, "is_initialized", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 3),
        patch.object(torch.random, "fork_rng", MagicMock()) as fork,
    ):
        require_safe(optimizer, [spread], Mock(world_size=1))
    fork.assert_called_once_with(devices=[3])
