"""The stand-ins that torch clips hold the same gradients as the plugin's layout."""

import pytest
import torch
from torch import nn

from runner.bench.parallel import PLUGINS, Transformer, _with_gradients
from runner.booster import Booster
from runner.clip import build, total_norm
from tests.ranks import run_ranks


def clipped(name):
    """‖G‖ by this project and by torch, and the largest difference of clipped gradients."""
    torch.manual_seed(0)
    model = Transformer(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, wrapped, *_ = Booster(plugin=PLUGINS[name]()).boost(model, optimizer)
    layout = wrapped.layout
    torch.manual_seed(1)
    stand_ins = _with_gradients(layout)
    own = float(total_norm(layout))
    kept = [stand_in.grad.to_local().clone() for stand_in in stand_ins]
    torchs = nn.utils.clip_grad_norm_(stand_ins, 0.5 * own, foreach=True).full_tensor().item()
    theirs = [stand_in.grad.to_local().clone() for stand_in in stand_ins]
    for stand_in, gradient in zip(stand_ins, kept, strict=True):
        stand_in.grad.to_local().copy_(gradient)
    with torch.no_grad():
        build("norm", threshold=0.5 * own).clip(layout)
    ours = [shard.gradient for shard in layout.shards]
    worst = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True) if a.numel())
    return len(stand_ins), own, torchs, worst


@pytest.mark.parametrize("name", PLUGINS)
def test_torch_clips_the_same_gradients(name):
    for tensors, own, torchs, worst in run_ranks(clipped, 4, name):
        assert tensors == 29
        assert torchs == pytest.approx(own, rel=1e-5)
        assert worst < 1e-8
