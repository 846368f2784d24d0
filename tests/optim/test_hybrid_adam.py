"""torch's Adam and AdamW under Colossal-AI's name."""

import pytest
import torch
from torch import nn

from runner import HybridAdam


@pytest.mark.parametrize("wanted", [torch.optim.AdamW, torch.optim.Adam])
def test_its_steps_are_those_of_torch(wanted):
    def trained(make, **options):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = make(model.parameters(), lr=0.05, eps=1e-6, weight_decay=0.1, **options)
        for _ in range(5):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight, optimizer

    plain, theirs = trained(wanted, foreach=False)
    weight, ours = trained(HybridAdam, adamw_mode=wanted is torch.optim.AdamW)
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=1e-7)
    assert type(ours) is wanted
    theirs.load_state_dict(ours.state_dict())


def test_its_defaults_are_those_of_colossal_ai():
    group = HybridAdam([{"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}]).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.9, 0.999), 1e-8)
    assert group["weight_decay"] == 0
    assert group["fused"]
    assert group["decoupled_weight_decay"]


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"bias_correction": False}, "bias_correction=True"),
        ({"nvme_offload_fraction": 0.5}, "LowLevelZeroPlugin"),
    ],
)
def test_what_torch_cannot_do_is_refused(option, named):
    with pytest.raises(ValueError, match=named):
        HybridAdam([nn.Parameter(torch.ones(1))], **option)
