"""Other people's models under tensor parallelism, by a plan of patterns."""

import pytest
import torch
from torch import nn

from runner.booster.plugin import HybridParallelPlugin, TensorParallelPlugin
from runner.parallel.tensor_styles import PlanError
from tests.distributed.by_hand import Loop
from tests.distributed.cases import Case, differences, train
from tests.distributed.foreign import PLAN, CausalLM
from tests.ranks import run_ranks

UP = ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj")
DOWN = "layers.*.mlp.down_proj"
PARTLY = {**dict.fromkeys(UP, "colwise"), DOWN: "rowwise"}
GATHERED = PLAN | dict.fromkeys((*UP, "lm_head"), "colwise_gather_output")
GATHERED |= {DOWN: "rowwise_split_input"}
NORMED = PLAN | {"layers.*.self_attn.[qk]_norm": "replicated_with_grad_allreduce"}
# The words of cases.tokens are 16 numbers; of 17 rows one rank of four has two.
CASES = [Case("foreign", mode) for mode in ("L3", "adaptive")]
NORMED_CASE = Case("normed", "L2", steps=2)


def model(hidden=16, **more):
    torch.manual_seed(0)
    return CausalLM(hidden=hidden, **more).double()


def planned():
    plugins = [TensorParallelPlugin(tp_plan=plan) for plan in (PLAN, PARTLY, GATHERED)]
    found = [train(case, plugin) for plugin in plugins for case in CASES]
    plugins = [TensorParallelPlugin(tp_plan=NORMED)]
    if torch.distributed.get_world_size() == 4:
        plugins += [HybridParallelPlugin(tp_size=2, zero_stage=3, tp_plan=NORMED)]
    found += [train(NORMED_CASE, plugin) for plugin in plugins]
    for starts_at_zero in (False, True):
        net = model(qk_norm=True)
        for layer in net.layers if starts_at_zero else ():
            nn.init.zeros_(layer.self_attn.o_proj.weight)
        with pytest.raises(PlanError, match="replicated_with_grad_allreduce") as raised:
            train(NORMED_CASE, TensorParallelPlugin(tp_plan=PLAN), model=net)
        for norm in [f"layers.{i}.self_attn.{x}_norm.weight" for i in (0, 1) for x in "qk"]:
            assert norm in str(raised.value)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_foreign_model_is_one_process(world):
    ranks = run_ranks(planned, world)
    cases = [*CASES * 3, *[NORMED_CASE] * (world // 2)]
    for number, case in enumerate(cases):
        found = differences([rank[number] for rank in ranks], case, 1e-12)
        assert not found, (number, found[:5])


class Reused(nn.Module):
    """Computes with the weights of what is inside it, which torch refuses by itself."""

    def __init__(self, attends):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if attends else None

    def forward(self, tokens):
        hidden = self.embed(tokens)
        if self.attention is not None:
            return self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden @ self.embed.weight.T


def refusals():
    """Errors in the forward pass, on this rank."""
    said = []
    for net, token in ((model(), 17), (model(), -1), (Reused(False), 1), (Reused(True), 1)):
        plan = PLAN if isinstance(net, CausalLM) else {"embed": "embedding_rowwise"}
        loop = Loop(TensorParallelPlugin(tp_plan=plan), net)
        with pytest.raises((IndexError, RuntimeError)) as raised:
            loop.model(torch.tensor([[2, token, 3]]))
        said.append(str(raised.value))
    return said


def test_what_goes_wrong_in_the_forward_pass_is_said_by_every_rank():
    first, second = run_ranks(refusals, 2)
    assert first == second
    names = ["index out of range"] * 2 + ["mixed torch.Tensor and DTensor"] * 2
    for message, name in zip(first, names, strict=True):
        assert name in message
