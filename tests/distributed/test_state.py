"""The whole model from its parts, the same weights on every rank, and options of sharded layers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.booster.plugin import LowLevelZeroPlugin, TorchFSDPPlugin
from tests.distributed.cases import MODELS, Case, alone, differences, train, trainer
from tests.ranks import run_ranks

FAMILIES = {
    "fsdp": 2,
    "zero1": 2,
    "zero3": 2,
    "tensor": 2,
    "1f1b": 2,
    "zero_bubble": 2,
    "moe_dp": 4,
    "hybrid": 4,
    "hybrid_fsdp_tp": 4,
}


def whole_of(plugin, model):
    """The state of a model that every rank drew from a seed of its own, before any step."""
    torch.manual_seed(torch.distributed.get_rank())
    net = MODELS[model]().double()
    made = trainer(Case(model, "L2"), plugin, model=net)
    return made.booster.state_dict(made.model)


@pytest.mark.parametrize("plugin", FAMILIES)
def test_the_first_ranks_weights_are_everybodys_and_whole_again(plugin):
    model = "moe" if plugin.startswith("moe") else "tied"
    states = run_ranks(whole_of, FAMILIES[plugin], plugin, model)
    torch.manual_seed(0)
    first = MODELS[model]().double()
    assert states[0].keys() == dict(first.named_parameters()).keys()
    for name, weight in first.named_parameters():
        assert torch.equal(states[0][name], weight), name
    assert not any(states[1:])
    first.load_state_dict(states[0], strict=False)


class Recomputed(nn.Module):
    """A block that keeps no activations."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        return checkpoint(self.block, hidden, use_reentrant=False)


def with_checkpoints():
    torch.manual_seed(0)
    model = MODELS["gpt"]().double()
    model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    model.tp_plan = {
        pattern.replace("blocks.*", "blocks.*.block"): style
        for pattern, style in model.tp_plan.items()
    }
    return model


def recomputed(plugin):
    case = Case("gpt", "adaptive", 2, steps=2)
    return train(case, plugin, model=with_checkpoints()), train(case, plugin)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "tensor", "1f1b"])
def test_t18_activation_checkpointing_changes_nothing(plugin):
    ranks = run_ranks(recomputed, 2, plugin)
    for rank in ranks:
        for ours, plain in zip(rank[0]["rows"], rank[1]["rows"], strict=True):
            for key in ("train/loss", "grad/norm", "grad/norm_clipped", "clip/fraction"):
                assert ours[key] == pytest.approx(plain[key], rel=1e-12), key


OPTIONS = {
    "offload": lambda: TorchFSDPPlugin(cpu_offload=True),
    "zero_offload": lambda: LowLevelZeroPlugin(stage=3, cpu_offload=True),
}


def with_option(name):
    return train(Case("gpt", "adaptive", 2, steps=2), OPTIONS[name]())


@pytest.mark.parametrize("name", OPTIONS)
def test_t18_shards_in_host_memory_change_nothing(name):
    ranks = run_ranks(with_option, 2, name)
    assert not differences(ranks, Case("gpt", "adaptive", 2, steps=2), 1e-12)


def computed_in_bf16():
    case = Case("gpt", "L2", 1, double=False, steps=2, rate=0.1)
    return train(case, TorchFSDPPlugin(param_dtype="bf16"))


def test_parameters_gathered_in_bf16_stay_float32():
    case = Case("gpt", "L2", 1, double=False, steps=2, rate=0.1)
    for rank in run_ranks(computed_in_bf16, 2):
        for row, wanted in zip(rank["rows"], alone(case)["rows"], strict=True):
            # Forward and backward in bf16: eight bits.
            assert row["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=4 * 2.0**-8)
            assert row["grad/norm"] != wanted["grad/norm"]
        assert all(weight.dtype == torch.float32 for weight in rank["weights"].values())
