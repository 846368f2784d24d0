"""The whole model from its parts, the same weights on every rank, and options of sharded layers."""

import pytest
import torch
from torch import _dynamo as dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.booster.plugin import LowLevelZeroPlugin, TorchFSDPPlugin
from tests.distributed.by_hand import Loop
from tests.distributed.cases import MODELS, Case, alone, differences, train, trainer
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

FAMILIES = {
    ("ddp", 2): "conv",
    ("fsdp", 2): "tied",
    ("hsdp", 4): "conv",
    ("zero1", 2): "tied",
    ("zero3", 2): "tied",
    ("tensor", 2): "tied",
    ("1f1b", 2): "tied",
    ("zero_bubble", 2): "tied",
    ("moe_dp", 4): "moe",
    ("hybrid", 4): "tied",
    ("hybrid_fsdp_tp", 4): "tied",
    ("hybrid_ep_pp", 4): "moe",
}


def drawn(model, seed):
    """A model with a buffer that belongs to its state, and one that does not."""
    torch.manual_seed(seed)
    net = MODELS[model]().double()
    first = net.get_submodule("0" if model == "conv" else "embed")
    first.register_buffer("seen", torch.randn(3))
    first.register_buffer("scratch", torch.randn(3), persistent=False)
    return net


def whole_of(plugin, model):
    """The state of a model that every rank drew from a seed of its own, before any step."""
    net = drawn(model, torch.distributed.get_rank())
    made = trainer(Case(model, "L2"), plugin, model=net)
    return made.booster.state_dict(made.model)


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
def test_the_first_ranks_weights_are_everybodys_and_whole_again(plugin, world):
    model = FAMILIES[plugin, world]
    first, *others = run_ranks(whole_of, world, plugin, model)
    wanted = drawn(model, 0).state_dict()
    # Tied parameters under both of their names, as one process has them.
    assert list(first) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(first[name], tensor), name
    assert not any(others)
    drawn(model, 1).load_state_dict(first)


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
def test_activation_checkpointing_changes_nothing(plugin):
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
def test_shards_in_host_memory_change_nothing(name):
    ranks = run_ranks(with_option, 2, name)
    assert not differences(ranks, Case("gpt", "adaptive", 2, steps=2), 1e-12)


def computed_in_half(dtype):
    case = Case("gpt", "L2", 1, double=False, steps=2, rate=0.1)
    return train(case, TorchFSDPPlugin(param_dtype=dtype))


@pytest.mark.parametrize(("dtype", "roundoff"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_parameters_gathered_in_half_precision_stay_float32(dtype, roundoff):
    case = Case("gpt", "L2", 1, double=False, steps=2, rate=0.1)
    for rank in run_ranks(computed_in_half, 2, dtype):
        for row, wanted in zip(rank["rows"], alone(case)["rows"], strict=True):
            # All of forward and backward is rounded, parameters and residual stream too.
            assert row["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=4 * roundoff)
            assert row["grad/norm"] != wanted["grad/norm"]
            # The loss is taken in float32: a sum in half precision would be off by 5 in 1000.
            assert row["train/loss"] == pytest.approx(wanted["train/loss"], rel=roundoff / 4)
        assert all(weight.dtype == torch.float32 for weight in rank["weights"].values())


def compiled(plugin):
    """Through dynamo and the ahead-of-time differentiated graph; no code is generated, which takes
    a minute and longer here.
    """
    torch.manual_seed(0)
    case = Case("tied", "adaptive", 2, steps=2)
    model = MODELS["tied"]().double()
    model.compile(backend="aot_eager")
    result = train(case, plugin, model=model)
    assert dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return result


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.product(every=2)
def test_a_compiled_model_is_clipped_alike(plugin):
    ranks = run_ranks(compiled, 2, plugin)
    assert not differences(ranks, Case("tied", "adaptive", 2, steps=2), 1e-12)


def looked_at_before_the_step(plugins):
    """Outputs after a step, of a model that was also looked at between backward pass and step."""
    inputs, targets = batch_for("gpt")
    found = []
    for plugin in plugins:
        loop = Loop(plugin, make("gpt"))
        loop.backward(inputs, targets)
        with torch.no_grad():
            loop.model(loop.part(inputs))
        loop.optimizer.step()
        with torch.no_grad():
            loop.model(loop.part(inputs))
            found.append(loop.model(inputs))
    return found


def test_a_forward_pass_between_backward_pass_and_step_leaves_no_old_weights_behind():
    plugins = ["fsdp", "fsdp_gathered", "zero2", "zero3"]
    [wanted] = looked_at_before_the_step([None])
    for rank in run_ranks(looked_at_before_the_step, 2, plugins):
        for outputs in rank:
            torch.testing.assert_close(outputs, wanted, rtol=1e-12, atol=1e-12)
