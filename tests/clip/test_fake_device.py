"""Modes on tensors that claim to be those of a GPU: torch's fake ones, which no host can read."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.clip import build
from runner.clip.groups import by_parameter_groups
from runner.config.modes import MODES, NAMES
from runner.gradients import Layout

OPTIONS = {
    "adaptive": {"threshold": 2.0, "exclude": ["0.*"]},
    "chain": {"links": [{"mode": "value", "threshold": 0.5}, {"mode": "adagc", "threshold": 1.05}]},
    "groups": {"groups": {"0.*": 1.0, "*": {"mode": "adaptive", "threshold": 0.1}}},
    "none": {},
}


class Copies(TorchDispatchMode):
    """Records tensors that are made of Python numbers, which have to be copied to the device."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith("lift_fresh"):
            self.made.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in NAMES if not MODES[name].info.needs_optimizer])
def test_a_mode_copies_no_numbers_to_a_gpu_after_its_first_step(name):
    with FakeTensorMode():
        with torch.device("cuda"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        layout = Layout.of_model(model)
        layout.orthogonalized = frozenset(["1.weight"])
        mode = build(name, **OPTIONS.get(name, {"threshold": 2.0}))
        if name == "chain":
            mode.scales = "all"
        mode.bind(layout)
        clipper = by_parameter_groups(mode, layout)
        clipper.clip(layout)
        with Copies() as copies:
            decision = clipper.clip(layout)
    assert decision.norm.device.type == "cuda"
    assert copies.made == []
